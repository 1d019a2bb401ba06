from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.common.environment import describe, fingerprint, note_pair, pair_fingerprint
from experiments.common.report import print_report
from experiments.common.results import BEGIN, END, Result, _git, read_all, table, with_table

RESULT = Result("session_suite", "c", "experiments/quality/session_suite.py", "2026-01-01", "HEAD", "m", "")


def test_a_fingerprint_follows_the_weights_and_nothing_else(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * (3 << 20))
    first = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(tmp_path) == first
    weights.write_bytes(b"a" * ((3 << 20) - 1) + b"b")
    assert fingerprint(tmp_path) != first
    assert fingerprint("owner/model") == "owner/model"


def test_a_result_line_names_the_pair_and_the_command() -> None:
    note_pair(None, None)
    line = describe()
    assert line["pair"] == pair_fingerprint()
    assert line["command"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pair": "other/other"}, "another pair"),
        ({"commit": ""}, "which commit"),
        ({"commit": "0000000000", "pair": pair_fingerprint()}, "not in this history"),
    ],
)
def test_a_result_is_stale_for_a_reason(change: dict[str, str], reason: str) -> None:
    assert reason in replace(RESULT, **change).why_stale(pair_fingerprint())


def test_random_models_and_published_records_know_no_edition_of_the_pair() -> None:
    ran = {"pair": "other/other", "script": "", "commit": "HEAD"}
    assert replace(RESULT, **ran).why_stale(pair_fingerprint()) == "made with another pair"
    assert replace(RESULT, name="bench_session_random", **ran).why_stale(pair_fingerprint()) == ""


def test_a_file_of_several_pairs_says_where_its_newest_is_from(tmp_path: Path) -> None:
    path = tmp_path / "eval_pair.json"
    path.write_text('{"new": {"measured": {"date": "2026-02-02"}}, "old": {"measured": {"date": "2026-01-01"}}}')
    assert Result.read(path).date == "2026-02-02"


def test_every_committed_result_is_listed_once_and_where_it_belongs() -> None:
    results = read_all()
    assert "bench_latency" in {each.name for each in results}
    page = f"a\n{BEGIN}\nyesterday\n{END}\nb"
    renewed = with_table(page, "today")
    assert renewed.startswith("a\n")
    assert renewed.endswith("\nb")
    assert "yesterday" not in renewed
    assert "today" in renewed
    assert all(table(results).count(f"| {each.name} |") == 1 for each in results)
    with pytest.raises(ValueError, match="must hold"):
        with_table("no marks", "today")


def test_every_committed_result_has_its_command_and_its_commit() -> None:
    unsaid = [each.name for each in read_all() if not (each.command and each.commit and each.date)]
    assert unsaid == []


@pytest.mark.skipif(_git("rev-parse", "HEAD~50") != 0, reason="a shallow clone has no history to look in")
def test_every_commit_that_a_result_names_is_in_the_history() -> None:
    commits = {each.name: each.commit.removesuffix("-dirty") for each in read_all()}
    assert [name for name, commit in commits.items() if _git("merge-base", "--is-ancestor", commit, "HEAD")] == []


def test_a_result_does_not_name_folders_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    inside = tmp_path / "results" / "x.json"
    monkeypatch.setattr(
        "sys.argv", ["/far/script.py", "code=/home/me/data/files/a.jsonl", "--out", str(inside), "--n", "3"]
    )
    command = describe()["command"]
    assert command == f"script.py 'code=…/files/a.jsonl' --out {inside.relative_to(tmp_path)} --n 3"


def test_strict_readers_can_read_what_a_script_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_report({"n": 0, "median": float("nan"), "ratios": [float("inf"), 1.5]}, tmp_path / "report.json")
    expected = {"n": 0, "median": None, "ratios": [None, 1.5]}
    assert json.loads(capsys.readouterr().out) == expected
    assert json.loads((tmp_path / "report.json").read_text()) == expected
    results = Path(__file__).resolve().parents[2] / "experiments" / "results"
    assert [path.name for path in results.glob("*.json") if "NaN" in path.read_text()] == []
