"""Where and with what a figure was measured; every result line carries it."""

from __future__ import annotations

import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _commit() -> str:
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return git.stdout.strip() or "unknown"


def describe() -> dict[str, Any]:
    """Date, commit, machine kind, threads and versions."""
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
