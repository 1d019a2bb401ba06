"""The first line of `spec-stack serve` and `proxy`: what is dropped of prompts, and at which rate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PAIR = "the embedded target (fp32) with the embedded draft (fp32) on cpu"


def first_line(command: str, *options: str) -> str:
    """What a command says of itself before it listens."""
    called = [sys.executable, "-m", "spec_stack", command, "--device", "cpu", "--port", str(free_port()), *options]
    process = subprocess.Popen(called, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        return next(
            line[line.index("spec-stack: ") :] for line in process.stderr if " INFO spec-stack: " in line
        ).strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "pruning"),
    [
        (("--keep-rate", "0.3", "--min-prompt-tokens", "512"), "of prompts of 512 tokens and more a share of 0.3"),
        (("--sparse-prefill", "off"), "prompts are read whole"),
    ],
)
def test_serve_says_what_is_pruned_and_at_which_rate(options: tuple[str, ...], pruning: str) -> None:
    said = first_line("serve", "--precision", "fp32", *options)
    assert said.startswith(f"spec-stack: {PAIR}; {pruning}")


@pytest.mark.slow
def test_the_proxy_says_what_is_pruned_and_at_which_rate() -> None:
    upstream = f"http://127.0.0.1:{free_port()}"
    said = first_line("proxy", "--upstream", upstream, "--keep-rate", "0.2", "--min-prompt-tokens", "512")
    pruning = "of prompts of 512 tokens and more a share of 0.2 is kept, which is lossy"
    assert said.endswith(f"on cpu in front of {upstream}; {pruning}")
