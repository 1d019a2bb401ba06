"""Whose turn it is, without a model."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from spec_stack.http.fair_executor import CheckCancelled, FairExecutor, QueueFullError


class Busy:
    """An executor that first runs a job of nobody's, until `released`."""

    def __init__(self, max_queued: int, max_per_client: int) -> None:
        self.waits: list[float] = []
        self.executor = FairExecutor("test", max_queued, max_per_client, self.waits.append)
        self.released = threading.Event()

    async def __aenter__(self) -> Busy:
        began = threading.Event()

        def hold(check_cancelled: CheckCancelled) -> None:
            began.set()
            while not self.released.wait(0.01):
                check_cancelled()

        self.running = self.executor.submit("nobody", hold)
        assert await asyncio.to_thread(began.wait, 30)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.released.set()
        assert await self.executor.close()
        assert not self.executor.is_busy


@given(st.lists(st.sampled_from("abc"), max_size=20))
def test_clients_take_turns_and_each_keeps_its_order(clients: list[str]) -> None:
    served = list[tuple[str, int]]()

    async def serve() -> None:
        async with Busy(100, 100) as busy:
            jobs = [
                busy.executor.submit(client, lambda _, one=(client, at): served.append(one))
                for at, client in enumerate(clients)
            ]
            assert len(busy.executor) == len(jobs)
            busy.released.set()
            await asyncio.gather(*jobs)
            assert len(busy.executor) == 0
            assert len(busy.waits) == 1 + len(jobs)

    asyncio.run(serve())
    for client in "abc":
        assert [at for name, at in served if name == client] == [
            at for at, name in enumerate(clients) if name == client
        ]
    # While a client waits, no other one is served twice.
    names = [name for name, _ in served]
    for at in range(len(names)):
        rest = set(names[at + 1 :])
        between = names[at + 1 :][: len(rest)]
        assert len(between) == len(set(between)) or len(rest) == 1


def test_a_full_queue_and_a_client_with_too_many_are_refused() -> None:
    async def serve() -> None:
        async with Busy(3, 2) as busy:
            jobs = [busy.executor.submit("a", lambda _, at=at: at) for at in range(2)]
            with pytest.raises(QueueFullError, match="of this client"):
                busy.executor.submit("a", lambda _: 2)
            jobs.append(busy.executor.submit("b", lambda _: 2))
            with pytest.raises(QueueFullError, match="3 requests are waiting"):
                busy.executor.submit("c", lambda _: 3)
            second = jobs.pop(1)
            second.cancel()
            await asyncio.wait([second])
            assert len(busy.executor) == 2
            jobs.append(busy.executor.submit("c", lambda _: 3))
            busy.released.set()
            assert await asyncio.gather(*jobs) == [0, 2, 3]
            assert second.cancelled()

    asyncio.run(serve())


def test_closing_cancels_what_waits_and_what_runs() -> None:
    async def serve() -> None:
        async with Busy(3, 3) as busy:
            waiting = busy.executor.submit("a", lambda _: 1)
            assert await busy.executor.close()
            assert waiting.cancelled()
            assert busy.running.cancelled()
            with pytest.raises(QueueFullError, match="shutting down"):
                busy.executor.submit("b", lambda _: 1)

    asyncio.run(serve())


def test_a_cancelled_job_keeps_the_thread_until_it_ends() -> None:
    async def serve() -> None:
        async with Busy(3, 3) as busy:
            began, ends = threading.Event(), threading.Event()
            stubborn = busy.executor.submit("a", lambda _: (began.set(), ends.wait(30)))
            last = busy.executor.submit("b", lambda _: ends.is_set())
            busy.released.set()
            assert await asyncio.to_thread(began.wait, 30)
            stubborn.cancel()
            await asyncio.wait([stubborn])
            assert (len(busy.executor), busy.executor.is_busy) == (1, True)
            ends.set()
            assert await last

    asyncio.run(serve())


def test_a_job_that_fails_ends_alone() -> None:
    async def serve() -> None:
        async with Busy(3, 3) as busy:
            failing, other = (busy.executor.submit("a", lambda _, over=over: 1 / over) for over in (0, 1))
            busy.released.set()
            with pytest.raises(ZeroDivisionError):
                await failing
            assert await other == 1

    asyncio.run(serve())
