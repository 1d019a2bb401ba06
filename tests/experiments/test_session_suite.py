"""The suite of conversations, on the embedded pair."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments.quality import session_suite


@pytest.mark.slow
@pytest.mark.nightly
def test_every_arm_is_asked_in_every_turn_and_a_second_run_asks_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--tokens 600 --facts 4 --turns 3 --conversations 1 --device cpu --precision fp32"
    monkeypatch.setattr(sys, "argv", ["suite", *options.split(), "--rows", str(tmp_path / "rows.jsonl")])
    session_suite.main()
    summary = {row["arm"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]}
    assert set(summary) == set(session_suite.ARMS)
    assert all(row["asked"] == 2 for row in summary.values())
    assert (summary["dense"]["dropped"], summary["dense"]["held"], summary["dense"]["recalled"]) == (0, 1, 0)
    assert summary["session"]["dropped"] > 0.5
    assert summary["session"]["after"] >= summary["session"]["held"]
    kept = (tmp_path / "rows.jsonl").read_text()
    session_suite.main()
    assert (tmp_path / "rows.jsonl").read_text() == kept
