"""A user's type checker sees real types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
from spec_stack import SamplingParams, SpecStackGenerator
generator = SpecStackGenerator.from_pretrained()
result = generator.generate("def main():", params=SamplingParams(max_tokens=8), gamma=4)
reveal_type(result.metrics.ttft_s)
reveal_type(next(generator.stream("x")).record.signals.entropy)
generator.generate("x", max_new_tokens=3)
"""


@pytest.mark.slow
def test_a_strict_user_script_gets_types_and_hears_of_a_wrong_option(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(SCRIPT)
    # Strict, and with what `make lint` has found out of this package.
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *settings, "user.py"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    said = [line for line in printed.splitlines() if line.startswith("user.py")]
    assert [line.partition(": ")[2] for line in said[:2]] == [
        'note: Revealed type is "float"',
        'note: Revealed type is "list[float]"',
    ], printed
    errors = [line for line in said if ": error:" in line]
    assert 'Unexpected keyword argument "max_new_tokens"' in errors[0]
    assert {line.partition(": error:")[0] for line in errors} == {"user.py:7"}
