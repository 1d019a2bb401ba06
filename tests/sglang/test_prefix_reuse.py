"""What a prompt is built on and what comes back, against a model that keeps whole lists. No server."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.turn import Cached
from spec_stack.sglang.decide import KnownTexts, Prompt, TurnStore, UnscoredPrompt, decide_scored
from spec_stack.sglang.request import RequestOptions
from spec_stack.sglang.server_args import ServerConfig
from tests.support.reference_session import dropped_chunks_to_restore

CONFIG = PrefillConfig(chunk_size=4, keep_rate=0.3, keep_last=1)
RECALLING = SessionConfig(recall_threshold=1.0, max_recalled_chunks=3, recall_word_threshold=None)


def _kept(
    prompt_ids: Sequence[int],
    beginning: Cached,
    importance: torch.Tensor | None,
    prunes: bool,
    recall: SessionConfig | None,
    config: PrefillConfig = CONFIG,
    protected: Sequence[Span] = (),
) -> tuple[tuple[int, ...], int]:
    """The kept positions of a prompt, and how many of them are recalled; recall: None for none."""
    known = KnownTexts(ServerConfig(recall=recall or SessionConfig()), None, None, lambda prompt: 0, 1000)
    options = RequestOptions(protect=tuple(protected))
    prompt = Prompt(tuple(prompt_ids), None, None, config, "recall", options=options)
    unscored = UnscoredPrompt(known.text_of(prompt), beginning, prunes, recall is not None, "on", (), prompt)
    plan = decide_scored(unscored, importance, 0, known)
    return tuple(plan.positions), plan.num_recalled


@given(st.randoms(use_true_random=False))
def test_the_beginning_is_the_longest_turn_whose_prompt_the_text_has(rng: random.Random) -> None:
    """Random conversations with branches and edits over a small vocabulary, against a look at each token. A turn counts
    where its whole prompt, the question too, is in the new one; of its reply the last common token is new."""
    turns = TurnStore(10_000)
    remembered: list[tuple[str, list[int], list[int], list[int]]] = []
    for _ in range(12):
        tenant = rng.choice("ab")
        _, old_prompt, old_reply, _ = rng.choice(remembered) if remembered else ("", [], [], [])
        text = [*old_prompt, *old_reply]
        prompt = [*text[: rng.randrange(len(text) + 1)], *(rng.randrange(2) for _ in range(rng.randrange(1, 9)))]
        found = turns.find(tenant, prompt)
        common = []
        for owner, old, reply, positions in remembered:
            if owner != tenant or prompt[:-1][: len(old)] != old:
                continue
            more = prompt[len(old) : -1]
            num_same = next((at for at, (a, b) in enumerate(zip(reply, more, strict=False)) if a != b), None)
            num_same = min(len(reply), len(more)) if num_same is None else num_same
            length = len(old) + max(0, num_same - 1)
            common.append((length, (*positions, *range(len(old), length))))
        longest = max((length for length, _ in common), default=0)
        assert found.num_tokens == longest
        assert found.positions in [positions for length, positions in common if length == longest] or not longest
        dropped = [position for position in range(found.num_tokens) if position not in found.positions]
        recalled = sorted(rng.sample(dropped, rng.randrange(len(dropped) + 1)))
        new = range(found.num_tokens, len(prompt))
        kept = [position for position in new if position == len(prompt) - 1 or rng.random() < 0.5]
        positions = [*sorted([*found.positions, *recalled]), *kept]
        reply = [rng.randrange(2) for _ in range(rng.randrange(5))]
        turns.add(tenant, prompt, positions, reply)
        remembered.append((tenant, prompt, reply, positions))


def test_a_reply_is_part_of_its_turn_as_it_grows_but_for_its_last_token() -> None:
    turns, reply = TurnStore(100), array("q", [7])
    turns.add("", [1, 2, 3], (0, 2), reply)
    assert turns.find("", [1, 2, 3, 7, 8, 9, 4]) == Cached(3, (0, 2))
    reply.extend([8, 9])
    assert turns.find("", [1, 2, 3, 7, 8, 9, 4]) == Cached(5, (0, 2, 3, 4))
    # What a step wrote beyond the end was sent to nobody.
    reply.append(6)
    assert turns.find("", [1, 2, 3, 7, 8, 9, 4]) == Cached(5, (0, 2, 3, 4))


def test_the_turn_that_was_not_gone_on_from_for_longest_is_forgotten_first() -> None:
    turns = TurnStore(30)
    for start in (0, 100, 200):
        turns.add("", range(start, start + 10), (0, 9), [])
    assert turns.find("", range(0, 20)).num_tokens == 10
    turns.add("", range(300, 310), (0, 9), [])
    assert [turns.find("", range(start, start + 20)).num_tokens for start in (0, 100, 200, 300)] == [10, 0, 10, 10]


def test_replies_count_into_the_tokens_that_are_remembered() -> None:
    turns = TurnStore(30)
    for start in (0, 100, 200):
        turns.add("", range(start, start + 4), (0, 3), array("q", range(start + 4, start + 16)))
    assert len(turns) == 1
    assert turns.find("", range(200, 220)).num_tokens == 15


def test_a_neighbour_who_asks_something_else_takes_nothing_over() -> None:
    turns = TurnStore(1000)
    document = list(range(100, 180))
    turns.add("", [*document, 1, 2, 3], (*range(40), 60, 61, 82), [])
    assert turns.find("", [*document, 7, 8, 9]) == Cached()
    assert turns.find("", [*document, 1, 2, 3, 50, 7]).num_tokens == 83


@given(st.randoms(use_true_random=False), st.booleans())
def test_what_comes_back_is_what_the_sessions_oracle_restores(rng: random.Random, prunes: bool) -> None:
    num_tokens = rng.randrange(20, 90)
    prompt = [rng.randrange(50) for _ in range(num_tokens)]
    num_cached = rng.randrange(4, num_tokens - 1)
    cached = tuple(sorted(rng.sample(range(num_cached), rng.randrange(1, num_cached))))
    # Sums of these are exact in every precision, so ties are ties.
    importance = torch.tensor([rng.randrange(64) / 64 for _ in range(num_tokens)])
    beginning = Cached(num_cached, cached)
    protected = [(num_cached, num_cached + 2)]
    positions, num_recalled = _kept(prompt, beginning, importance, prunes, RECALLING, protected=protected)
    expected = dropped_chunks_to_restore(importance.tolist(), cached, num_cached, 4, 1.0, 3)
    old, new = positions[: len(cached) + len(expected)], positions[len(cached) + len(expected) :]
    assert list(old) == sorted([*cached, *expected])
    assert new == tuple(sorted(set(new)))
    assert {num_cached, num_tokens - 1} <= set(new) <= set(range(num_cached, num_tokens))
    assert prunes or new == tuple(range(num_cached, num_tokens))
    assert num_recalled == len(expected)


def test_old_text_that_shares_rare_words_with_the_question_is_recalled_without_a_draft() -> None:
    document = list(range(100, 180))
    prompt = [*document, 900, 901, 141, 142, 902]
    beginning = Cached(80, (*range(8), *range(72, 80)))
    config = PrefillConfig(chunk_size=4, scorer="bm25")
    positions, num_recalled = _kept(prompt, beginning, None, False, SessionConfig(), config)
    # 141 and 142 stand at 41 and 42, in the chunk from 40 on.
    assert positions == (*range(8), 40, 41, 42, 43, *range(72, 85))
    assert num_recalled == 4
