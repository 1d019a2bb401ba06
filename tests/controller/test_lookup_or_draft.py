"""Which of the two proposes: a look-up or the draft, which goes on to bring more, or must first read the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from spec_stack.controller.base import Policy, StepContext
from spec_stack.controller.ngram import NgramPolicy, NgramToken
from spec_stack.controller.registry import make_policy
from spec_stack.controller.throughput import Throughput
from spec_stack.decode.clock import Clock
from spec_stack.decode.loop import decode
from spec_stack.decode.proposer import DecodeRequest, Proposer
from spec_stack.decode.sampler import Sampler
from spec_stack.decode.stopping import StopChecker
from spec_stack.types import Proposal, Selection
from tests.support.controller_data import StepCosts, step

END = 99


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


class Fed:
    """What the loop asks of a model: how much it has seen, and to forget some."""

    num_to_recompute = 0
    next_position = 0

    @property
    def num_cached(self) -> int:
        return self.next_position

    def draft_lag(self, num_tokens: int) -> int:
        return num_tokens - self.next_position

    def rollback(self, num_tokens: int) -> None:
        self.next_position -= num_tokens


class Written(Fed):
    """A target that writes a known text, on a clock of its steps."""

    def __init__(self, token_ids: Sequence[int], costs: StepCosts) -> None:
        self._ids, self._costs = token_ids, costs
        self.seconds = 0.0

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        self.seconds += self._costs.verify_s(0)
        self.next_position = positions[-1] + 1
        following = [self._ids[position + 1] for position in positions[len(positions) - num_logits :]]
        return torch.nn.functional.one_hot(torch.tensor(following), END + 1).float()


class Wrong(Fed):
    """A draft that says token 0 and is unsure of it, on the target's clock."""

    def __init__(self, target: Written, costs: StepCosts) -> None:
        self._target, self._costs = target, costs

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        self._target.seconds += self._costs.draft_s(len(token_ids))
        self.next_position = positions[-1] + 1
        return torch.nn.functional.one_hot(torch.zeros(num_logits, dtype=torch.long), END + 1).float()


def decode_s(prompt: list[int], text: list[int], policy: Policy, gate: NgramPolicy, proposer: str) -> float:
    """Seconds in which the loop writes a text behind a prompt. The policy and the gate learn."""
    costs = StepCosts(0.0, 0.025, 0.1, 0.0)
    target = Written([*prompt, *text, END], costs)
    request = DecodeRequest(
        prompt_ids=prompt, sampler=Sampler(), stopper=StopChecker(len(text), {END}), end_ids={END}, proposer=proposer,
        precision="bf16", clock=Clock(lambda: target.seconds),
    )  # fmt: skip
    whole, proposals = Selection(prompt, range(len(prompt)), len(prompt)), Proposer(request, Wrong(target, costs), gate)
    outputs = decode(request, target, whole, Proposal(), policy, proposals)
    assert [token_id for output in outputs for token_id in output.token_ids] == text
    return target.seconds


def test_a_look_up_is_used_where_the_draft_does_not_want_to_propose() -> None:
    copied = list(range(10, 90))
    prompt, text = [1, *copied, 2, 10, 11, 12], copied[3:]
    gate, policy = NgramPolicy(), make_policy("throughput")
    seconds = [decode_s(prompt, text, policy, gate, "both") for _ in range(3)]
    assert seconds[-1] < 0.3 * decode_s(prompt, text, make_policy("fixed", gamma=0), NgramPolicy(), "model")


@pytest.mark.parametrize("gamma", [0, 2, 4])
def test_drafted_tokens_are_kept_up_to_the_first_wrong_one(gamma: int) -> None:
    # The draft is right wherever the text has token 0; the text is checked.
    text = [5, 0, 0, 6, 0, 0, 0, 0, 7]
    seconds = decode_s([1, 2, 3], text, make_policy("fixed", gamma=gamma), NgramPolicy(), "model")
    assert gamma or seconds == pytest.approx(9 * 0.1)
