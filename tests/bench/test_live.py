"""Policies live on the embedded pair: resumed, interleaved, the same text, and a policy of one's own."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from spec_stack import SpecStackGenerator, StepContext
from spec_stack.bench import live
from spec_stack.bench.arms import PLAIN
from spec_stack.bench.live import bench, run_prompt, warmed_up
from spec_stack.bench.prompts import Encoded
from spec_stack.bench.recorded import BASELINE, read, replay_policies
from spec_stack.bench.rows import Rows
from spec_stack.controller.base import Policy
from tests.support.controller_data import COSTS

PROMPTS: list[Any] = [
    {"text": "def add(a, b):\n", "task": "code"},
    "Name three rivers.",
    {"text": "x = 1\n", "task": "code"},
]


class Mine(Policy):
    def choose(self, context: StepContext) -> int:
        return 2


def test_a_policy_of_ones_own_is_compared_and_a_second_run_answers_nothing_again(
    embedded: SpecStackGenerator, tmp_path: Path
) -> None:
    rows, told = tmp_path / "rows.jsonl", []
    options: dict[str, Any] = {"max_tokens": 6, "rivals": False, "rows": rows}
    board = bench(embedded, PROMPTS, {"mine": Mine}, **options, progress=lambda *each: told.append(each[:2]))
    names = {PLAIN, "default", "n-gram lookup", "mine"}
    assert {line.policy for line in board.of("fp32")} == names
    assert {(line.task, line.num_prompts) for line in board.lines} == {("all", 3), ("code", 2)}
    assert all(line.num_same == line.num_prompts for line in board.lines)
    assert told == [(1, 3), (2, 3), (3, 3)]
    kept = rows.read_text()
    assert kept.count("\n") == 3 * len(names)
    again = bench(embedded, PROMPTS, {"mine": Mine}, **options)
    assert again.lines == board.lines
    assert rows.read_text() == kept


def test_a_policy_whose_source_has_changed_is_measured_again(
    embedded: SpecStackGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    monkeypatch.syspath_prepend(tmp_path)

    def num_rows(gamma: int) -> int:
        source = f"class Edited(Policy):\n    def choose(self, context):\n        return {gamma}\n"
        (tmp_path / f"edition_{gamma}.py").write_text(f"from spec_stack import Policy\n\n\n{source}")
        edited = import_module(f"edition_{gamma}").Edited
        bench(embedded, PROMPTS[:1], {"edited": edited}, max_tokens=2, rivals=False, rows=rows)
        return rows.read_text().count("\n")

    assert [num_rows(2), num_rows(2), num_rows(3)] == [4, 4, 5]


def test_transformers_own_answers_are_the_same_text(embedded: SpecStackGenerator) -> None:
    board = bench(embedded, PROMPTS[:1], {}, max_tokens=8)
    theirs = [line for line in board.of("fp32") if line.policy.startswith("Transformers")]
    assert len(theirs) == 6
    assert all(line.num_same == 1 and 1 <= line.tokens_per_step <= 8 for line in theirs)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_what_a_run_has_recorded_is_replayed_with_the_same_steps(embedded: SpecStackGenerator, tmp_path: Path) -> None:
    records, rows = tmp_path / "records.jsonl", tmp_path / "rows.jsonl"
    options: dict[str, Any] = {"max_tokens": 40, "rivals": False, "records": records}
    live = bench(embedded, PROMPTS, {}, **options, rows=rows)
    kept = records.read_text()
    bench(embedded, PROMPTS, {}, **options, rows=rows)
    assert records.read_text() == kept
    with pytest.raises(ValueError, match="exists, and a run may be recorded once"):
        bench(embedded, PROMPTS, {}, **options)
    found = read([records])
    assert {record.policy for record in found} == {"fixed-0", "fixed-2", "fixed-4", "fixed-8"}
    assert {record.task for record in found} == {"code", "all"}
    board = replay_policies(found, {}, num_folds=2, costs={"fp32": COSTS})
    proposed = {line.policy: line.proposed_per_step for line in board.of("fp32")}
    assert BASELINE in proposed
    for line in live.of("fp32"):
        if line.policy.startswith("fixed"):
            # Live steps include the prefill step, which proposes nothing.
            assert line.proposed_per_step == pytest.approx(proposed[line.policy], rel=0.25)


def test_rows_and_records_that_do_not_go_together_are_named(embedded: SpecStackGenerator, tmp_path: Path) -> None:
    rows, records, other = (tmp_path / name for name in ("rows.jsonl", "records.jsonl", "other.jsonl"))
    options: dict[str, Any] = {"max_tokens": 2, "rivals": False}
    bench(embedded, PROMPTS[:1], {}, **options, rows=rows)
    with pytest.raises(ValueError, match=r"records\.jsonl lacks the steps of 'plain'; record with the rows that"):
        bench(embedded, PROMPTS[:1], {}, **options, rows=rows, records=records)
    rows.unlink()
    bench(embedded, PROMPTS[:1], {}, **options, rows=rows, records=records)
    before = rows.read_bytes(), records.read_bytes()
    # A prompt more goes on in both.
    bench(embedded, PROMPTS[:2], {}, **options, rows=rows, records=records)
    assert all(file.read_bytes().startswith(kept) for file, kept in zip((rows, records), before, strict=True))
    assert {record.policy for record in read([records])} == {"fixed-0", "fixed-2", "fixed-4", "fixed-8"}
    assert len({record.request_id for record in read([records])}) == 2
    with pytest.raises(ValueError, match=r"other\.jsonl lacks the steps of 'plain'"):
        bench(embedded, PROMPTS[:1], {}, **options, rows=rows, records=other)
    with pytest.raises(ValueError, match=r"the rows lack 'plain' of .*records\.jsonl"):
        bench(embedded, PROMPTS[:1], {}, **options, rows=other, records=records)


def test_time_ends_a_run_after_its_first_prompt_and_the_board_says_so(embedded: SpecStackGenerator) -> None:
    board = bench(embedded, PROMPTS, {}, max_tokens=1, rivals=False, minutes=1e-9)
    assert board.lines[0].num_prompts == 1
    assert any(note.startswith("2 prompts are left") for note in board.notes)
    assert "embedded test pair" in board.source


def test_arms_take_turns(tmp_path: Path) -> None:
    order: list[tuple[str, int]] = []

    def arm(name: str) -> Any:
        return lambda prompt: order.append((name, prompt.token_ids[0])) or {"token_ids": []}  # type: ignore[func-returns-value]

    arms, rows = {name: arm(name) for name in "abc"}, Rows(tmp_path / "rows.jsonl", 1.0)
    for turn in range(4):
        run_prompt(arms, turn, Encoded(f"{turn}", "code", [turn]), rows)
    assert ["".join(name for name, which in order if which == turn) for turn in range(4)] == [
        "abc",
        "bca",
        "cab",
        "abc",
    ]


def test_a_rival_that_cannot_run_is_left_out_with_its_reason_and_an_own_arm_raises() -> None:
    def failing(num_tokens: int) -> Any:
        raise TypeError("no such cache")

    prompt = Encoded("key", "code", [1])
    arms, notes = warmed_up({"Transformers, assisted, 3": failing, "mine": lambda num_tokens=8: len}, prompt)
    assert list(arms) == ["mine"]
    assert notes == ["left out: Transformers, assisted, 3, no such cache"]
    with pytest.raises(TypeError, match="no such cache"):
        warmed_up({"mine": failing}, prompt)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts to measure"),
        ([{"question": "x"}], {}, "prompt 1 must be a text, or have"),
        *(
            (["x"], {"policies": {name: Mine}}, f"an arm of its own has the name '{name}'; name your policy otherwise")
            for name in (PLAIN, "default", "n-gram lookup", "fixed 2", "Transformers, lookup, 10")
        ),
        (["x"], {"max_tokens": 0}, "must be over 0, got 0 and 10.0"),
        (["x"], {"minutes": 0}, "must be over 0, got 64 and 0"),
    ],
)
def test_bad_input_is_named(
    embedded: SpecStackGenerator, prompts: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bench(embedded, prompts, **options)


@pytest.mark.parametrize("text", ['{"key": "x"}\n', "Notes.\n", "[1"])
def test_a_file_of_other_rows_is_named_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="line 1 is no row of a measurement"):
        Rows(path, 1.0)
    assert path.read_text() == text


def test_a_torn_last_row_is_skipped_and_the_next_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Rows(path, 1.0).add("a", "plain", {"seconds": 1.0})
    with path.open("a") as file:
        file.write('{"key": "b", "arm": "pl')
    rows = Rows(path, 1.0)
    assert ("a", "plain") in rows
    assert ("b", "plain") not in rows
    rows.add("b", "plain", {"seconds": 2.0})
    assert [json.loads(line)["key"] for line in path.read_text().splitlines() if line.endswith("}")] == ["a", "b"]
    assert live.Rows(path, 1.0).num_left(["a", "b", "c"], ["plain"]) == 1
