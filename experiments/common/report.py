"""The last line of a script: its whole report, and the file it goes to as well where one is named."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_out_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="file for the JSON report (experiments/results/NAME.json)")


def print_report(report: dict[str, Any], out: Path | None) -> None:
    """One JSON line; the file gets the same with line breaks. What is no number is null, as strict readers want it."""
    report = json.loads(json.dumps(report), parse_constant=lambda name: None)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
