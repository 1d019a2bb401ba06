"""Worker processes: replaced when they die, and without memory of earlier requests."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pebble import ProcessPool

from spec_stack.http.errors import BadRequestError
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.process_pool import RequestPool, result_of, schedule
from tests.serve.hostile import CHAT, chat, schema

LONG = [{"role": "user", "content": "many words " * 100_000}]


def process(pool: RequestPool, body: bytes, **options: object) -> list[int]:
    """The token ids of a request."""
    config = ServeConfig(**{"prepare_s": 0.2} | options)  # type: ignore[arg-type]
    return asyncio.run(pool.process(CHAT, body, config)).encoded.token_ids


def test_workers_that_died_are_replaced(pool: RequestPool) -> None:
    hello = chat()[1]
    token_ids = process(pool, hello)
    for worker in multiprocessing.active_children():
        if worker.name == "pebble_pool_worker" and worker.pid is not None:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join(60)
    assert process(pool, hello) == token_ids


def test_a_pool_that_ended_is_named_broken_and_a_task_that_it_took_is_not_waited_for() -> None:
    pool = ProcessPool(1, context=multiprocessing.get_context("forkserver"))
    pool.schedule(int).result(60)
    pool.stop()
    pool.join()
    with pytest.raises(BrokenProcessPool):
        asyncio.run(asyncio.wait_for(result_of(pool, Future()), 30))
    with pytest.raises(BrokenProcessPool):
        schedule(pool, (), 1.0)


# Different patterns are compiled one by one.
PATTERNS = {f"p{at}": {"pattern": f"^[a-z]{{1,{1 + at % 600}}}{at}$"} for at in range(3000)}


@pytest.mark.parametrize(
    ("posted", "limits", "message"),
    [
        (schema({"type": "object", "properties": PATTERNS}), {}, r"takes more than 0\.8 s of work or 256 MiB"),
        (chat(messages=LONG), {"prepare_s": 20.0, "max_prepare_bytes": 1 << 20}, "1 MiB of memory"),
    ],
    ids=["time", "memory"],
)
def test_a_request_over_a_limit_ends_its_worker_and_no_other_request(
    pool: RequestPool, posted: tuple[str, bytes], limits: dict[str, Any], message: str
) -> None:
    hello = chat()[1]
    token_ids = process(pool, hello)
    with pytest.raises(BadRequestError, match=message):
        process(pool, posted[1], **limits)
    assert process(pool, hello) == token_ids
