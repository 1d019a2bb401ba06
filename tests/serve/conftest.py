"""A server in this process, on a port of its own, and clients of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("fastapi")
import uvicorn
from openai import OpenAI

from spec_stack import SpecStackGenerator
from spec_stack.serve.app import build_app
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.process_pool import RequestPool
from spec_stack.serve.worker import Worker

Connect = Callable[..., OpenAI]


class Server:
    """One that runs in a thread until `stop`."""

    def __init__(self, generator: SpecStackGenerator, config: ServeConfig, pool: RequestPool) -> None:
        app = build_app(generator, config, pool)
        self.worker: Worker = app.state.worker
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=round(config.shutdown_s))
        )
        self.thread = threading.Thread(target=self._server.run)
        self.thread.start()
        pause = threading.Event()
        while not self._server.started:
            assert self.thread.is_alive()
            pause.wait(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def client(self, key: str = "any") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def stop(self) -> None:
        self._server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


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
