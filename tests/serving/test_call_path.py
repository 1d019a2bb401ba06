"""How many of the plugin's files stand between a request and its first token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import Reference

MOST_FILES = 12


@pytest.mark.nightly
def test_a_pruned_request_passes_few_files_before_its_first_token(
    launch: Any, reference: Reference, tmp_path: Path
) -> None:
    noted = tmp_path / "noted"
    server = launch("--max-total-tokens", "8000", environment={"SPEC_STACK_TEST_FILES": str(noted)})
    server.generate(reference.prompt(600, seed=41), 1, sparse_prefill="on")
    noted.touch()
    reply = server.generate(reference.prompt(900, seed=42), 1, sparse_prefill="on")
    files = set(noted.read_text().split())
    server.stop()
    assert reply["meta_info"]["spec_stack"]["outcome"] == "pruned"
    assert {"hooks.py", "decide.py", "scoring.py", "worker.py"} <= files
    assert len(files) <= MOST_FILES, sorted(files)
