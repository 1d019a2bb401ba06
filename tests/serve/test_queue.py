"""Whose turn it is, without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from spec_stack.serve.config import ServeConfig
from spec_stack.serve.fair_executor import FairExecutor, Job, QueueFullError, RequestCancelled


class Busy:
    """An executor that first runs a job of nobody's, until `released`."""

    def __init__(self, max_queued: int, max_per_client: int) -> None:
        self.waits: list[float] = []
        self.executor = FairExecutor("test", max_queued, max_per_client, self.waits.append)
        self.began, self.released = threading.Event(), threading.Event()
        self.running = self.executor.submit("nobody", self._hold)
        assert self.began.wait(30)

    def _hold(self, job: Job[None]) -> None:
        self.began.set()
        while not self.released.wait(0.01):
            job.check_cancelled()


@pytest.fixture
def busy() -> Iterator[Callable[[int, int], Busy]]:
    """Makes executors; all end."""
    made: list[Busy] = []

    def make(max_queued: int, max_per_client: int) -> Busy:
        made.append(Busy(max_queued, max_per_client))
        return made[-1]

    yield make
    for each in made:
        each.released.set()
        each.executor.close()


def nothing(job: Job[str]) -> str:
    return job.client


@given(st.lists(st.sampled_from("abc"), max_size=20))
def test_clients_take_turns_and_each_keeps_its_order(clients: list[str]) -> None:
    busy, served = Busy(100, 100), list[tuple[str, int]]()
    jobs = [
        busy.executor.submit(client, lambda job, at=at: served.append((job.client, at)))
        for at, client in enumerate(clients)
    ]
    assert len(busy.executor) == len(jobs)
    busy.released.set()
    for job in jobs:
        job.result(30)
    assert len(busy.executor) == 0
    assert len(busy.waits) == 1 + len(jobs)
    busy.executor.close()
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


def test_a_full_queue_and_a_client_with_too_many_are_refused(busy: Callable[[int, int], Busy]) -> None:
    made = busy(3, 2)
    submit = made.executor.submit
    jobs: list[Future[str]] = [submit("a", nothing), submit("a", nothing)]
    with pytest.raises(QueueFullError, match="of this client"):
        submit("a", nothing)
    jobs.append(submit("b", nothing))
    with pytest.raises(QueueFullError, match="3 requests are waiting"):
        submit("c", nothing)
    second = jobs.pop(1)
    second.cancel()
    second.cancel()
    assert len(made.executor) == 2
    jobs.append(submit("c", nothing))
    made.released.set()
    assert [job.result(30) for job in jobs] == ["a", "b", "c"]
    assert second.cancelled()


def test_closing_cancels_what_waits_and_what_runs(busy: Callable[[int, int], Busy]) -> None:
    made = busy(3, 3)
    waiting = made.executor.submit("a", nothing)
    made.executor.close()
    assert waiting.cancelled()
    with pytest.raises(CancelledError):
        waiting.result(30)
    with pytest.raises(RequestCancelled):
        made.running.result(30)
    with pytest.raises(QueueFullError, match="shutting down"):
        made.executor.submit("b", nothing)


def test_a_job_that_fails_ends_alone(busy: Callable[[int, int], Busy]) -> None:
    made = busy(3, 3)

    def fail(job: Job[str]) -> str:
        raise ZeroDivisionError

    failing, other = made.executor.submit("a", fail), made.executor.submit("a", nothing)
    made.released.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(30)
    assert other.result(30) == "a"


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"max_queued": 0},
        {"max_body_bytes": True},
        {"max_sessions": -1},
        {"max_prompt_tokens": 0},
        {"api_keys": "secret"},
        {"api_keys": [""]},
        {"temperature": -1.0},
    ],
    ids=str,
)
def test_a_bad_setting_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ServeConfig(**options)  # type: ignore[arg-type]


def test_a_configuration_does_not_show_its_keys() -> None:
    assert "secret" not in repr(ServeConfig(api_keys=["secret"]))
