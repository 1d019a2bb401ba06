"""LongBench's metrics: what each counts, by hand; and a run over a tiny pair that goes on where it ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.real.longbench import LongBenchTask, read_tasks, score

_TASK = LongBenchTask("qasper", "0", "A question", ("The red car.", "a bicycle"), (), 10)


def test_the_best_of_the_right_answers_counts() -> None:
    assert score(_TASK, "Red car") == 1.0
    assert score(_TASK, "an old bicycle") == pytest.approx(2 * 1 / (2 + 1))
    assert score(_TASK, "nothing") == 0.0


def test_a_class_that_is_part_of_the_right_one_does_not_cost() -> None:
    task = replace(_TASK, task="trec", answers=("Other location",), classes=("location", "Other location", "Date"))
    assert score(task, "\nOther location\nQuestion: Date") == 1.0
    assert score(task, "Other location, Date") == 0.5
    assert score(task, "Date") == 0.0


def test_code_is_judged_by_its_first_line_that_is_code() -> None:
    task = replace(_TASK, task="lcc", answers=("    return x",))
    assert score(task, "\n# a comment\n    return x\n    return y") == 1.0
    assert score(task, "```") == 0.0


def test_summaries_are_judged_by_the_longest_common_sequence_of_words() -> None:
    pytest.importorskip("rouge")
    task = replace(_TASK, task="samsum", answers=("tom buys a red car",))
    assert score(task, "tom sells a car\nsecond line") == pytest.approx(
        2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5), abs=1e-6
    )
    assert score(task, " ... ") == 0.0


def test_numbers_that_are_not_asked_for_share_the_score() -> None:
    task = replace(_TASK, task="passage_retrieval_en", answers=("Paragraph 19",))
    assert score(task, "Paragraph 19") == 1.0
    assert score(task, "Paragraph 19 or Paragraph 1") == 0.5


def test_a_file_is_read_with_its_classes(tmp_path: Path) -> None:
    rows = [
        {"task": "lcc", "index": "3", "prompt": "a\nb", "gold": ["c"], "tokens": 5},
        {
            "task": "trec",
            "index": "4",
            "prompt": "q",
            "gold": {"answers": ["Date"], "all_classes": ["Date"]},
            "tokens": 6,
        },
    ]
    path = tmp_path / "dev.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    first, second = read_tasks(path)
    assert (first.name, first.is_raw, first.max_tokens) == ("lcc-3", True, 64)
    assert (second.answers, second.classes) == (("Date",), ("Date",))
