from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.common.peer_rows import add_up, kvpress_prompt, kvpress_row, speculative_decoding
from experiments.quality.kvpress_rows import read_rows
from experiments.speed.speed_bench import format_report, read_prompts, run, summarise
from spec_stack import SpecStackGenerator
from tests.explain.test_data import record

ROW = {"context": "A fox. ", "question": "What?", "answer_prefix": " It is", "answer": "a fox", "max_new_tokens": 4}


def test_acceptance_is_counted_by_the_steps_that_proposed() -> None:
    steps = [record(0, 2, 2), record(1, 3, 0), record(2, 0, 0), record(3, 4, 2)]
    assert speculative_decoding(steps) == {
        "num_spec_steps": 3,
        "num_draft_tokens": 9,
        "num_accepted_draft_tokens": 4,
        "num_spec_tokens": 7,
        "draft_acceptance_rate": pytest.approx(4 / 9),
        "mean_acceptance_length": pytest.approx(7 / 3),
        "acceptance_histogram": [1, 0, 2],
    }
    plain = speculative_decoding([record(0, 0, 0)])
    assert plain["mean_acceptance_length"] is None
    assert plain["acceptance_histogram"] == []


def test_requests_added_up_are_their_steps_together() -> None:
    parts = [[record(0, 2, 2), record(1, 3, 0)], [record(0, 4, 4), record(1, 1, 1)], [record(0, 0, 0)]]
    assert add_up([speculative_decoding(part) for part in parts]) == speculative_decoding(
        [step for part in parts for step in part]
    )


def test_a_kvpress_row_keeps_its_columns_and_gets_a_prediction() -> None:
    row = kvpress_row(ROW | {"task": "t"}, "a fox", 0.25)
    assert row["task"] == "t"
    assert (row["predicted_answer"], row["compression_ratio"]) == ("a fox", 0.75)
    assert kvpress_prompt(row) == "A fox. What? It is"
    with pytest.raises(ValueError, match="missing: answer_prefix, max_new_tokens"):
        kvpress_row({"context": "", "question": "", "answer": ""}, "", 1.0)


def test_rows_are_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n\n")
    assert read_rows(file) == [ROW]
    with pytest.raises(ValueError, match=r"give a \.jsonl or a \.parquet file"):
        read_rows(tmp_path / "rows.csv")


def test_the_report_compares_every_arm_with_plain(embedded: SpecStackGenerator, tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    rows = [{"category": name, "turns": [f"def {name}(x):"]} for name in ("coding", "math", "coding")]
    file.write_text("\n".join(map(json.dumps, rows)))
    prompts = read_prompts([str(file)], 1)
    assert [prompt.task for prompt in prompts] == ["coding", "math"]
    found = []
    for temperature in (0.0, 1.0):
        for prompt in prompts:
            ids = prompt.encode(embedded.tokenizer)
            arms = {arm: run(embedded, ids, arm, temperature, 8, False, 3) for arm in ("plain", "fixed")}
            found.append({"category": prompt.task, "temperature": temperature, "arms": arms})
    report = summarise(found)
    assert set(report) == {"0.0", "1.0"}
    assert report["0.0"]["all"]["prompts"] == 2
    for categories in report.values():
        assert categories["all"]["arms"]["plain"]["over_plain"] == 1
        assert categories["all"]["arms"]["plain"]["speculative_decoding"]["num_spec_steps"] == 0
        assert categories["coding"]["arms"]["fixed"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert "coding" in format_report(report)
