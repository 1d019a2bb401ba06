"""Conversations as load: what is said, in which order, and what becomes of the turns of who gives up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from experiments.serving.client import Answer
from experiments.serving.conversations import Conversations, Plan, converse
from experiments.serving.load import figures

ASSETS = Path(__file__).resolve().parents[2] / "spec_stack" / "assets"
PLAN = Plan((1, 2), "7", ((8, 9), (5,)), (0.0, 0.0), (2, 3, 1))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ASSETS / "target")


def answer(num_new: int, first: int = 70) -> Answer:
    return Answer(1.0, [1.5, 3.0], list(range(first, first + num_new)))


def test_every_turn_goes_on_where_the_reply_before_it_ended() -> None:
    asked: list[list[int]] = []

    def ask(ids: Sequence[int], num_new: int) -> Answer:
        asked.append(list(ids))
        return answer(num_new)

    replies = converse(PLAN, ask, lambda ids: "".join(map(str, ids)))
    assert asked == [[1, 2], [1, 2, 70, 71, 8, 9], [1, 2, 70, 71, 8, 9, 70, 71, 72, 5]]
    assert [(reply.ttft_s, reply.latency_s, reply.num_tokens) for reply in replies] == [(0.5, 2, n) for n in (2, 3, 1)]
    assert [reply.right for reply in replies] == [True, False, False], "the first turn alone asks for the fact"


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_the_turns_of_who_gives_up_count_as_not_answered(fails_at: int) -> None:
    left = iter(range(3))

    def ask(ids: Sequence[int], num_new: int) -> Answer:
        if next(left) == fails_at:
            raise TimeoutError
        return answer(num_new)

    replies = converse(PLAN, ask, str)
    assert [math.isinf(reply.latency_s) for reply in replies] == [turn >= fails_at for turn in range(3)]
    assert figures(replies, 5.0)["share_in_time"] == fails_at / 3


def test_a_reply_that_stops_short_is_none() -> None:
    replies = converse(PLAN, lambda ids, num_new: answer(num_new - 1), str)
    assert all(math.isinf(reply.latency_s) for reply in replies)


def test_conversations_share_their_system_prompt_and_nothing_of_their_documents(tokenizer: Any) -> None:
    load = Conversations((300, 500), system_tokens=200, num_turns=3, thinking_s=2.0, seed=0)
    first, second = load.plans(tokenizer, 3, variant=0), load.plans(tokenizer, 3, variant=1)
    assert load.plans(tokenizer, 3, variant=0) == first
    assert [(plan.num_new, plan.thinking_s) for plan in first] == [(plan.num_new, plan.thinking_s) for plan in second]
    texts = [tokenizer.decode(plan.first_ids) for plan in [*first, *second]]
    shared = len(texts[0].partition("Document ")[0])
    assert len({text[:shared] for text in texts}) == 1
    assert len({text[shared : shared + 20] for text in texts}) == 6
    for plan in first:
        assert len(plan.follow_ups) == len(plan.thinking_s) == 2
        assert tokenizer.decode(plan.follow_ups[0]).startswith("<|end|><|user|>")
        assert 480 < len(plan.first_ids) < 800


def test_one_turn_is_no_conversation() -> None:
    with pytest.raises(ValueError, match="--turns"):
        Conversations((300, 500), system_tokens=200, num_turns=1, thinking_s=2.0, seed=0)
