"""What every gamma policy keeps to, and what each one does."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_stack.bench.replay import merge_runs, replay
from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import DraftSignals, Policy, StepContext
from spec_stack.controller.batch import BatchThroughput
from spec_stack.controller.pool import PolicyPool
from spec_stack.controller.predictor import STEP_FEATURES, Network
from spec_stack.controller.registry import BATCH_POLICIES, POLICIES, make_batch_policy, make_policy
from spec_stack.controller.speckv import SpecKV
from spec_stack.controller.throughput import Throughput
from tests.support.controller_data import Greedy, StepCosts, context, step


def test_the_registry_itself_loads_no_policy_and_not_even_numpy() -> None:
    code = (
        "import sys, spec_stack.controller.registry; "
        "print(sorted(name for name in sys.modules if name == 'numpy' or name.startswith('spec_stack.controller.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['spec_stack.controller.base', 'spec_stack.controller.registry']"


@dataclass
class ThreeAtMost(Policy):
    """All that a policy needs."""

    gamma: int = 3

    def choose(self, context: StepContext) -> int:
        return self.gamma


MAKERS: dict[str, Callable[[], Policy]] = {
    **{name: lambda name=name: make_policy(name) for name in POLICIES},  # type: ignore[misc]
    **{f"{name} for batches": lambda name=name: make_batch_policy(name) for name in BATCH_POLICIES},  # type: ignore[misc]
    "ThreeAtMost": ThreeAtMost,
}


STEPS = st.tuples(st.integers(0, 16), st.integers(0, 16), st.floats(0.0, 1.0), st.booleans(), st.booleans())


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=20, deadline=None)
@given(steps=st.lists(STEPS, max_size=30))
def test_every_policy_chooses_a_gamma_whatever_happened(
    name: str, steps: list[tuple[int, int, float, bool, bool]]
) -> None:
    policy = MAKERS[name]()
    assert isinstance(policy, Policy)
    last = None
    for room, accepted, confidence, is_prefill, has_signals in steps:
        before = context(max_gamma=room, last=last)
        gamma = policy.choose(before)
        assert 0 <= gamma <= MAX_GAMMA
        gamma = min(gamma, room)
        if gamma:
            assert policy.keep_drafting(before, DraftSignals([1.0], [confidence])) in (True, False)
        last = step(gamma, min(accepted, gamma), confidence=confidence, is_prefill=is_prefill)
        last = last if has_signals else dataclasses.replace(last, signals=DraftSignals())
        policy.observe(last)


def test_a_policy_needs_nothing_but_choose() -> None:
    policy = ThreeAtMost()
    assert (policy.name, policy.choose(context())) == ("ThreeAtMost", 3)
    assert policy.keep_drafting(context(), DraftSignals([9.0], [0.0]))
    policy.observe(step(3, 0))
    text = merge_runs(Greedy(3).record("a", 4)).texts[0]
    assert max(replay(text, policy, CHEAP_DRAFT).gammas) == 3


@pytest.mark.parametrize(("chosen", "most"), [(99, 5), (-3, 0)])
def test_what_a_policy_chooses_is_cut_in_replay(chosen: int, most: int) -> None:
    text = merge_runs(Greedy(3, p_right=1.0).record("a", 4)).texts[0]
    score = replay(text, ThreeAtMost(chosen), CHEAP_DRAFT, max_gamma=5)
    assert max(score.gammas) == most
    assert score.num_tokens == text.end


def test_a_name_means_the_same_rule_in_python_and_on_a_server() -> None:
    assert set(BATCH_POLICIES) <= set(POLICIES)
    assert isinstance(make_batch_policy("throughput"), BatchThroughput)
    assert all(make_policy(name).name.split("-")[0] == name for name in POLICIES)
    for name in BATCH_POLICIES:
        assert make_batch_policy(name).name == make_policy(name).name


def test_unknown_policies_and_options_are_named_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'magic'; known: .*throughput, fixed"):
        make_policy("magic")
    with pytest.raises(ValueError, match=r"unknown policy 'Throughput'; did you mean 'throughput'\?"):
        make_policy("Throughput")
    with pytest.raises(ValueError, match=r"no option 'gama'; did you mean 'gamma'\? known: gamma"):
        make_policy("fixed", gama=4)
    with pytest.raises(ValueError, match=r"no option '_gamma'; did you mean 'max_gamma'\? known: start, max_gamma$"):
        make_policy("heuristic", _gamma=4)


def test_an_entry_more_in_the_registry_is_a_policy_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "three", ThreeAtMost)
    assert make_policy("three", gamma=2).choose(context()) == 2
    with pytest.raises(ValueError, match="did you mean 'gamma'"):
        make_policy("three", gammas=2)
    monkeypatch.setitem(POLICIES, "three", "tests.support.controller_data:Greedy")
    with pytest.raises(ValueError, match=r"Greedy.* is no policy class; write `class Mine\(Policy\)`"):
        make_policy("three")


def test_an_object_that_is_no_policy_is_refused_with_what_to_write() -> None:
    class Duck:
        name = "duck"

        def choose(self, context: StepContext) -> int:
            return 2

    pool = PolicyPool("throughput")
    for wrong in (Duck(), Duck, ThreeAtMost, 3):
        with pytest.raises(ValueError, match=r"class \w+\(Policy\)"):
            pool.choose(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("gamma", [True, 1.0])
def test_a_bad_value_is_refused_though_it_equals_a_good_one_asked_for_before(gamma: object) -> None:
    pool = PolicyPool("throughput")
    pool.choose(gamma=1)
    with pytest.raises(ValueError, match="gamma must be a whole number"):
        pool.choose(gamma=gamma)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        ("fixed", {"gamma": 17}, "gamma must be a whole number, 0 to 16"),
        ("heuristic", {"start": 9, "max_gamma": 8}, "start must be"),
        ("confidence", {"threshold": 1.5}, "threshold"),
        ("ema", {"weight": 0.0}, "weight"),
        ("ema", {"gammas": (0, 1)}, "gammas"),
        ("speckv", {"gammas": ()}, "gammas"),
        ("speckv", {"predictor": "no/such/file.json"}, "file.json: cannot be read"),
        ("throughput", {"max_gamma": 0}, "max_gamma"),
        ("throughput", {"max_gamma": "8"}, "max_gamma"),
        ("speckv", {"gammas": 4}, "cannot be built"),
        ("speckv", {"objective": "tokens"}, "objective must be one of"),
    ],
)
def test_bad_options_are_refused_when_the_policy_is_built(make: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(make, **options)


def test_heuristic_adds_two_after_full_acceptance_and_takes_one_otherwise() -> None:
    policy = make_policy("heuristic", start=5)
    trace = []
    for accepted in (5, 7, 0, 0):
        gamma = policy.choose(context())
        trace.append(gamma)
        policy.observe(step(gamma, accepted))
    assert trace == [5, 7, 9, 8]
    for _ in range(20):
        policy.observe(step(1, 0))
    assert policy.choose(context()) == 1


def test_ema_follows_the_accepted_tokens_plus_one() -> None:
    policy = make_policy("ema", weight=0.2, start=3.0)
    for _ in range(60):
        policy.observe(step(8, 6))
    assert policy.choose(context()) == 7
    policy.observe(step(0, 0))
    assert policy.choose(context()) == 7


@pytest.mark.parametrize("start", [0.0, 3.0])
def test_ema_climbs_to_the_largest_of_a_few_candidates_while_all_is_accepted(start: float) -> None:
    policy = make_policy("ema", gammas=(1, 2, 4, 8), start=start)
    for _ in range(60):
        gamma = policy.choose(context())
        assert gamma in (1, 2, 4, 8)
        policy.observe(step(gamma, gamma))
    assert policy.choose(context()) == 8
    for _ in range(60):
        policy.observe(step(8, 0))
    assert policy.choose(context()) == 1
    # The largest where none is as large as the average.
    assert make_policy("ema", gammas=(1, 2, 16), max_gamma=8, start=7.0).choose(context()) == 2


def test_confidence_stops_after_the_first_doubtful_token_only() -> None:
    policy = make_policy("confidence")
    assert policy.keep_drafting(context(), DraftSignals([1.0, 1.0], [0.2, 0.41]))
    assert not policy.keep_drafting(context(), DraftSignals([1.0, 1.0], [0.9, 0.39]))


# Expects everything to be accepted.
HOPEFUL = Network([np.zeros((len(STEP_FEATURES), 1))], [np.ones(1)])


def test_speckv_counts_seconds_and_stops_where_plain_decoding_is_quicker() -> None:
    cheap, dear = SpecKV(predictor=HOPEFUL), SpecKV(predictor=HOPEFUL)
    blind = SpecKV(predictor=HOPEFUL, objective="per_step")
    for policy in (cheap, dear):
        policy.observe(step(0, 0))
    for gamma in (2, 4, 6, 8) * 5:
        cheap.observe(step(gamma, gamma))
        for policy in (dear, blind):
            policy.observe(step(gamma, gamma // 2, draft_s=0.04 * gamma))
    assert cheap.choose(context(last=step(4, 4))) == 8
    assert blind.choose(context(last=step(4, 4))) == 8
    chosen = [dear.choose(context(last=step(4, 4))) for _ in range(100)]
    assert set(chosen) == {0, 2}
    assert chosen.count(2) <= 4


def run(policy: Policy, p_right: float, costs: StepCosts, num_texts: int = 20) -> tuple[float, float]:
    """Tokens/s and mean gamma over several texts."""
    texts = merge_runs(
        [record for seed in range(num_texts) for record in Greedy(seed, p_right=p_right).record(str(seed), 16)]
    ).texts
    scores = [replay(text, policy, costs) for text in texts]
    steps = sum(score.num_steps for score in scores)
    rate = sum(score.num_tokens for score in scores) / sum(score.seconds for score in scores)
    return rate, sum(sum(score.gammas) for score in scores) / steps


CHEAP_DRAFT = StepCosts(0.0, 0.002, 0.03, 0.0)
DEAR_DRAFT = StepCosts(0.0, 0.03, 0.03, 0.0)


def test_throughput_drafts_further_where_drafting_is_cheaper() -> None:
    _, cheap = run(make_policy("throughput"), 0.85, CHEAP_DRAFT)
    _, dear = run(make_policy("throughput"), 0.85, DEAR_DRAFT)
    assert cheap > dear + 1


def test_throughput_switches_a_useless_draft_off_and_loses_little() -> None:
    rate, gamma = run(make_policy("throughput"), 0.05, DEAR_DRAFT)
    plain, _ = run(make_policy("fixed", gamma=0), 0.05, DEAR_DRAFT)
    assert gamma < 0.5
    assert rate > 0.98 * plain


@pytest.mark.parametrize("costs", [CHEAP_DRAFT, StepCosts(0.0, 0.01, 0.02, 0.001)])
def test_throughput_beats_every_fixed_gamma_where_signals_tell_right_from_wrong(costs: StepCosts) -> None:
    rate, _ = run(make_policy("throughput"), 0.8, costs)
    fixed = max(run(make_policy("fixed", gamma=gamma), 0.8, costs)[0] for gamma in range(17))
    assert rate > fixed


def test_throughput_follows_costs_that_change() -> None:
    policy = Throughput()
    for draft_s in (0.001, 0.02):
        for gamma in (0, 2, 4, 1, 3, 5) * 40:
            policy.observe(step(gamma, gamma // 2, draft_s=draft_s * gamma))
    tokens, seconds = 6 + 6, 0.02 * 15 + 0.03 * 6
    assert policy.threshold(context()) == pytest.approx(tokens / seconds * 0.02, rel=0.15)
