"""A server in a process of its own, with a selection rule and a policy of the user's own module, beset by a hundred
hostile bodies and then told to end."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from tests.serve.hostile import CHAT, FORMATS, chat, hostile
from tests.support.server_process import SHUTDOWN_S, ServerProcess

pytestmark = pytest.mark.slow
logger = logging.getLogger(__name__)

# Both say so where they were asked.
PLUGIN = """
from pathlib import Path

from spec_stack.controller.simple import Ema
from spec_stack.controller.registry import POLICIES
from spec_stack.prefill.registry import SCORERS
from spec_stack.prefill.rules.attention import ByAttention


class Noted(ByAttention):
    def score(self, evidence, units, config):
        Path(__file__).with_name("asked").write_text(str(config.keep_rate))
        return super().score(evidence, units, config)


class ProgressListener(Ema):
    def choose(self, context):
        Path(__file__).with_name("chose").touch()
        return super().choose(context)


SCORERS["noted"], POLICIES["watched"] = Noted, ProgressListener
"""
OPTIONS = ("--scorer", "noted", "--keep-rate", "0.35", "--min-prompt-tokens", "100", "--policy", "watched")


class Server(ServerProcess):
    """`spec-stack serve` over the embedded pair."""

    def post(self, body: bytes, key: str, path: str = CHAT) -> tuple[int, dict[str, Any], float]:
        """Status, content and seconds."""
        begun = monotonic()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        response = httpx2.post(self.url + path, content=body, headers=headers, timeout=60)
        return response.status_code, response.json(), monotonic() - begun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the user's module, of what it notes, and of the server's lines."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    (folder / "noted_things.py").write_text(PLUGIN, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        patch.setenv("SPEC_STACK_PLUGINS", "noted_things")
        running = Server("serve", *OPTIONS, "--precision", "fp32", log=folder / "said")
    yield running
    running.stop()


def test_what_a_request_does_not_name_is_as_the_server_was_started(server: Server, folder: Path) -> None:
    said = "".join(f"def step_{number}(value):\n    return value + {number}\n" for number in range(60))
    body = chat(messages=[{"role": "user", "content": said + "What does step_17 add?"}], max_tokens=4)[1]
    status, answer, _ = server.post(body, "mine")
    assert status == 200, answer
    assert (folder / "asked").read_text(encoding="utf-8") == "0.35"
    assert (folder / "chose").exists()
    pair = "the embedded target (fp32) with the embedded draft (fp32) on cpu"
    pruning = "of prompts of 100 tokens and more a share of 0.35 is kept, which is lossy"
    assert f" INFO spec-stack: {pair}; {pruning}\n" in (folder / "said").read_text(encoding="utf-8")


def chats(server: Server, until: threading.Event, num_least: int) -> list[float]:
    """Seconds that a client's normal chats take."""
    taken = []
    while len(taken) < num_least or not until.is_set():
        status, content, seconds = server.post(chat(temperature=0, max_tokens=8)[1], "normal")
        assert status == 200, content
        taken.append(seconds)
    return taken


def test_hostile_bodies_do_no_harm_while_others_chat(server: Server) -> None:
    over = threading.Event()
    over.set()
    usual = chats(server, over, 10)
    before = sum(server.memory_mb())
    over.clear()
    meanwhile: list[float] = []
    other = threading.Thread(target=lambda: meanwhile.extend(chats(server, over, 10)))
    other.start()
    taken = []
    for index, (path, body) in enumerate(hostile()):
        status, content, seconds = server.post(body, "hostile", path)
        taken.append(seconds)
        if status == 200 and (path, body) in FORMATS:
            continue
        assert status in (400, 413), (index, status, body[:200], content)
        assert content["error"]["type"] == "invalid_request_error"
        assert content["error"]["message"]
    over.set()
    other.join()
    figures = {
        "longest_refusal_s": max(taken),
        "median_refusal_s": median(taken),
        "usual_chat_s": median(usual),
        "chat_beside_s": median(meanwhile),
        "grown_mb": sum(server.memory_mb()) - before,
    }
    logger.info(json.dumps(figures))
    # By the chats of the same moment, so that it holds on a slow machine and on a busy one.
    slowest = sorted(range(len(taken)), key=taken.__getitem__)[-5:]
    assert sorted(taken)[90] < 10 * median(meanwhile), [(at, taken[at]) for at in slowest]
    # Other processes may take up the machine meanwhile; who waits for hostile bodies takes a hundred times as long.
    assert median(meanwhile) < 10 * median(usual)
    assert figures["grown_mb"] < 200


def test_a_server_ends_in_time_whatever_it_does(server: Server) -> None:
    body = chat(max_tokens=8000, stream=True, ignore_eos=True)[1]
    with ExitStack() as streams:
        for key in "abc":
            headers = {"Authorization": f"Bearer {key}"}
            stream = httpx2.stream("POST", server.url + CHAT, content=body, headers=headers, timeout=60)
            response = streams.enter_context(stream)
            if key == "a":
                # It is being answered; the others wait behind it.
                next(response.iter_lines())
        begun = monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        # Those 24,000 tokens take minutes.
        assert monotonic() - begun < SHUTDOWN_S + 20
