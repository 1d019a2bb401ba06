"""Radix keys with positions: a pure model of a tree, without SGLang, and the hook on SGLang's key."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from spec_stack.sglang.positions import PositionedRadixKey, PositionMap, encode_positions

Token = tuple[int, int]  # id, position


def _key(sequence: list[Token], num_prompt: int, num_prompt_tokens: int) -> tuple[int, ...]:
    """The key under which a request's first tokens are looked up: the prompt's map places what was generated too."""
    kept = [position for _, position in sequence[:num_prompt]]
    positions = PositionMap(kept, num_prompt_tokens)
    return tuple(PositionedRadixKey.of(positions, None).place(array("q", [token_id for token_id, _ in sequence])))


@pytest.mark.parametrize("seed", range(12))
def test_no_lookup_ever_finds_kv_that_was_computed_at_other_positions(seed: int) -> None:
    """Random conversations that branch, over a small vocabulary, so that ids alone agree often; with retractions."""
    rng = random.Random(seed)
    tree: dict[tuple[int, ...], tuple[int, ...]] = {}
    by_ids: dict[tuple[int, ...], tuple[int, ...]] = {}
    conversations: list[tuple[list[int], list[int]]] = [([], [])]
    num_hits = num_wrong_by_ids = 0
    for _ in range(200):
        dense, kept = (list(part) for part in rng.choice(conversations))
        new = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
        keeps_all = rng.random() < 0.3
        dropped = sorted(set(range(len(dense))) - set(kept))
        kept += sorted(rng.sample(dropped, rng.randrange(len(dropped) + 1))) if rng.random() < 0.5 else []
        kept += [len(dense) + at for at in range(len(new)) if keeps_all or at == len(new) - 1 or rng.random() < 0.6]
        dense += new
        reply = [rng.randrange(3) for _ in range(rng.randrange(5))]
        prompt = [(dense[position], position) for position in kept]
        whole = prompt + [(token_id, len(dense) + at) for at, token_id in enumerate(reply)]
        for sequence in (prompt, whole):
            placed = _key(sequence, len(prompt), len(dense))
            ids = tuple(token_id for token_id, _ in sequence)
            positions = tuple(position for _, position in sequence)
            for end in range(len(sequence), 0, -1):
                if placed[:end] in tree:
                    num_hits += 1
                    assert tree[placed[:end]] == positions[:end]
                num_wrong_by_ids += by_ids.get(ids[:end], positions[:end]) != positions[:end]
        placed = _key(whole, len(prompt), len(dense))
        for end in range(1, len(whole) + 1):
            positions = tuple(position for _, position in whole[:end])
            tree.setdefault(placed[:end], positions)
            by_ids.setdefault(tuple(token_id for token_id, _ in whole[:end]), positions)
        conversations.append((dense + reply, [position for _, position in whole]))
    assert num_hits > 100
    assert num_wrong_by_ids > 10, "the control: keys of ids alone do go wrong here"


def test_where_nothing_is_dropped_the_key_is_the_dense_one() -> None:
    key = PositionedRadixKey.of(PositionMap([0, 1, 2, 7, 8], 9), "tenant")
    assert list(key.place(array("q", [5, 6, 7, 8, 9, 10, 11])))[:3] == [5, 6, 7]
    assert list(key.place([8, 9, 10, 11, 12, 13]))[3] == 11 + (4 << 32)
    assert key.namespace == "tenant"


def test_a_key_is_placed_once_and_keeps_the_clients_namespace() -> None:
    seen: list[Any] = []

    def init(key: Any, token_ids: Any, extra_key: Any, **others: Any) -> None:
        seen.append((list(token_ids), extra_key, others))

    placed = PositionedRadixKey.of(PositionMap([0, 2], 3), "tenant")
    encode_positions(init, None, array("q", [4, 5, 6]), placed, cache_salt="salt")
    encode_positions(init, None, array("q", [4, 5, 6]), "tenant")
    assert seen == [
        ([4, 5 + (1 << 32), 6 + (1 << 32)], "tenant", {"cache_salt": "salt"}),
        ([4, 5, 6], "tenant", {}),
    ]
