"""Replay: what is merged from runs, and that a policy over it sees the past only."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_stack import SpecStackGenerator
from spec_stack.bench.recorded import read
from spec_stack.bench.replay import CostTable, ReplayText, fit_costs, merge_runs, oracle, replay
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord
from spec_stack.controller.registry import make_policy
from tests.support.controller_data import COSTS, Greedy, RandomGamma, StepCosts, runs
from tests.support.reference_controller import fixed_gamma_steps, least_seconds

ROOT = Path(__file__).parents[2]


def text_of(correct: list[bool]) -> ReplayText:
    confidence = [0.9 if right else 0.2 for right in correct]
    return ReplayText("a", "fp16", "chat", 0, len(correct), correct, [1.0] * len(correct), confidence, {})


@settings(max_examples=60, deadline=None)
@given(correct=st.lists(st.booleans(), min_size=1, max_size=40), gamma=st.integers(0, 9))
def test_replaying_a_fixed_gamma_takes_the_steps_decoding_would(correct: list[bool], gamma: int) -> None:
    text = text_of(correct)
    expected = fixed_gamma_steps(correct, 0, len(correct), gamma, 1)
    score = replay(text, make_policy("fixed", gamma=gamma), COSTS)
    assert score.gammas == [drafted for drafted, _ in expected]
    assert score.num_tokens == sum(accepted + 1 for _, accepted in expected)
    assert score.seconds == pytest.approx(sum(0.03 + 0.01 * drafted for drafted, _ in expected))


@settings(max_examples=40, deadline=None)
@given(
    correct=st.lists(st.booleans(), min_size=1, max_size=9),
    verifies_s=st.lists(st.floats(0.01, 0.05), min_size=5, max_size=5),
)
def test_the_oracle_is_the_best_though_a_longer_proposal_was_measured_as_quicker(
    correct: list[bool], verifies_s: list[float]
) -> None:
    costs = CostTable(tuple(range(5)), (0.001,) * 5, tuple(verifies_s))
    expected = least_seconds(correct, 0, len(correct), [costs.step_s(gamma) for gamma in range(5)], 1)
    assert oracle(text_of(correct), costs, max_gamma=4).seconds == pytest.approx(expected)


def test_runs_at_several_gammas_merge_to_the_text_behind_them() -> None:
    greedy = Greedy(5)
    merged = merge_runs([record for gamma in (2, 4, 6, 8) for record in greedy.record("a", gamma)])
    text = merged.texts[0]
    assert merged.num_unanimous == merged.num_shared > 0
    assert list(text.correct[:60]) == greedy.correct
    assert text.signal(0, 0, text.run_length(0, 8)) == (greedy.entropy[0], greedy.confidence[0])
    wrong = greedy.correct.index(False)
    tail = text.tails[wrong].confidence
    assert tail == greedy.tails[wrong][: len(tail)]
    assert [text.signal(wrong, 1 + at, 0)[1] for at in range(len(tail))] == tail


@pytest.mark.parametrize("gamma", [2, 4, 6, 8])
def test_replay_of_a_recorded_gamma_is_the_recorded_run(gamma: int) -> None:
    records = runs()
    text = merge_runs(records).texts[0]
    recorded = [record for record in records if record.request_id == text.prompt and record.policy == f"fixed-{gamma}"]
    score = replay(text, make_policy("fixed", gamma=gamma), COSTS)
    assert score.gammas == [record.gamma for record in recorded]
    assert score.seconds == pytest.approx(sum(record.draft_s + record.verify_s for record in recorded))


def test_decoding_is_replayed_from_where_the_prefill_step_ended() -> None:
    records = Greedy(7).record("a", 4, prefill=6)
    text = merge_runs(records).texts[0]
    assert text.start == records[0].num_tokens
    score = replay(text, make_policy("fixed", gamma=4), COSTS)
    assert score.gammas == [record.gamma for record in records[1:]]
    longer = [record for gamma in (2, 4) for record in Greedy(7, 200).record("a", gamma, prefill=6)]
    assert fit_costs(longer)["fp16"].verify_s(4) == pytest.approx(COSTS.verify_s(4))


class Spy(Policy):
    """A policy that notes what it is shown. It drafts until told to stop by its own count."""

    name = "spy"

    def __init__(self) -> None:
        self.shown: list[list[float]] = []
        self.contexts: list[StepContext] = []

    def choose(self, context: StepContext) -> int:
        self.contexts.append(context)
        self.shown.append([])
        return 5

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        self.shown[-1] = list(signals.confidence)
        return len(signals) < 3

    def observe(self, record: StepRecord) -> None:
        assert record.gamma <= 3


def test_a_policy_sees_no_signal_of_a_token_it_has_not_drafted() -> None:
    greedy = Greedy(11)
    text = merge_runs(greedy.record("a", 8)).texts[0]
    hidden = dataclasses.replace(
        text, confidence=[value if at < 2 else 0.123 for at, value in enumerate(text.confidence)]
    )
    spies = Spy(), Spy()
    for spy, seen in zip(spies, (text, hidden), strict=True):
        replay(seen, spy, COSTS)
    assert spies[0].shown[0][:2] == spies[1].shown[0][:2]
    assert all(len(shown) <= 3 for shown in spies[0].shown)
    lasts = [context.last for context in spies[0].contexts]
    assert [last.step for last in lasts if last] == list(range(len(lasts)))


@pytest.mark.parametrize("sparse_prefill", ["draft_only", "on"])
def test_a_policy_is_shown_in_replay_what_it_was_shown_live(
    embedded: SpecStackGenerator, tmp_path: Path, sparse_prefill: str
) -> None:
    live, replayed, file = RandomGamma(0), RandomGamma(0), tmp_path / "steps.jsonl"
    prompt = "def add(a, b):\n    return a + b\n\n\n" * 9
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "sparse_prefill": sparse_prefill}
    embedded.generate(prompt, policy=live, records=file, **options)
    replay(merge_runs(read([file])).texts[0], replayed, COSTS)
    facts = attrgetter("step", "is_prefill", "keep_rate", "gamma", "num_accepted", "num_tokens", "signals", "policy")
    assert [facts(record) for record in replayed.records] == [facts(record) for record in live.records]
    assert replayed.records[0].is_prefill
    assert (replayed.records[0].keep_rate < 1) == (sparse_prefill == "on")
    for noted in (live, replayed):
        assert [context.last for context in noted.contexts] == noted.records[:-1]
    assert [(context.step, context.max_gamma) for context in replayed.contexts] == [
        (context.step, context.max_gamma) for context in live.contexts
    ]


def test_every_replayed_text_begins_with_its_prefill_record_or_with_a_plain_one() -> None:
    recorded, policy = Greedy(7).record("a", 4, prefill=6), RandomGamma(0)
    replay(merge_runs(recorded).texts[0], policy, COSTS)
    assert policy.records[0] == dataclasses.replace(recorded[0], policy="random")
    policy = RandomGamma(0)
    for text in merge_runs(runs(3)).texts:
        replay(text, policy, COSTS)
    begun = [record for record in policy.records if record.is_prefill]
    assert [record.request_id for record in begun] == ["prompt-0", "prompt-1", "prompt-2"]
    assert [record.step for record in begun] == [0, 0, 0]
    assert [record.num_tokens for record in begun] == [0, 0, 0]


@pytest.mark.parametrize("nonsense", [2.0, "x", None])
def test_a_policy_that_chooses_no_whole_number_is_named_as_it_is_live(nonsense: object) -> None:
    class Dreamer(Policy):
        def choose(self, context: StepContext) -> Any:
            return nonsense

    with pytest.raises(TypeError, match=r"policy 'Dreamer' \(Dreamer\) must give a whole number"):
        replay(text_of([True] * 9), Dreamer(), COSTS)


@pytest.mark.parametrize("gamma", [0, 1, 2, 5, 8, 12])
def test_costs_are_the_measured_means_and_straight_lines_between_and_beyond(gamma: int) -> None:
    costs = StepCosts(0.004, 0.01, 0.03, 0.002)
    records = [record for number in (2, 8) for record in Greedy(1).record("a", number, costs=costs)]
    fitted = fit_costs(records, least=5)["fp16"]
    assert fitted.draft_s(gamma) == pytest.approx(costs.draft_s(gamma))
    assert fitted.verify_s(gamma) == pytest.approx(costs.verify_s(gamma))
    assert fitted.step_s(gamma) == fitted.draft_s(gamma) + fitted.verify_s(gamma)
    # Stalls count, since they are in the seconds of the runs too.
    stalled = [dataclasses.replace(record, verify_s=9.0) if at == 5 else record for at, record in enumerate(records)]
    at_stall = records[5].gamma
    assert fit_costs(stalled, least=5)["fp16"].verify_s(at_stall) > 2 * costs.verify_s(at_stall)


def test_costs_beyond_what_was_measured_never_fall_nor_turn_negative() -> None:
    table = CostTable((2, 4), (0.05, 0.01), (0.03, 0.02))
    assert table.draft_s(9) == 0.01
    assert table.draft_s(3) == pytest.approx(0.03)
    assert CostTable((4, 8), (0.001, 0.1), (0.03, 0.03)).draft_s(1) == 0.0


def test_costs_need_two_gammas_with_enough_steps() -> None:
    records = Greedy(1).record("a", 2)
    with pytest.raises(ValueError, match=r"fp16: \{.*2: \d+.*two gammas"):
        fit_costs(records)
    with pytest.raises(ValueError, match="rise"):
        CostTable((4, 2), (1.0, 1.0), (1.0, 1.0))
    with pytest.raises(ValueError, match="two or more"):
        CostTable((4,), (1.0,), (1.0,))


def test_runs_that_disagree_are_settled_by_majority_and_counted() -> None:
    one = Greedy(2)
    other = Greedy(2)
    other.correct[0] = not one.correct[0]
    records = [*one.record("a", 2), *one.record("a", 4), *other.record("a", 6)]
    merged = merge_runs(records)
    assert merged.texts[0].correct[0] == one.correct[0]
    assert merged.num_unanimous < merged.num_shared


def test_missing_records_and_runs_that_are_mixed_up_are_refused() -> None:
    with pytest.raises(ValueError, match="no records"):
        merge_runs([])
    one, other = Greedy(0).record("a", 4), Greedy(1).record("b", 4)
    with pytest.raises(ValueError, match=r"'a'.*a second time"):
        merge_runs([one[0], other[0], one[1]])
    with pytest.raises(ValueError, match="step 2 after 0"):
        merge_runs([one[0], one[2]])


@pytest.mark.slow
def test_the_profile_in_the_repository_can_be_replayed() -> None:
    pytest.importorskip("pyarrow")
    records = read([ROOT / "experiments" / "results" / "profile.parquet"])
    assert {record.precision for record in records} == {"fp32", "bf16", "int8", "nf4"}
    assert len(merge_runs(records).texts) == 24 * 4
