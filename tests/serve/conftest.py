"""A server in this process, on a port of its own, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
from spec_stack import SpecStackGenerator
from spec_stack.serve.app import build_app
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.process_pool import RequestPool
from spec_stack.serve.worker import Worker
from tests.support.running_app import RunningApp


class Server(RunningApp):
    """The endpoint, until `stop`."""

    def __init__(self, generator: SpecStackGenerator, config: ServeConfig, pool: RequestPool) -> None:
        app = build_app(generator, config, pool)
        self.worker: Worker = app.state.worker
        super().__init__(app, config.shutdown_s)


@contextmanager
def served(generator: SpecStackGenerator, **options: object) -> Iterator[Server]:
    """A server over a generator with workers of its own."""
    pool = RequestPool(generator)
    try:
        with Server(generator, ServeConfig(port=0, **options), pool) as server:  # type: ignore[arg-type]
            yield server
    finally:
        pool.stop()


@pytest.fixture(scope="session")
def pool(embedded: SpecStackGenerator) -> Iterator[RequestPool]:
    """One for all servers of the embedded pair: to begin takes it longer than most tests."""
    shared = RequestPool(embedded)
    yield shared
    shared.stop()


@pytest.fixture
def start(embedded: SpecStackGenerator, pool: RequestPool) -> Iterator[Callable[..., Server]]:
    """Starts servers over the embedded pair; all are stopped."""
    servers: list[Server] = []

    def begin(**options: object) -> Server:
        servers.append(Server(embedded, ServeConfig(port=0, **options), pool))  # type: ignore[arg-type]
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()
