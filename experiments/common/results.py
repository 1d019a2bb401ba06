"""Where the committed results come from, and which of them are stale.

A result is stale where it was made with another pair than today's embedded one, or where its script has changed since
the commit it was made at. Lists all of experiments/results; --write puts the table into docs/results-sources.md and the
rows of headlines.py into docs/results.md, --stale prints the names of stale ones alone, and ends with status 1 if there
are any.

    python -m experiments.common.results [--write] [--stale]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common import headlines
from experiments.common.environment import pair_fingerprint
from experiments.common.script import run_script

ROOT = Path(__file__).parents[2]
RESULTS, RUNS = ROOT / "experiments" / "results", ROOT / "experiments" / "runs"
PAGE, SOURCES = ROOT / "docs" / "results.md", ROOT / "docs" / "results-sources.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
# In these the embedded pair's weights have no part: random models, models of their own, published records, encoding.
_OF_NO_PAIR = frozenset(
    {
        "as_published",
        "bench_session_random",
        "evaluate_policies_published",
        "policy_cost",
        "simulate_texts",
        "support_table",
    }
)
_WEIGHTS = ("spec_stack/assets/draft/model.safetensors", "spec_stack/assets/target/model.safetensors")


@dataclass(frozen=True)
class Result:
    """A committed result. Empty strings are what it does not say; results made before a field existed lack it."""

    name: str
    command: str
    script: str
    date: str
    commit: str
    machine: str
    pair: str

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a file of experiments/results."""
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        described = content if isinstance(content, dict) else {}
        # A file of several pairs says it pair by pair, the newest first.
        parts = [each for each in described.values() if isinstance(each, dict)]
        environment = next((part["measured"] for part in parts if "measured" in part), described.get("environment", {}))

        def told(name: str) -> str:
            return str(described.get(name) or (environment.get(name) if isinstance(environment, dict) else "") or "")

        return cls(
            name=path.stem,
            command=told("run") or _command_of(path.stem, told("experiment"), told("command")),
            script=_script_of(told("experiment") or path.stem),
            date=told("date"),
            # A commit that a rebase took out of the history stands beside the one that recorded the result.
            commit=told("recorded_at") or told("commit"),
            machine=told("machine"),
            pair=told("pair"),
        )

    def why_stale(self, pair: str) -> str:
        """Say what speaks against it, today's pair given; empty where nothing does."""
        uses_pair = self.name not in _OF_NO_PAIR
        if uses_pair and self.pair and self.pair != pair:
            return "made with another pair"
        commit = self.commit.removesuffix("-dirty")
        if not commit:
            return "does not say which commit it was made at"
        if _git("cat-file", "-e", f"{commit}^{{commit}}"):
            return "made at a commit that is not in this history"
        if uses_pair and not self.pair and _changed_since(commit, _WEIGHTS):
            return "the embedded pair has changed since"
        if self.script and _changed_since(commit, [self.script]):
            return "its script has changed since"
        return ""


def note_where_recorded(path: Path) -> None:
    """Add to a result whose commit a rebase took out of the history the one that recorded the file. Writes it."""
    commit = Result.read(path).commit.removesuffix("-dirty")
    recorded_at = _git_output("log", "-1", "--format=%h", "--", path.as_posix())
    if not commit or not recorded_at or _git("cat-file", "-e", f"{commit}^{{commit}}") == 0:
        return
    text = path.read_text(encoding="utf-8")
    named = re.sub(r'("commit": "[^"]*")', rf'\1, "recorded_at": "{recorded_at}"', text, count=1)
    path.write_text(named, encoding="utf-8")


def read_all() -> list[Result]:
    """All committed results, by name."""
    return [Result.read(path) for path in sorted(RESULTS.glob("*.json"))]


def table(results: list[Result]) -> str:
    """A Markdown table of where each is from. It says nothing of the day it is written on, so a test can compare it."""
    lines = ["| result | command | date | commit | machine | pair |", "|---|---|---|---|---|---|"]
    for each in results:
        command = f"`{each.command}`" if each.command else "-"
        commit = f"`{each.commit}`" if each.commit else "-"
        pair = f"`{each.pair}`" if each.pair else "not named"
        lines.append(f"| {each.name} | {command} | {each.date or '-'} | {commit} | {each.machine or '-'} | {pair} |")
    return "\n".join(lines)


def pages(results: list[Result]) -> dict[Path, str]:
    """The two pages as they ought to be."""
    rows = headlines.table({each.name: each.commit for each in results})
    tables = {PAGE: rows, SOURCES: table(results)}
    return {path: with_table(path.read_text(encoding="utf-8"), own) for path, own in tables.items()}


def with_table(page: str, rows: str) -> str:
    """A page with a table between its marks. Raises ValueError where it has none."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must hold {BEGIN} and {END} once each")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{rows}\n{END}{rest.split(END)[1]}"


def _command_of(name: str, experiment: str, command: str) -> str:
    """Return the run script of that name or the one that leaves its file, else the command that the result names."""
    own = RUNS / f"{name}.sh"
    if own.is_file():
        return f"experiments/runs/{own.name}"
    leaves = re.compile(rf'keep {name} |--out "?\$\w+/{name}\.(json|parquet)\b')
    for path in sorted(RUNS.glob("*.sh")):
        if leaves.search(path.read_text(encoding="utf-8")):
            return f"experiments/runs/{path.name}"
    script = _script_of(experiment or name)
    arguments = command.partition(" ")[2]
    if not script:
        return ""
    return f"python -m {script.removesuffix('.py').replace('/', '.')} {_without_out(arguments)}".strip()


def _without_out(arguments: str) -> str:
    """Leave out where the report went, which says nothing of how it was made."""
    return re.sub(r" ?--out \S+", "", arguments)


def _script_of(experiment: str) -> str:
    found = sorted((ROOT / "experiments").glob(f"*/{experiment}.py"))
    return found[0].relative_to(ROOT).as_posix() if found else ""


def _changed_since(commit: str, paths: list[str] | tuple[str, ...]) -> bool:
    """Return whether a file differs from what it was at a commit."""
    return _git("diff", "--quiet", commit, "--", *paths) != 0


def _git(*arguments: str) -> int:
    """Status of a git command in this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False).returncode


def _git_output(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the tables of the two pages")
    parser.add_argument("--stale", action="store_true", help="print the names of stale results")
    arguments = parser.parse_args()
    results, pair = read_all(), pair_fingerprint()
    if arguments.write:
        for path in sorted(RESULTS.glob("*.json")):
            note_where_recorded(path)
        results = read_all()
        for path, text in pages(results).items():
            path.write_text(text, encoding="utf-8")
    stale = {each.name: reason for each in results if (reason := each.why_stale(pair))}
    if arguments.stale:
        print("\n".join(f"{name}: {reason}" for name, reason in stale.items()))
        sys.exit(1 if stale else 0)
    print(f"today's pair: {pair}")
    for each in results:
        print(f"{each.name:32s}{each.date:12s}{each.commit:16s}{stale.get(each.name, 'up to date')}")


if __name__ == "__main__":
    run_script(main)
