from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from experiments.common.environment import describe, fingerprint, note_pair, pair_fingerprint
from experiments.common.headlines import BEGIN, END, commit_of, with_table
from experiments.common.script import print_report

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"


def git(*arguments: str) -> int:
    return subprocess.run(["git", *arguments], cwd=RESULTS, capture_output=True, check=False).returncode


def test_a_fingerprint_follows_the_weights_and_nothing_else(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * (3 << 20))
    first = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(tmp_path) == first
    weights.write_bytes(b"a" * ((3 << 20) - 1) + b"b")
    assert fingerprint(tmp_path) != first
    assert fingerprint("owner/model") == "owner/model"


def test_a_page_gets_its_table_between_the_marks() -> None:
    assert with_table(f"a\n{BEGIN}\nyesterday\n{END}\nb", "today") == f"a\n{BEGIN}\ntoday\n{END}\nb"
    with pytest.raises(ValueError, match="must hold"):
        with_table("no marks", "today")


@pytest.mark.skipif(git("rev-parse", "HEAD~50") != 0, reason="a shallow clone has no history to look in")
def test_every_committed_result_names_a_commit_of_the_history() -> None:
    commits = {path.name: commit_of(json.loads(path.read_text())) for path in RESULTS.glob("*.json")}
    missing = {
        name: commit
        for name, commit in commits.items()
        if git("merge-base", "--is-ancestor", commit.removesuffix("-dirty"), "HEAD")
    }
    assert missing == {}


def test_a_result_names_pair_and_command_and_no_folders_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    note_pair(None, None)
    inside = tmp_path / "results" / "x.json"
    monkeypatch.setattr(
        "sys.argv", ["/far/script.py", "code=/home/me/data/files/a.jsonl", "--out", str(inside), "--n", "3"]
    )
    line = describe()
    assert line["pair"] == pair_fingerprint()
    assert line["command"] == f"script.py 'code=…/files/a.jsonl' --out {inside.relative_to(tmp_path)} --n 3"


def test_strict_readers_can_read_what_a_script_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_report("x", {"n": 0, "median": float("nan"), "ratios": [float("inf"), 1.5]}, tmp_path / "report.json")
    expected = {"n": 0, "median": None, "ratios": [None, 1.5]}
    for text in (capsys.readouterr().out, (tmp_path / "report.json").read_text()):
        assert expected.items() <= json.loads(text).items()
    assert [path.name for path in RESULTS.glob("*.json") if "NaN" in path.read_text()] == []
