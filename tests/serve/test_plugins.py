"""A selection rule and a policy of the user's own module behind `spec-stack serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.serve.hostile import chat
from tests.serve.test_hostile import Process

# Both say so where they were asked.
PLUGIN = """
from pathlib import Path

from spec_stack.controller.simple import Ema
from spec_stack.controller.registry import POLICIES
from spec_stack.prefill.registry import SCORERS
from spec_stack.prefill.rules.bm25 import ByBM25


class Noted(ByBM25):
    def score(self, evidence, units, config):
        Path(__file__).with_name("asked").write_text(str(config.keep_rate))
        return super().score(evidence, units, config)


class ProgressListener(Ema):
    def choose(self, context):
        Path(__file__).with_name("chose").touch()
        return super().choose(context)


SCORERS["noted"], POLICIES["watched"] = Noted, ProgressListener
"""


@pytest.mark.slow
def test_what_a_request_does_not_name_is_as_the_server_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noted_things.py").write_text(PLUGIN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SPEC_STACK_PLUGINS", "noted_things")
    options = ("--scorer", "noted", "--keep-rate", "0.35", "--min-prompt-tokens", "100", "--policy", "watched")
    server = Process(*options, "--device", "cpu", "--precision", "fp32", log=tmp_path / "said")
    try:
        said = "".join(f"def step_{number}(value):\n    return value + {number}\n" for number in range(60))
        body = chat(messages=[{"role": "user", "content": said + "What does step_17 add?"}], max_tokens=4)[1]
        status, answer, _ = server.post(body, "mine")
    finally:
        server.process.kill()
        server.process.wait()
    assert status == 200, answer
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "0.35"
    assert (tmp_path / "chose").exists()
    pair = "the embedded target (fp32) with the embedded draft (fp32) on cpu"
    pruning = "of prompts of 100 tokens and more a share of 0.35 is kept, which is lossy"
    assert f" INFO spec-stack: {pair}; {pruning}\n" in (tmp_path / "said").read_text(encoding="utf-8")
