"""An ASGI application that answers on a loopback port, in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Self

import uvicorn
from openai import OpenAI


def until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait for something that happens soon."""
    pause, end = threading.Event(), monotonic() + seconds
    while not holds():
        assert monotonic() < end
        pause.wait(0.02)


class RunningApp:
    """One that runs until `stop`, or to the end of its block."""

    def __init__(self, app: Any, shutdown_s: float = 10.0, **settings: Any) -> None:
        config = uvicorn.Config(
            app, port=0, log_level="warning", timeout_graceful_shutdown=round(shutdown_s), **settings
        )
        self._server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._server.run)
        self.thread.start()
        pause = threading.Event()
        while not self._server.started:
            assert self.thread.is_alive()
            pause.wait(0.01)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "any") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def stop(self) -> None:
        self._server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
