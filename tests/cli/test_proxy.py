"""`spec-stack proxy`: what it says before it begins, and that it begins without its upstream server."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

pytest.importorskip("fastapi")
import httpx2

from spec_stack.cli.main import main
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--upstream", "localhost:8000"], "upstream must be the URL of a server"),
        (["--upstream", "http://127.0.0.1:8001"], "is the proxy itself"),
        (["--upstream", "http://host", "--deadline-s", "0"], "deadline_s must be over 0"),
        (["--upstream", "http://host", "--keep-rate", "7"], "keep_rate"),
        (["--upstream", "http://host", "--draft", "/nowhere"], "neither a folder nor a hub id"),
        (["--upstream", "http://host", "--host", "203.0.113.1"], "cannot listen: "),
    ],
)
def test_errors_say_what_to_change(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_it_begins_with_a_warning_before_a_server_that_is_not_there_yet_and_ends_in_time(tmp_path: Path) -> None:
    port, nobody, said = free_port(), f"http://127.0.0.1:{free_port()}", tmp_path / "said"
    command = [sys.executable, "-m", "spec_stack", "proxy", "--upstream", nobody, "--port", str(port)]
    command += ["--keep-rate", "0.2", "--min-prompt-tokens", "512"]
    with said.open("w") as err:
        process = subprocess.Popen([*command, "--device", "cpu", "--shutdown-s", "1"], cwd=ROOT, stderr=err)
    try:
        end = monotonic() + 300
        while True:
            assert process.poll() is None
            assert monotonic() < end
            try:
                assert httpx2.get(f"http://127.0.0.1:{port}/health", timeout=60).json() == {"status": "ok"}
                break
            except httpx2.ConnectError:
                sleep(0.2)
        assert httpx2.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).status_code == 502
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert f"{nobody} does not answer yet" in said.read_text()
        pruning = "of prompts of 512 tokens and more a share of 0.2 is kept, which is lossy"
        assert f"on cpu in front of {nobody}; {pruning}\n" in said.read_text()
        assert "the embedded test draft, a tiny model of Python code, prunes; --draft" in said.read_text()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in said.read_text()
