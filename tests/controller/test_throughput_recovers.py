"""The default policy after bad stretches of the machine: it must find its way back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import spec_stack
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord
from spec_stack.controller.pool import PolicyPool
from spec_stack.controller.speckv import SpecKV
from spec_stack.controller.throughput import Throughput
from spec_stack.controller.tuning import TUNING

SHIPPED = Path(spec_stack.__file__).parent / "assets" / "draft" / "spec_stack_predictor.json"
VERIFY_S, PER_TOKEN_S = 3e-3, 0.7e-3
# Of a request; the draft has read the prompt of each.
NUM_STEPS = 128
USUAL = StepContext(1, 99, None, "fp32")


class Machine:
    """A pair whose tokens are accepted with a chance the draft knows, on a machine whose speed can change."""

    def __init__(self, policy: Policy, seed: int = 0, read_s: float = 0.0) -> None:
        """read_s: seconds per token that the draft has to catch up on, beside the usual one."""
        self.policy = policy
        self._read_s, self._num_unread = read_s, 1
        self.gammas: list[int] = []
        self.num_tokens, self.seconds = 0, 0.0
        self._rng = random.Random(seed)
        self._last: StepRecord | None = None

    def step(self, per_token_s: float = PER_TOKEN_S, stall_s: float = 0.0, policy_s: float = 1e-5) -> None:
        number = len(self.gammas)
        if number % NUM_STEPS == 0:
            self._num_unread = 1
        context = StepContext(number, 99, self._last, "fp32", draft_lag=self._num_unread)
        signals, num_accepted, right = DraftSignals(), 0, True
        most = self.policy.choose(context)
        while len(signals) < most:
            confidence = self._rng.choice([0.5, 0.9, 0.98])
            signals.append(1.0, confidence)
            right = right and self._rng.random() < confidence
            num_accepted += right
            if not self.policy.keep_drafting(context, signals):
                break
        gamma = len(signals)
        draft_s = gamma * per_token_s + stall_s + (self._read_s * (self._num_unread - 1) if gamma else 0.0)
        self._last = StepRecord(
            "r", number, "throughput", "fp32", "", False, 1.0, gamma, num_accepted, num_accepted + 1, signals,
            draft_s, VERIFY_S, policy_s, draft_lag=self._num_unread if gamma else 0,
        )  # fmt: skip
        self.policy.observe(self._last)
        self._num_unread = (1 + (num_accepted == gamma)) if gamma else self._num_unread + 1
        self.gammas.append(gamma)
        self.num_tokens += num_accepted + 1
        self.seconds += draft_s + VERIFY_S - stall_s

    def speed(self, num_steps: int) -> float:
        tokens, seconds = self.num_tokens, self.seconds
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens - tokens) / (self.seconds - seconds)


def test_drafting_comes_back_after_a_stretch_in_which_it_did_not_pay() -> None:
    machine = Machine(Throughput())
    machine.speed(200)
    usual = sum(machine.gammas[-100:]) / 100
    assert usual > 2
    for _ in range(300):
        machine.step(per_token_s=10e-3)
    assert sum(machine.gammas[-100:]) / 100 < 0.5
    assert 1 <= sum(gamma > 0 for gamma in machine.gammas[-250:]) <= 20
    machine.speed(500)
    assert sum(machine.gammas[-100:]) / 100 > usual / 2


def test_a_plain_step_is_measured_again_now_and_then_while_drafting_pays() -> None:
    machine = Machine(Throughput())
    machine.speed(800)
    assert 1 <= machine.gammas[200:].count(0) <= 600 / TUNING.plain_every


@pytest.mark.parametrize("policy", [Throughput, partial(SpecKV, predictor=SHIPPED)])
@pytest.mark.parametrize("read_s", [0.0, 0.03e-3])
def test_a_draft_that_was_slow_at_first_is_found_out_though_it_has_to_catch_up(
    policy: Callable[[], Policy], read_s: float
) -> None:
    """As where first kernels are compiled. The time of catching up must not be taken for the cost of drafting."""
    machine = Machine(policy(), read_s=read_s)
    for _ in range(40):
        machine.step(per_token_s=10e-3)
    assert machine.gammas[-5:] == [0] * 5
    machine.speed(300)
    assert sum(gamma > 0 for gamma in machine.gammas[-50:]) > 40


def test_a_policy_measures_its_draft_though_a_look_up_follows_each_waking() -> None:
    """But none follows at once on a look-up. Nobody asks the policy in their steps; without a measurement a draft that
    has become quick is never found out."""
    policy = SpecKV()
    policy.observe(plain(1))
    for _ in range(30):
        policy.observe(record(num_accepted=0, num_tokens=1, draft_s=9 * VERIFY_S))
    last, draft_lag, was_waking, chosen = record(num_accepted=0, num_tokens=1), 20, False, []
    for number in range(400):
        if was_waking and draft_lag != 5:
            policy.observe(record(num_ngram_tokens=4, signals=DraftSignals(), draft_s=0.0, proposer="ngram"))
            draft_lag, was_waking = 5, False
            continue
        gamma = policy.choose(StepContext(number, 99, last, "fp32", draft_lag=draft_lag))
        was_waking = gamma > 0 and draft_lag > 5
        read_s = 1e-3 * (draft_lag - 1) if gamma else 0.0
        policy.observe(
            record(gamma=gamma, num_accepted=gamma, num_tokens=gamma + 1, draft_s=gamma * PER_TOKEN_S + read_s,
                   signals=DraftSignals([1.0] * gamma, [0.9] * gamma), draft_lag=draft_lag if gamma else 0)
        )  # fmt: skip
        was_waking = was_waking and draft_lag != 5
        draft_lag = 2 if gamma else draft_lag + 1
        chosen.append(gamma)
    assert sum(gamma > 0 for gamma in chosen[-50:]) > 40


@pytest.mark.parametrize("per_token_s", [PER_TOKEN_S, 3 * VERIFY_S])
def test_what_another_precision_costs_is_learned_right_after_a_draft_was_woken(per_token_s: float) -> None:
    """One that costs as little as usual is used, and one that costs more than it brings is not."""
    policy = SpecKV()
    policy.observe(plain(1))
    for _ in range(30):
        policy.observe(record(num_accepted=0, num_tokens=1, draft_s=9 * VERIFY_S))
    last = record(num_accepted=0, num_tokens=1)
    while not policy.choose(StepContext(1, 99, last, "fp32", draft_lag=20)):
        pass
    chosen = []
    for number in range(20):
        chosen.append(policy.choose(StepContext(1, 99, last, "bf16", draft_lag=1)))
        drafted = record(num_accepted=4, num_tokens=5, draft_s=4 * per_token_s)
        policy.observe(replace(plain(1) if number == 0 else drafted, precision="bf16"))
    assert {gamma > 0 for gamma in chosen[10:]} == {per_token_s == PER_TOKEN_S}


def test_the_default_policy_measures_a_draft_that_has_read_much_in_the_next_step_it_is_asked_for() -> None:
    """Long look-ups come between; what they wrote is read at a price of its own."""
    policy, has_read = warm(), warm()
    opened(policy)
    opened(has_read)
    for draft_lag in (400, 19, 19, 400, 19, 19):
        gamma = policy.choose(StepContext(1, 400, plain(1), "fp32", draft_lag=draft_lag))
        assert gamma > 0
        read_s = 0.03e-3 * (draft_lag - 1)
        unread = record(gamma=gamma, num_accepted=gamma, num_tokens=gamma + 1, draft_s=gamma * PER_TOKEN_S + read_s,
                        signals=DraftSignals([1.0] * gamma, [0.9] * gamma), draft_lag=draft_lag)  # fmt: skip
        policy.observe(unread)
        if draft_lag == 19:
            # A step as long whose draft has nothing to read.
            has_read.observe(replace(unread, draft_s=gamma * PER_TOKEN_S, policy_s=read_s + 1e-5, draft_lag=1))
    assert policy.threshold(USUAL) == pytest.approx(has_read.threshold(USUAL), rel=0.02)


@pytest.mark.parametrize(("at", "stall_s"), [(1, 0.5), (1, 5.0), (4, 5.0), (50, 5.0)])
def test_one_stall_does_not_slow_the_steps_after_it(at: int, stall_s: float) -> None:
    speeds = []
    for stall in (0.0, stall_s):
        machine = Machine(Throughput())
        machine.speed(at)
        machine.step(stall_s=stall)
        speeds.append(machine.speed(100))
    assert speeds[1] > 0.9 * speeds[0]


def record(**changes: object) -> StepRecord:
    values: dict[str, object] = {
        "request_id": "r", "step": 1, "policy": "throughput", "precision": "fp32", "task": "", "is_prefill": False,
        "keep_rate": 1.0, "gamma": 4, "num_accepted": 3, "num_tokens": 4,
        "signals": DraftSignals([1.0] * 4, [0.9] * 4), "draft_s": 4 * PER_TOKEN_S, "verify_s": VERIFY_S,
        "policy_s": 1e-5,
    }  # fmt: skip
    return StepRecord(**(values | changes))  # type: ignore[arg-type]


def warm(**changes: object) -> Throughput:
    policy = Throughput()
    policy.observe(plain(1))
    for _ in range(20):
        policy.observe(record(**changes))
    return policy


@pytest.mark.parametrize(
    "changes", [{"draft_prefilled_prompt": True, "draft_s": 9.0}, {"is_prefill": True, "verify_s": 9.0}]
)
def test_the_time_of_reading_a_prompt_says_nothing_about_steps(changes: dict[str, object]) -> None:
    policy = warm()
    opened(policy)
    before = [policy.threshold(USUAL, num_drafted) for num_drafted in range(6)]
    policy.observe(record(**changes))
    assert [policy.threshold(USUAL, num_drafted) for num_drafted in range(6)] == before


def test_a_duration_that_is_no_number_is_left_out() -> None:
    policy = warm()
    before = policy.threshold(USUAL)
    policy.observe(record(draft_s=float("nan")))
    assert policy.threshold(USUAL) == before


def test_the_policys_own_time_counts_into_what_is_achieved() -> None:
    assert warm(policy_s=2e-3).threshold(USUAL) < 0.9 * warm().threshold(USUAL)


def test_lent_policies_are_apart_by_options_and_in_time() -> None:
    pool = PolicyPool("throughput")
    with pool.choose(gamma=4).lend() as four:
        assert four.name == "fixed-4"
    with (
        pool.choose(gamma=2).lend() as two,
        pool.choose(gamma=4).lend() as again,
        pool.choose("fixed", gamma=4).lend() as third,
    ):
        assert two.name == "fixed-2"
        assert again is four
        assert third is not four
    with pool.choose("throughput", is_seeded=True).lend() as seeded, pool.choose("throughput").lend() as usual:
        assert seeded is not usual


def opened(policy: Throughput, prefill_s: float = 0.12) -> StepRecord:
    """The prefill step of a new request."""
    prefill = record(step=0, is_prefill=True, gamma=0, num_accepted=0, num_tokens=1, signals=DraftSignals(),
                     draft_s=0.0, verify_s=prefill_s)  # fmt: skip
    policy.observe(prefill)
    return prefill


def plain(number: int) -> StepRecord:
    return record(step=number, gamma=0, num_accepted=0, num_tokens=1, signals=DraftSignals(), draft_s=0.0)


@pytest.mark.parametrize(("num_left", "drafts"), [(8, False), (400, True)])
def test_a_long_prompt_is_read_by_the_draft_only_where_the_answer_is_long_enough(num_left: int, drafts: bool) -> None:
    policy = warm()
    last = opened(policy)
    chosen = policy.choose(StepContext(1, num_left, last, "fp32", draft_lag=1801))
    assert (chosen > 0) == drafts
    assert policy.choose(StepContext(1, num_left, last, "fp32", draft_lag=1)) > 0


def test_a_fresh_policy_measures_a_plain_step_before_it_has_a_long_prompt_read() -> None:
    policy = Throughput()
    last = opened(policy)
    chosen = []
    for number in range(1, 8):
        chosen.append(policy.choose(StepContext(number, 400, last, "fp32", draft_lag=1800 + number)))
        last = plain(number)
        policy.observe(last)
    assert chosen[0] == 0
    assert chosen[-1] > 0


def test_answers_that_were_short_are_expected_to_be_short_again() -> None:
    policy = warm()
    for _ in range(10):
        last = opened(policy)
        for number in range(1, 8):
            policy.observe(plain(number))
    last = opened(policy)
    assert policy.choose(StepContext(1, 400, last, "fp32", draft_lag=1801)) == 0


def test_a_request_that_copies_leaves_the_draft_as_it_was_for_the_next() -> None:
    """Looked-up steps bring many tokens; taken for what drafting has to beat, they switched it off for 500 tokens."""
    policy, fresh = warm(), warm()
    opened(policy)
    for number in range(1, 30):
        policy.observe(record(step=number, gamma=16, num_accepted=16, num_tokens=17, signals=DraftSignals(),
                              draft_s=0.0, num_ngram_tokens=16, proposer="ngram"))  # fmt: skip
    for each in (policy, fresh):
        last = opened(each)
        assert each.choose(StepContext(1, 99, last, "fp32", draft_lag=1)) > 0
    assert policy.threshold(USUAL) == pytest.approx(fresh.threshold(USUAL), rel=0.05)
