"""The offline scripts on a small synthetic stand-in for the authors' data."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import mean

import pytest

from experiments.policies import evaluate_policies, published
from experiments.policies.published import PUBLISHED_COLUMNS, read_steps
from spec_stack.controller.base import StepRecord
from spec_stack.controller.predictor import step_features
from spec_stack.records import add_records
from tests.support.controller_data import Greedy, runs


def reduce(records: list[StepRecord], folder: Path) -> None:
    """Write records as the authors did: aggregates per step, and a line per run."""
    steps, experiments = [], []
    for prompt, policy in dict.fromkeys((record.request_id, record.policy) for record in records):
        mine = [record for record in records if (record.request_id, record.policy) == (prompt, policy)]
        gamma = int(policy.removeprefix("fixed-"))
        run = {"compression": mine[0].precision, "gamma": gamma, "task": mine[0].task}
        run |= {"num_tokens": sum(record.num_tokens for record in mine)}
        experiments.append(run | {"elapsed_sec": sum(record.draft_s + record.verify_s for record in mine)})
        for record in mine:
            drafted = (record.num_accepted, record.num_accepted / record.gamma, record.num_tokens)
            signals = (round(value, 4) for value in step_features(record.signals, record.precision, gamma)[:4])
            values = (record.precision, gamma, record.task, *drafted, *signals)
            steps.append(dict(zip(PUBLISHED_COLUMNS, values, strict=True)))
    for name, rows in ((published.STEPS_FILE, steps), (published.RUNS_FILE, experiments)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def authors_runs(num_prompts: int) -> list[StepRecord]:
    """Runs as the authors' loop makes them: of 80 tokens, the last step overshooting."""
    texts = [Greedy(seed, num_tokens=80) for seed in range(num_prompts)]
    return [
        record
        for number, text in enumerate(texts)
        for gamma in (2, 4, 6, 8)
        for record in text.record(f"prompt-{number}", gamma, reserve=0)
    ]


def test_the_best_gamma_is_the_one_with_most_tokens_per_second(tmp_path: Path) -> None:
    records = authors_runs(3)
    reduce(records, tmp_path)
    speeds = {}
    for gamma in (2, 4, 6, 8):
        mine = [record for record in records if record.policy == f"fixed-{gamma}"]
        by_prompt = [[record for record in mine if record.request_id == f"prompt-{number}"] for number in range(3)]
        speeds[gamma] = sum(
            sum(record.num_tokens for record in run) / sum(record.draft_s + record.verify_s for record in run)
            for run in by_prompt
        )
    assert published.best_gammas(tmp_path / published.RUNS_FILE) == {("fp16", "chat"): max(speeds, key=speeds.get)}  # type: ignore[arg-type]


def test_the_authors_steps_become_columns(tmp_path: Path) -> None:
    records = authors_runs(2)
    reduce(records, tmp_path)
    table = read_steps(tmp_path / published.STEPS_FILE)
    assert table.num_accepted.tolist() == [record.num_accepted for record in records]
    assert table.mean_entropy == pytest.approx([mean(record.signals.entropy) for record in records], abs=1e-4)
    assert set(table.precision) == {record.precision for record in records}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "missing columns compression, gamma"),
        (",".join(PUBLISHED_COLUMNS) + "\n", "no rows"),
    ],
)
def test_a_file_that_is_not_the_authors_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"steps\.csv: {message}"):
        read_steps(path)


@pytest.mark.parametrize("name", [published.STEPS_FILE, published.RUNS_FILE])
@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("task", None, r", line 3: .* cannot be None"),
        ("gamma", "nan", r", line 3: gamma cannot be 'nan'"),
        ("gamma", "4.0", r", line 3: gamma cannot be '4\.0'"),
        (-1, "nan", r", line 3: \w+ cannot be 'nan'"),
        (-1, "", r", line 3: \w+ cannot be ''"),
        ("gamma", "", r", line 3: gamma cannot be ''"),
    ],
)
def test_a_damaged_cell_is_named_with_file_and_line(
    name: str, column: str | int, cell: str | None, message: str, tmp_path: Path
) -> None:
    reduce(authors_runs(1), tmp_path)
    path = tmp_path / name
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    at = header.index(column) if isinstance(column, str) else column
    rows[1] = rows[1][:at] if cell is None else [*rows[1][:at], cell, *rows[1][at:][1:]]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    with pytest.raises(ValueError, match=name.replace(".", r"\.") + message):
        (read_steps if name == published.STEPS_FILE else published.best_gammas)(path)


@pytest.mark.parametrize(
    ("text", "message"), [("compression,task,gamma\n", "missing columns num_tokens"), (None, "no rows")]
)
def test_a_file_of_runs_that_is_not_the_authors_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / published.RUNS_FILE
    path.write_text(text or "compression,task,gamma,num_tokens,elapsed_sec\n")
    with pytest.raises(ValueError, match=message):
        published.best_gammas(path)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_evaluation_ends_in_one_json_line_with_every_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.jsonl"
    add_records(runs(6), path)
    monkeypatch.setattr("sys.argv", ["evaluate_policies", str(path), "--folds=3", "--stress"])
    evaluate_policies.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(line["boards"]) > {"as recorded", "started anew", "always wrong, sure, 0.5 of a plain step a token"}
    rows = line["boards"]["as recorded"]["fp16"]["all"]
    assert {"throughput", "speckv", "best fixed", "confidence, tuned", "speckv, trained", "oracle"} <= set(rows)
    assert all(rows["oracle"][0] >= speed for speed, _, _ in rows.values())
    wrong = line["boards"]["always wrong, sure, 0.5 of a plain step a token"]["fp16"]["all"]
    assert wrong["fixed 2"][0] == pytest.approx(1 / 2, abs=0.02)
    assert wrong["oracle"][0] == wrong["fixed 0"][0] == 1
