"""The pages of the documentation, as data: their fenced blocks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w*) *(.*)$")
_TITLE = re.compile(r'title="([^"]*)"')
_NOT_RUN = re.compile(r"^<!-- not run: .+ -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block. line: where its code begins, counted from 1. title: of a block that belongs into a file.
    is_run: not marked as one that needs what a test has not. output: what the page says it prints, None if nothing."""

    language: str
    title: str
    code: str
    line: int
    is_run: bool
    output: str | None = None


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order; a `text` block without a title behind a `python` one is its output."""
    found: list[Block] = []
    for block in _fences(page.read_text(encoding="utf-8")):
        if block.language == "text" and not block.title and found and found[-1].language == "python":
            found[-1] = replace(found[-1], output=block.code)
        else:
            found.append(block)
    return found


def _fences(text: str) -> Iterator[Block]:
    lines = text.split("\n")
    before = ""
    start: int | None = None
    for number, line in enumerate(lines, start=1):
        match = _FENCE.match(line)
        if start is None and match:
            start, language, rest, is_run = number + 1, match[1], match[2], not _NOT_RUN.match(before)
        elif start is not None and line == "```":
            title = _TITLE.search(rest)
            code = "\n".join(lines[start - 1 : number - 1]) + "\n"
            yield Block(language, title[1] if title else "", code, start, is_run)
            start = None
        before = line or before
    if start is not None:
        raise ValueError(f"the block that begins in line {start} has no end")


def python_blocks(page: Path) -> list[Block]:
    """The blocks that are Python to run or to read; not those that belong into a file."""
    return [block for block in blocks(page) if block.language == "python" and not block.title]


def copy_repository(to: Path, *folders: str) -> None:
    """These folders of the repository, without weights and results."""
    for folder in folders:
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "results")
        shutil.copytree(ROOT / folder, to / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", to)


def run_python(root: Path | str, *arguments: str, cwd: Path | str | None = None) -> str:
    """What Python prints with this folder's packages; it must end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
