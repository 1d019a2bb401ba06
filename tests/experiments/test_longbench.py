"""LongBench's metrics: what each counts, by hand; and a run over the embedded pair that goes on where it ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.real import longbench, quality
from experiments.real.longbench import LongBenchTask, check_metrics, read_tasks, score
from spec_stack.bench.rows import Rows
from spec_stack.hf.loading import resolve_pair

_TASK = LongBenchTask("qasper", "0", "A question", ("The red car.", "a bicycle"), (), 10)
_CLASSES = replace(_TASK, task="trec", answers=("Other location",), classes=("location", "Other location", "Date"))
_CODE = replace(_TASK, task="lcc", answers=("    return x",))
_NUMBERED = replace(_TASK, task="passage_retrieval_en", answers=("Paragraph 19",))


@pytest.mark.parametrize(
    ("task", "answer", "expected"),
    [
        # The best of the right answers counts.
        (_TASK, "Red car", 1.0),
        (_TASK, "an old bicycle", 2 * 1 / (2 + 1)),
        (_TASK, "nothing", 0.0),
        # A class that is part of the right one costs nothing.
        (_CLASSES, "\nOther location\nQuestion: Date", 1.0),
        (_CLASSES, "Other location, Date", 0.5),
        (_CLASSES, "Date", 0.0),
        # The first line that is code.
        (_CODE, "\n# a comment\n    return x\n    return y", 1.0),
        (_CODE, "```", 0.0),
        # Numbers that are not asked for share the score.
        (_NUMBERED, "Paragraph 19", 1.0),
        (_NUMBERED, "Paragraph 19 or Paragraph 1", 0.5),
    ],
)
def test_an_answer_has_its_tasks_score(task: LongBenchTask, answer: str, expected: float) -> None:
    assert score(task, answer) == pytest.approx(expected)


def test_summaries_are_judged_by_the_longest_common_sequence_of_words() -> None:
    pytest.importorskip("rouge")
    task = replace(_TASK, task="samsum", answers=("tom buys a red car",))
    assert score(task, "tom sells a car\nsecond line") == pytest.approx(
        2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5), abs=1e-6
    )
    assert score(task, " ... ") == 0.0


def test_a_file_is_read_with_its_classes(tmp_path: Path) -> None:
    gold = {"answers": ["Date"], "all_classes": ["Date"]}
    rows = [
        {"task": "lcc", "index": "3", "prompt": "a\nb", "gold": ["c"], "tokens": 5},
        {"task": "trec", "index": "4", "prompt": "q", "gold": gold, "tokens": 6},
    ]
    path = tmp_path / "dev.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    first, second = read_tasks(path)
    assert (first.name, first.is_raw, first.max_tokens) == ("lcc-3", True, 64)
    assert (second.answers, second.classes) == (("Date",), ("Date",))


def test_a_multi_hop_question_is_asked_as_longbench_asks_it(tmp_path: Path) -> None:
    paragraphs = [{"title": "A", "sentences": ["One. ", "Two."], "gold": [1]}, {"title": "B", "sentences": ["Three."]}]
    record = {"id": "q7", "question": "Which?", "answers": ["Two", "2"], "kind": "2hop", "paragraphs": paragraphs}
    path = tmp_path / "2wikimultihopqa.jsonl"
    path.write_text(json.dumps(record), encoding="utf-8")
    (task,) = read_tasks(path)
    assert (task.name, task.max_tokens, task.answers) == ("2wikimqa-q7", 32, ("Two", "2"))
    assert "\nPassage 1:\nA\nOne. Two.\nPassage 2:\nB\nThree.\n\nAnswer" in task.prompt
    assert task.prompt.endswith("Question: Which?\nAnswer:")
    assert score(task, "It is Two") == pytest.approx(2 * (1 / 3) / (1 / 3 + 1))


def test_a_missing_metric_is_told_before_anything_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longbench, "find_spec", lambda _: None)
    check_metrics([_TASK])
    with pytest.raises(ValueError, match=r"\[longbench\]"):
        check_metrics([_TASK, replace(_TASK, task="samsum")])


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_answers_every_arm_once_and_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(f"The {word} stands in line {at} of the log." for at, word in enumerate(["car", "bird"] * 30))
    tasks = [
        {"task": task, "index": "0", "prompt": f"{text}\nWhere is it?", "gold": ["line"], "tokens": 900}
        for task in ("qasper", "lcc")
    ]
    data, rows = tmp_path / "dev.jsonl", tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, tasks)), encoding="utf-8")
    target, draft = map(str, resolve_pair(None, None))
    command = ["quality", str(data), "--target", target, "--draft", draft, "--precision", "fp32", "--max-tokens", "4"]
    monkeypatch.setattr("sys.argv", [*command, "--rows", str(rows), "--limit", "1"])
    quality.main()
    first = rows.read_text(encoding="utf-8")
    arms = quality.arms_of(None)
    assert len(first.splitlines()) == len(arms)
    monkeypatch.setattr("sys.argv", [*command, "--rows", str(rows)])
    quality.main()
    assert rows.read_text(encoding="utf-8").startswith(first)
    found = Rows(rows, 0)
    for task in ("qasper-0", "lcc-0"):
        kept = {arm: found.of_arm(arm)[task]["num_kept"] for arm in arms}
        whole = found.of_arm(quality.DENSE)[task]["num_tokens"]
        assert kept[quality.DENSE] == kept[quality.NOISE] == whole
        assert kept["default 0.1"] < kept["default 0.2"] < kept["default 0.3"] < whole
        # Whole lines, so the same share to within one of them.
        assert all(abs(kept[arm] - 0.2 * whole) < 20 for arm in (quality.RANDOM, "BM25 0.2", "default 0.2"))
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["num_left"] == 0
    assert report["arms"][quality.DENSE]["over_dense"] == [0, 0, 0]
    losses = [found.of_arm(arm)["lcc-0"]["loss"] for arm in (quality.DENSE, quality.NOISE, "default 0.1")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert losses[2] != pytest.approx(losses[0], abs=1e-3)
