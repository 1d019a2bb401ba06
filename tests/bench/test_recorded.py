"""Policies by replay: who takes part, what they may know, and what is rejected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spec_stack import StepContext
from spec_stack.bench.recorded import BASELINE, read, registered, replay_policies
from spec_stack.bench.replay import fit_costs, merge_runs, replay
from spec_stack.controller.base import DraftSignals, Policy, StepRecord
from spec_stack.controller.registry import POLICIES, make_policy
from spec_stack.controller.simple import Fixed
from spec_stack.records import add_records
from tests.support.controller_data import COSTS, StepCosts, runs

RECORDS = runs(6)
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


class Mine(Policy):
    """Drafts three tokens, and notes the prompts that it observes."""

    seen: list[str] = []  # noqa: RUF012

    def choose(self, context: StepContext) -> int:
        return 3

    def observe(self, record: StepRecord) -> None:
        if record.request_id not in self.seen:
            self.seen.append(record.request_id)


@pytest.fixture
def mine() -> Iterator[type[Mine]]:
    POLICIES["mine"] = Mine
    Mine.seen.clear()
    yield Mine
    del POLICIES["mine"]


def test_a_registered_policy_of_ones_own_has_a_row_of_its_own_steps(mine: type[Mine]) -> None:
    board = replay_policies(RECORDS, num_folds=3)
    rows = {line.policy: line for line in board.of("fp16")}
    assert {"mine", *POLICIES, BASELINE, "oracle"} - {"fixed"} <= set(rows)
    costs = fit_costs(RECORDS)["fp16"]
    scores = [replay(text, Mine(), costs) for text in merge_runs(RECORDS).texts]
    assert rows["mine"].tokens_per_s == pytest.approx(
        sum(score.num_tokens for score in scores) / sum(score.seconds for score in scores)
    )
    assert all(rows["oracle"].tokens_per_s >= row.tokens_per_s - 1e-9 for row in rows.values())
    assert rows[BASELINE].speed.value == 1
    assert {line.task for line in board.lines} == {"all", "chat", "code"}


def test_a_policy_learns_on_the_other_folds_first_unless_it_starts_anew(mine: type[Mine]) -> None:
    first: dict[bool, list[str]] = {}
    for experienced in (True, False):
        mine.seen.clear()
        replay_policies(RECORDS, {"mine": Mine}, num_folds=2, experienced=experienced)
        first[experienced] = list(mine.seen)
    # The chats 0, 2 and 4 and the code 1, 3 and 5 take turns between the folds.
    assert first[False] == [f"prompt-{number}" for number in (0, 3, 4, 1, 2, 5)]
    assert first[True] == [f"prompt-{number}" for number in (1, 2, 5, 0, 3, 4)]


def test_the_baseline_is_the_best_gamma_of_the_training_prompts_at_the_costs_given() -> None:
    cheap, dear = ({"fp16": StepCosts(0.0, each, 0.03, 0.0)} for each in (1e-4, 1.0))
    for costs, fits in ((cheap, lambda gamma: gamma > 2), (dear, lambda gamma: gamma == 0)):
        board = replay_policies(RECORDS, {}, num_folds=2, costs=costs)
        (line,) = [each for each in board.of("fp16") if each.policy == BASELINE]
        assert fits(line.proposed_per_step)


@pytest.mark.parametrize("name", ["oracle", BASELINE, "fixed 4", "confidence, tuned"])
def test_a_policy_with_the_name_of_an_added_row_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: added to every comparison; give the policy another name$"):
        replay_policies(RECORDS, {name: Fixed}, num_folds=2)


def test_a_fixed_gamma_that_the_user_names_has_a_row_of_its_own() -> None:
    board = replay_policies(RECORDS, registered(["fixed:gamma=3"]) | {"fixed": Fixed}, num_folds=2)
    assert {"fixed:gamma=3", "fixed", "fixed 4"} <= {line.policy for line in board.of("fp16")}


def test_policies_are_named_with_options() -> None:
    made = registered(["confidence:threshold=0.3,max_gamma=5", "speckv:objective=per_step"])
    confidence, speckv = (make() for make in made.values())
    assert confidence == make_policy("confidence", threshold=0.3, max_gamma=5)
    assert speckv.objective == "per_step"  # type: ignore[attr-defined]
    fixed = registered(["fixed"], {"fixed": {"gamma": 7}})["fixed"]()
    assert isinstance(fixed, Fixed)
    assert fixed.gamma == 7
    with pytest.raises(ValueError, match="did you mean 'confidence'"):
        registered(["confidense"])
    with pytest.raises(ValueError, match="has no option 'treshold'"):
        registered(["confidence:treshold=0.3"])


def test_runs_whose_steps_train_nothing_are_replayed_without_the_trained_predictors() -> None:
    looked_up = [replace(record, signals=DraftSignals(), num_ngram_tokens=record.gamma) for record in RECORDS]
    for records, can_train in ((RECORDS, True), (looked_up, False)):
        board = replay_policies(records, {}, num_folds=2)
        assert ("speckv, trained" in {line.policy for line in board.of("fp16")}) == can_train
        assert any("two drafted steps in a row: no row" in note for note in board.notes) != can_train


def test_a_prompt_at_several_keep_rates_is_refused() -> None:
    pruned = [replace(record, keep_rate=0.2) for record in RECORDS]
    assert replay_policies(pruned, {}, num_folds=2).of("fp16")
    with pytest.raises(ValueError, match="'prompt-0' was recorded at several keep rates; give the records of one"):
        replay_policies([*RECORDS, *pruned], {}, num_folds=2)


def test_records_of_one_prompt_and_files_of_another_kind_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="record two or more"):
        replay_policies(runs(1), costs={"fp16": COSTS})
    path = tmp_path / "records.jsonl"
    add_records(RECORDS, path)
    assert read([path, path]) == [*RECORDS, *RECORDS]
    with pytest.raises(ValueError, match=r"give a \.jsonl file"):
        read([tmp_path / "records.txt"])
