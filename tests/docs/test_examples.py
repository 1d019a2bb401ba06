"""The examples run, print what they are about, and stay short enough to be read."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# A word of what each prints; what a model says is not promised.
PRINTS = {
    "agent.py": "77120",
    "chat_loop.py": "Bruno lives in Vienna",
    "compare_with_plain.py": "the same tokens: True",
    "custom_generate.py": "the sequences of plain generate: True",
    "lora.py": "the adapter changes the text: True",
    "openai_server.py": "stopped because of: ",
    "own_policy.py": "cautious",
    "proxy.py": " kept",
    "quickstart.py": "48213",
    "rag.py": "101 cached",
    "streaming.py": "because of: length",
    "structured.py": "the keys: name, age, is_here",
}
# What the page "Quickstart" shows too, the goldens, and the example of a chat.
_NIGHTLY = {"agent.py", "quickstart.py", "compare_with_plain.py"}
_SLOW = {"agent.py", "chat_loop.py", "lora.py", "openai_server.py", "proxy.py", "quickstart.py", "rag.py"}


def _marked(name: str) -> Any:
    slow, nightly = [pytest.mark.slow] if name in _SLOW else [], [pytest.mark.nightly] if name in _NIGHTLY else []
    return pytest.param(name, marks=[*slow, *nightly])


@pytest.mark.parametrize("name", map(_marked, PRINTS))
def test_an_example_runs_and_prints_its_point(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert PRINTS[name] in capsys.readouterr().out


def test_every_example_is_run_and_short() -> None:
    files = {path.name: path for path in EXAMPLES.glob("*.py")}
    # A model of another library, which tests/docs/test_lm_eval_harness.py runs where that is installed.
    del files["lm_eval_harness.py"]
    assert set(files) == set(PRINTS)
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in files.values()) < 40
