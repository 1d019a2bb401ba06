"""Where and with what a figure was measured; every result line carries it."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from spec_stack.hf.loading import ASSETS


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _git(*arguments: str) -> str:
    try:
        git = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return git.stdout.strip()


def commit() -> str:
    """The commit in hand, "-dirty" where a tracked file differs from it. Results and pages do not count: a script that
    has just written them must not speak against the next one."""
    changed = _git(
        "status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)experiments/results", ":(top,exclude)docs"
    )
    return (_git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


# The pair that this process has loaded, for its result line; a script loads one.
_pair: list[str] = []
# Of a weight file, at each end: enough to tell files apart, whatever their size.
_SAMPLE_BYTES = 1 << 20


def fingerprint(folder: str | Path) -> str:
    """Twelve digits that tell a model's weights from any others'; the name itself for what is no folder (a hub id)."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        return str(folder)
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:12]


def pair_fingerprint(target: str | Path | None = None, draft: str | Path | None = None) -> str:
    """ "target/draft" of a pair, the embedded one where neither is named."""
    folders = (target or ASSETS / "target", draft or ASSETS / "draft")
    return "/".join(fingerprint(folder) for folder in folders)


def note_pair(target: str | Path | None, draft: str | Path | None) -> None:
    """Have the result line name this pair."""
    _pair[:] = [pair_fingerprint(target, draft)]


def _portable(argument: str) -> str:
    """NAME=/a/way/to/folder/file as NAME=…/folder/file: where one machine keeps files says nothing elsewhere."""
    name, sign, path = argument.rpartition("=")
    if not Path(path).is_absolute():
        return argument
    inside = Path(path).is_relative_to(Path.cwd())
    return name + sign + (str(Path(path).relative_to(Path.cwd())) if inside else "…/" + "/".join(Path(path).parts[-2:]))


def describe() -> dict[str, Any]:
    """Date, commit, machine kind, threads, versions, the command, and the pair that was loaded last (None for none)."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *map(shlex.quote, map(_portable, sys.argv[1:]))]),
        "pair": _pair[0] if _pair else None,
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
