"""Which of the two proposes: a look-up or the draft, which goes on to bring more, or must first read the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from spec_stack.controller.base import StepContext
from spec_stack.controller.ngram import NgramPolicy, NgramToken
from spec_stack.controller.registry import make_policy
from spec_stack.controller.throughput import Throughput
from tests.support.controller_data import step
from tests.support.simulated_pair import Costs, Text, run_text, run_texts

# A drafted token takes a quarter of a plain step, whatever is verified beside it.
COSTS = Costs({1: 0.1, 17: 0.1}, drafted_s=0.025, read_s=0.0025, prefill_s=0.003)


def taught_gate() -> NgramPolicy:
    gate = NgramPolicy()
    for gamma in (0, 8, 2) * 4:
        gate.observe(step(gamma, gamma, draft_s=0.025 * gamma, verify_s=0.1))
    return gate


def found(num_tokens: int, length: int = 40) -> list[Iterator[NgramToken]]:
    """A continuation that was seen several times, and never another."""
    return [iter([NgramToken(token_id, length + token_id, 8, 0) for token_id in range(num_tokens)])]


@pytest.mark.parametrize(("num_found", "is_better"), [(16, True), (1, False)])
def test_a_step_goes_to_what_gains_more_and_now_and_then_to_the_other(num_found: int, is_better: bool) -> None:
    gate = taught_gate()
    offer = gate.offer(found(num_found), 16)
    decisions = [gate.prefers_ngram(offer) for _ in range(100)]
    assert 90 < decisions.count(is_better) < 100
    assert not gate.prefers_ngram(gate.offer([], 16))


def test_a_draft_that_has_to_read_waits_longer_where_much_was_copied_lately() -> None:
    def steps_before_it_reads(num_copied: int) -> int:
        policy = Throughput()
        for gamma in (0, 4, 2) * 4:
            policy.observe(step(gamma, gamma, draft_s=0.025 * gamma, verify_s=0.1))
        policy.observe(replace(step(4, 4, draft_s=0.1 + 400 * 0.0015, verify_s=0.1), draft_lag=400))
        for _ in range(20):
            policy.observe(replace(step(num_copied, num_copied, verify_s=0.1), num_ngram_tokens=num_copied))
        policy.observe(step(0, 0, verify_s=1.0, is_prefill=True))
        for number in range(50):
            context = StepContext(number, 200, None, "fp16", draft_lag=400 + number)
            if policy.choose(context):
                return number
            policy.observe(step(0, 0, verify_s=0.1))
        return 50

    waits = [steps_before_it_reads(num_copied) for num_copied in (0, 1, 14)]
    assert waits[0] == 0
    assert waits[0] < waits[1] <= waits[2] < 50


def test_a_look_up_is_used_where_the_draft_does_not_want_to_propose() -> None:
    copied = list(range(10, 90))
    row = {
        "task": "edit", "prompt": [1, *copied, 2, 10, 11, 12], "text": copied[3:], "draft": [7] * 77,
        "conf": [0.4] * 77, "ent": [3.0] * 77, "tails": {},
    }  # fmt: skip
    text = Text.parse(row)
    gate, policy = NgramPolicy(), make_policy("throughput")
    for _ in range(3):
        run = run_text(text, policy, "both", gate, COSTS)
    assert run.decode_s < 0.3 * run_texts([text], lambda: make_policy("fixed", gamma=0), "model", COSTS)[0].decode_s
