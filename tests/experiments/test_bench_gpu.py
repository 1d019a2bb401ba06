"""The GPU benchmark end to end on a CPU, at toy sizes: it must not rot between the days a GPU is at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.gpu import shapes as gpu_shapes

ROOT = Path(__file__).parents[2]


def run_bench(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The file and the output; without what is installed from here, so that PYTHONPATH must be enough."""
    command = [
        sys.executable,
        "-m",
        "experiments.gpu.bench_gpu",
        "--device",
        "cpu",
        "--shape",
        "tiny",
        "--out",
        str(out),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text(encoding="utf-8")), done.stdout


@pytest.mark.slow
def test_every_case_runs_and_leaves_its_figures(tmp_path: Path) -> None:
    report, output = run_bench(tmp_path / "out.json", "--repeats", "2", "--commit", "abc")
    assert json.loads(output.splitlines()[-1]) == report
    assert report["commit"] == "abc"
    assert {"date", "device", "torch", "transformers", "shape", "budget_s", "spent_s"} <= set(report)
    assert report["skipped"] == []
    cases = report["cases"]
    assert not [name for name, case in cases.items() if "error" in case]
    for length in (256, 512):
        rows = cases[f"scoring attention {length}"]["rows"]
        assert set(rows) == {f"all {tokens}" for tokens in (length, length + 37)}
        assert all(row["cold_ms"] > 0 and row["warm_ms"] > 0 for row in rows.values())
    growing = cases["growing eager"]
    assert growing["c"] == pytest.approx(growing["draft"]["median_ms"] / growing["target"]["median_ms"], rel=1e-3)
    assert growing["draft"]["ran"].startswith("eager")
    static = cases["growing static"]
    assert (static["draft"]["ran"], static["target"]["ran"]) == ("static", "static")
    assert static["target"]["verify_5_ms"] > 0
    for length in (256, 512):
        prefill = cases[f"prefill {length}"]
        assert [row["keep_rate"] for row in prefill["rows"]] == [0.2, 0.5]
        for row in prefill["rows"]:
            times = prefill["times"]
            gain = times["dense"]["ms"] / times[f"sparse {row['keep_rate']}"]["ms"]
            assert row["ttft_gain"] == pytest.approx(gain, rel=1e-2)
            assert row["bound"] == pytest.approx(1 / (prefill["r"] + row["s"]), rel=1e-2)
            assert row["share_of_bound"] == pytest.approx(row["ttft_gain"] / row["bound"], rel=1e-2)
    assert set(cases["decode target 192"]["over_one"]) == {str(size) for size in range(1, 10)}
    assert set(cases["decode draft 64"]["over_one"]) == {"1", "2"}


@pytest.mark.parametrize(
    ("shape", "role", "billions"),
    [("llama-8b", "target", 8.03), ("llama-8b", "draft", 1.236), ("qwen-32b", "target", 32.76)],
)
def test_the_shapes_have_the_models_sizes(shape: str, role: str, billions: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(getattr(gpu_shapes.SHAPES[shape], role))
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_python_that_is_too_old_is_named_before_anything_runs(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.12\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    script = ROOT / "experiments" / "runs" / "bench_gpu.sh"
    done = subprocess.run(
        ["bash", script], env=os.environ | {"PYTHON": str(old)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Python 3.10.12, and Python 3.11 or newer is needed" in done.stderr
