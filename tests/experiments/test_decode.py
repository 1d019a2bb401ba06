"""The live comparison of decoding, on the embedded pair."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments.real import decode


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["decode.py", *arguments])
    decode.main()


@pytest.mark.slow
@pytest.mark.nightly
def test_every_arm_gives_the_tokens_of_plain_and_a_second_run_asks_for_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, rows = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    texts = ["def add(a, b):\n", "class Stack:\n", "import os\n"]
    prompts.write_text("\n".join(json.dumps({"task": "code", "text": text}) for text in texts))
    options = f"--rows {rows} --per-task 4 --tokens 8 --device cpu --precision fp32 --gamma 2"
    run(monkeypatch, f"code={prompts}", *options.split(), "--draft-precision", "fp32", "--limit", "2")
    told = capsys.readouterr().out.splitlines()
    report = json.loads(told[-1])
    assert (report["num_prompts"], report["num_left"], report["partings"]) == (2, 0, {})
    for name in decode.NAMES:
        of_arm = report["all"][name]
        assert of_arm["same_tokens"] == 2, name
        assert 0 <= of_arm["acceptance"] <= 1, name
        assert 1 <= of_arm["tokens_per_step"] <= 12, name
    kept = rows.read_text()
    run(monkeypatch, f"code={prompts}", *options.split(), "--draft-precision", "fp32", "--limit", "2")
    assert rows.read_text() == kept
    run(monkeypatch, f"code={prompts}", *options.split(), "--draft-precision", "fp32", "--arms", "draft")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["all"]) == {"plain", "draft"}
    assert report["num_prompts"] == 3


def test_a_function_to_complete_is_asked_for_in_words_and_tasks_take_turns(tmp_path: Path) -> None:
    files = {}
    for task in ("code", "math"):
        files[task] = tmp_path / f"{task}.jsonl"
        row = {"task": task, "text": "def f():"} if task == "code" else {"question": "How many?", "answer": "2"}
        files[task].write_text("\n".join(json.dumps(row) for _ in range(3)))
    chosen = decode.choose([f"{task}={path}" for task, path in files.items()], 2)
    assert [key for key, _ in chosen] == ["code-0", "math-0", "code-1", "math-1"]
    assert all(prompt.is_chat for _, prompt in chosen)
    assert chosen[0][1].text.startswith("Complete this Python function:")
