"""What a prompt is built on and what comes back, against a model that keeps whole lists. No server."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.sglang.prefix_reuse import CachedPrefix, TurnStore, plan_prefill
from tests.support.reference_session import dropped_chunks_to_restore

CONFIG = PrefillConfig(chunk_size=4, keep_rate=0.3, keep_last=1)
RECALLING = SessionConfig(recall_threshold=1.0, max_recalled_chunks=3, recall_margin=2, recall_word_threshold=None)


@dataclass
class Request:
    output_ids: list[int] = field(default_factory=list)
    finished_len: int | None = None
    has_finished: bool = False

    def finished(self) -> bool:
        return self.has_finished


@given(st.randoms(use_true_random=False))
def test_the_beginning_is_what_was_written_before_the_first_token_that_differs(rng: random.Random) -> None:
    """Random conversations with branches and edits over a small vocabulary. A turn counts where its whole prompt, the
    question too, is in the new one."""
    turns = TurnStore(10_000)
    remembered: list[tuple[str, list[int], list[int], int]] = []
    for _ in range(12):
        tenant = rng.choice("ab")
        _, text, _, _ = rng.choice(remembered) if remembered else ("", [], [], 0)
        prompt = [*text[: rng.randrange(len(text) + 1)], *(rng.randrange(2) for _ in range(rng.randrange(1, 9)))]
        found = turns.find(tenant, prompt)
        common = [
            (
                next(
                    (at for at, (a, b) in enumerate(zip(old, prompt[:-1], strict=False)) if a != b),
                    min(len(old), len(prompt) - 1),
                ),
                positions,
            )
            for owner, old, positions, num_asked in remembered
            if owner == tenant and old[:num_asked] == prompt[:-1][:num_asked]
        ]
        longest = max((length for length, _ in common), default=0)
        assert found.num_tokens == longest
        held = []
        for _, positions in [entry for entry in common if entry[0] == longest and longest]:
            first_wrong = next((at for at, position in enumerate(positions) if position >= longest), len(positions))
            held.append(tuple(positions[:first_wrong]))
        assert found.positions in held or not longest
        dropped = [position for position in range(found.num_tokens) if position not in found.positions]
        recalled = sorted(rng.sample(dropped, rng.randrange(len(dropped) + 1)))
        new = range(found.num_tokens, len(prompt))
        kept = [position for position in new if position == len(prompt) - 1 or rng.random() < 0.5]
        positions = [*sorted([*found.positions, *recalled]), *kept]
        request = Request([rng.randrange(2) for _ in range(4)], rng.choice([None, 3]))
        turns.add(tenant, prompt, tuple(positions), request)  # type: ignore[arg-type]
        reply = request.output_ids[: request.finished_len][:-1]
        request.has_finished = True
        turns.take_in_replies()
        after = range(len(prompt), len(prompt) + len(reply))
        remembered.append((tenant, [*prompt, *reply], [*positions, *after], len(prompt)))


def test_a_reply_is_taken_in_when_it_has_ended_without_its_last_token() -> None:
    turns, request = TurnStore(100), Request([7, 8, 9])
    turns.add("", [1, 2, 3], (0, 2), request)  # type: ignore[arg-type]
    turns.take_in_replies()
    assert turns.find("", [1, 2, 3, 7, 8, 9, 4]) == CachedPrefix(3, (0, 2))
    request.has_finished = True
    turns.take_in_replies()
    assert turns.find("", [1, 2, 3, 7, 8, 9, 4]) == CachedPrefix(5, (0, 2, 3, 4))


def test_a_request_that_was_dropped_before_its_end_is_not_held_and_its_prompt_is_remembered() -> None:
    turns, request = TurnStore(100), Request([7, 8, 9])
    turns.add("", [1, 2, 3], (0, 2), request)  # type: ignore[arg-type]
    held = weakref.ref(request)
    del request
    gc.collect()
    assert held() is None
    turns.take_in_replies()
    assert not turns._answering
    assert turns.find("", [1, 2, 3, 7, 8, 9, 4]) == CachedPrefix(3, (0, 2))


def test_the_reply_of_a_request_that_goes_in_the_round_in_which_it_ends_is_taken_in() -> None:
    turns, request = TurnStore(100), Request([7])
    turns.add("", [1, 2, 3], (0, 2), request)  # type: ignore[arg-type]
    turns.take_in_replies()
    request.output_ids, request.has_finished = [7, 8, 9], True
    del request
    gc.collect()
    turns.take_in_replies()
    assert not turns._answering
    assert turns.find("", [1, 2, 3, 7, 8, 9, 4]) == CachedPrefix(5, (0, 2, 3, 4))


def test_the_turn_that_was_not_gone_on_from_for_longest_is_forgotten_first() -> None:
    turns = TurnStore(30)
    for start in (0, 100, 200):
        turns.add("", range(start, start + 10), (0, 9), Request())  # type: ignore[arg-type]
    assert turns.find("", range(0, 20)).num_tokens == 10
    turns.add("", range(300, 310), (0, 9), Request())  # type: ignore[arg-type]
    assert [turns.find("", range(start, start + 20)).num_tokens for start in (0, 100, 200, 300)] == [10, 0, 10, 10]


def test_a_neighbour_who_asks_something_else_takes_nothing_over() -> None:
    turns = TurnStore(1000)
    document = list(range(100, 180))
    turns.add("", [*document, 1, 2, 3], (*range(40), 60, 61, 82), Request())  # type: ignore[arg-type]
    assert turns.find("", [*document, 7, 8, 9]) == CachedPrefix()
    assert turns.find("", [*document, 1, 2, 3, 50, 7]).num_tokens == 83


@given(st.randoms(use_true_random=False), st.booleans())
def test_what_comes_back_is_what_the_sessions_oracle_restores(rng: random.Random, prunes: bool) -> None:
    num_tokens = rng.randrange(20, 90)
    prompt = [rng.randrange(50) for _ in range(num_tokens)]
    num_cached = rng.randrange(4, num_tokens - 1)
    held = tuple(sorted(rng.sample(range(num_cached), rng.randrange(1, num_cached))))
    # Sums of these are exact in every precision, so ties are ties.
    importance = torch.tensor([rng.randrange(64) / 64 for _ in range(num_tokens)])
    given_to = plan_prefill(
        prompt,
        CachedPrefix(num_cached, held),
        importance,
        prunes,
        RECALLING,
        CONFIG,
        [(num_cached, num_cached + 2)],
    )
    expected = dropped_chunks_to_restore(importance.tolist(), held, num_cached, 4, 1.0, 3, margin=2)
    old = given_to.positions[: len(held) + len(expected)]
    assert list(old) == sorted([*held, *expected])
    new = given_to.positions[len(held) + len(expected) :]
    assert new == tuple(sorted(set(new)))
    assert {num_cached, num_tokens - 1} <= set(new) <= set(range(num_cached, num_tokens))
    assert prunes or new == tuple(range(num_cached, num_tokens))
    assert given_to.token_ids == tuple(prompt[position] for position in given_to.positions)
    assert (given_to.num_cached, given_to.num_recalled) == (num_cached, len(expected))


def test_old_text_that_shares_rare_words_with_the_question_is_recalled_without_a_draft() -> None:
    document = list(range(100, 180))
    prompt = [*document, 900, 901, 141, 142, 902]
    beginning = CachedPrefix(80, (*range(8), *range(72, 80)))
    config = PrefillConfig(chunk_size=4, scorer="bm25")
    given_to = plan_prefill(prompt, beginning, None, False, SessionConfig(recall_margin=0), config, ())
    # 141 and 142 stand at 41 and 42, in the chunk from 40 on.
    assert given_to.positions == (*range(8), 40, 41, 42, 43, *range(72, 85))
    assert given_to.num_recalled == 4


def test_frozen_text_stays_away() -> None:
    given_to = plan_prefill(range(40), CachedPrefix(30, (0, 5)), torch.ones(40), False, None, CONFIG, ())
    assert given_to.positions == (0, 5, *range(30, 40))


@pytest.mark.parametrize(("num_tokens", "is_worth_it"), [(24, False), (25, True), (99, True)])
def test_a_beginning_counts_from_a_quarter_of_the_prompt_on(num_tokens: int, is_worth_it: bool) -> None:
    assert CachedPrefix(num_tokens, (0,)).is_worth_it(100) is is_worth_it
