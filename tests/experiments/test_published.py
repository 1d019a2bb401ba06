"""The offline scripts on a small synthetic stand-in for the authors' data."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.policies import published
from experiments.policies.published_columns import PUBLISHED_COLUMNS, read_steps
from experiments.policies.replay import merge_runs
from spec_stack.controller.base import StepRecord
from spec_stack.records import add_records
from tests.support.controller_data import Greedy, runs

ROOT = Path(__file__).parents[2]


def reduce(records: list[StepRecord], folder: Path) -> None:
    """Write records as the authors did: aggregates per step, and a line per run."""
    steps, experiments = [], []
    for prompt, policy in dict.fromkeys((record.request_id, record.policy) for record in records):
        mine = [record for record in records if (record.request_id, record.policy) == (prompt, policy)]
        gamma = int(policy.removeprefix("fixed-"))
        experiments.append(
            {
                "compression": mine[0].precision,
                "gamma": gamma,
                "task": mine[0].task,
                "prompt": prompt,
                "num_tokens": sum(record.num_tokens for record in mine),
                "elapsed_sec": sum(record.draft_s + record.verify_s for record in mine),
                "num_steps": len(mine),
            }
        )
        for record in mine:
            signals = record.signals
            values = (
                record.precision,
                gamma,
                record.task,
                record.step,
                record.num_accepted,
                record.num_accepted / record.gamma,
                record.num_tokens,
                round(signals.mean_entropy, 4),
                round(signals.mean_confidence, 4),
                round(signals.max_entropy, 4),
                round(signals.min_confidence, 4),
            )
            steps.append(dict(zip(PUBLISHED_COLUMNS, values, strict=True)))
    for name, rows in ((published.STEPS_FILE, steps), (published.RUNS_FILE, experiments)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def authors_runs(num_prompts: int) -> list[StepRecord]:
    """Runs as the authors' loop makes them: of 80 tokens, the last step overshooting."""
    texts = [Greedy(seed, num_tokens=published.NUM_TOKENS) for seed in range(num_prompts)]
    return [
        record
        for number, text in enumerate(texts)
        for gamma in (2, 4, 6, 8)
        for record in text.record(f"prompt-{number}", gamma, reserve=0)
    ]


def test_recovered_signals_are_the_true_ones_wherever_they_are_determined(tmp_path: Path) -> None:
    reduce(authors_runs(3), tmp_path)
    data = published.load(tmp_path)
    texts = {text.prompt: text for text in merge_runs(data.records).texts}
    errors = []
    for seed in range(3):
        greedy, text = Greedy(seed, num_tokens=published.NUM_TOKENS), texts[f"prompt-{seed}"]
        assert list(text.correct[: published.NUM_TOKENS]) == greedy.correct
        errors += np.abs(np.subtract(text.confidence[: published.NUM_TOKENS], greedy.confidence)).tolist()
    assert np.mean(np.array(errors) < published.DETERMINED) >= data.determined["fp16"] > 0.4


def test_costs_come_back_from_whole_runs(tmp_path: Path) -> None:
    reduce(authors_runs(4), tmp_path)
    data = published.load(tmp_path)
    assert data.costs["fp16"].verify_base_s == pytest.approx(0.03, rel=0.02)
    assert data.costs["fp16"].draft_per_token_s == pytest.approx(0.01, rel=0.02)
    assert data.cost_r2["fp16"] > 0.99


def test_runs_that_do_not_align_with_steps_are_refused(tmp_path: Path) -> None:
    reduce(authors_runs(2), tmp_path)
    path = tmp_path / published.RUNS_FILE
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match="does not align"):
        published.load(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("mean_draft_entropy", "nan", "not finite"),
        ("acceptance_rate", "", "not a number"),
        ("min_draft_confidence", "inf", "not finite"),
        ("compression", "int4", "unknown precision 'int4'"),
        ("gamma", "17", "unknown gamma 17"),
        ("gamma", "2.5", "not a count"),
        ("accepted", "9", "9 accepted of 2 proposed"),
    ],
)
def test_a_wrong_cell_of_the_authors_file_is_named_by_place(
    tmp_path: Path, column: str, value: str, message: str
) -> None:
    reduce(authors_runs(1), tmp_path)
    path = tmp_path / published.STEPS_FILE
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[1][column] = value
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, PUBLISHED_COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ValueError, match=rf"results\.csv, line 3, column '{column}': .*{message}"):
        read_steps(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing columns compression"),
        ("a,b\n1,2\n", "missing columns compression, gamma"),
        (",".join(PUBLISHED_COLUMNS) + "\n", "no rows"),
    ],
)
def test_a_file_that_is_not_the_authors_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"steps\.csv: {message}"):
        read_steps(path)


@pytest.mark.slow
def test_the_evaluation_ends_in_one_json_line_with_every_policy(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    add_records(runs(6), path)
    arguments = ("-m", "experiments.policies.evaluate_policies", str(path), "--folds=3", "--resamples=50")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
    )
    line = json.loads(done.stdout.splitlines()[-1])
    rows = line["summary"]["fp16"]
    assert {"throughput", "speckv", "best-fixed", "task-oracle", "oracle"} <= set(rows)
    assert all(abs(error) < 0.01 for error in line["replay_errors"].values())
    assert all(rows["oracle"]["tokens_per_s"] >= row["tokens_per_s"] for row in rows.values())
