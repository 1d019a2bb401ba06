from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments.policies import bench_policies


@pytest.mark.slow
def test_the_whole_script_runs_and_pairs_only_what_was_timed_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    rows = [{"task": "code", "text": text} for text in ("def add(a, b):", "class Stack:", "import os", "x = 1")]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    options = "--per-task 4 --leave-out 2 --tokens 6 --repeats 1 --gammas 2 --policies throughput --confidence 0.5"
    arguments = [f"code={prompts}", *options.split(), "--device", "cpu", "--threads", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_policies.py", *arguments])
    bench_policies.main()
    line = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    assert {"plain", "fixed-2", "throughput", "transformers, plain"} < set(line["result"]["all"]["tokens_per_s"])
    assert set(line["paired"]["throughput"]) == {"plain", "fixed-2", "confidence 0.5"}
    assert all(entry["prompts_with_other_tokens"] == 0 for entry in line["details"].values())
    assert {len(seconds) for seconds in line["details"]["throughput"]["decode_seconds"].values()} == {1}
    assert len(line["details"]["throughput"]["decode_seconds"]) == 2
