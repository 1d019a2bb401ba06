"""Twenty clients with aborts and priorities, while an operator updates weights, empties caches and pauses."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from .conftest import ASSETS, CONTEXT, MIN_PROMPT_TOKENS, Launcher, Reference, Server
from .test_traffic import Traffic

logger = logging.getLogger(__name__)
SECONDS = float(os.environ.get("SPEC_STACK_TEST_SOAK_SECONDS", "60"))


class _Prioritised(Server):
    """A running server, asked with random priorities."""

    def __init__(self, server: Server) -> None:
        self.__dict__.update(vars(server))

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 600) -> tuple[int, Any]:
        own = {"priority": random.choice((0, 0, 5))} if path == "/generate" else {}
        return super().post(path, {**body, **own}, timeout)


def _num_bytes() -> int:
    """Of all processes that this one has launched."""
    return sum(process.memory_info().rss for process in psutil.Process().children(recursive=True))


def _operate(server: Server, until: float, done: list[str]) -> None:
    """One deed after the other, until the clients' time is over."""
    deeds = ("update", "pause", "flush")
    while time.monotonic() < until:
        deed = deeds[len(done) % len(deeds)]
        time.sleep(SECONDS / 12)
        if deed == "update":
            status, reply = server.post("/update_weights_from_disk", {"model_path": str(ASSETS / "target")})
            assert (status, reply["success"]) == (200, True), reply
        else:
            assert server.post("/pause_generation", {"mode": "retract"})[0] == 200
            if deed == "flush":
                # Refused while a request arrives; the next one may pass.
                server.post("/flush_cache", {})
            assert server.post("/continue_generation", {})[0] == 200
        done.append(deed)


@pytest.mark.slow
@pytest.mark.nightly
def test_nothing_is_lost_nothing_is_wrong_and_memory_stays(launch: Launcher, reference: Reference) -> None:
    server = launch(
        *("--max-total-tokens", "24000", "--chunked-prefill-size", "256", "--max-running-requests", "8"),
        *("--spec-stack-min-prompt-tokens", str(MIN_PROMPT_TOKENS), "--context-length", str(CONTEXT)),
        *("--enable-priority-scheduling", "--enable-metrics", "--spec-stack-draft-pool-tokens", "6000"),
    )
    until, done, sizes = time.monotonic() + SECONDS, [], []
    operator = threading.Thread(target=_operate, args=(server, until, done))
    operator.start()
    rounds: list[Traffic] = []
    while time.monotonic() < until:
        traffic = Traffic(_Prioritised(server), reference, 60, seed=9000 + len(rounds))
        traffic.run(num_clients=20)
        rounds.append(traffic)
        sizes.append(_num_bytes())
    operator.join()
    failures = [failure for traffic in rounds for failure in traffic.failures]
    num_replies = sum(len(traffic.replies) for traffic in rounds)
    num_aborted = sum(traffic.num_aborted for traffic in rounds)
    logger.warning("%d rounds, %d replies, %d aborted, deeds %s", len(rounds), num_replies, num_aborted, done)
    logger.warning("MB after each round: %s", [round(size / 1e6) for size in sizes])
    assert not failures, failures[:3]
    assert {"update", "pause", "flush"} <= set(done)
    assert server.is_alive, server.tail()
    for traffic in rounds:
        traffic.check_tokens()
    # Together they are longer than the draft's pool, however few rounds there were time for.
    for seed in (1, 2):
        assert server.generate(reference.text_ids(3500, seed), 2, sparse_prefill="on")["meta_info"]["spec_stack"]
    state = server.state()
    assert state["num_waiting_for_their_score"] == 0
    assert (state["draft_pool"]["num_pinned"], state["num_failures"]) == (0, {})
    assert state["draft_pool"]["num_evicted"] > 0
    # The first round fills what is kept.
    assert len(sizes) < 4 or sizes[-1] < 1.05 * sizes[1]
