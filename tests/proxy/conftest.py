"""A proxy in this process before an upstream server that records what arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("fastapi")

from spec_stack import PrefillConfig, Pruner
from spec_stack.proxy.app import build_app
from spec_stack.proxy.config import ProxyConfig
from tests.support.running_app import RunningApp
from tests.support.upstream import FakeUpstream

Start = Callable[..., RunningApp]


@pytest.fixture(scope="session")
def pruner() -> Pruner:
    config = PrefillConfig(keep_rate=0.3, min_prompt_tokens=400)
    return Pruner.from_pretrained(device="cpu", config=config, calibration=False)


@pytest.fixture
def upstream() -> Iterator[FakeUpstream]:
    server = FakeUpstream()
    yield server
    server.stop()


@pytest.fixture
def start(pruner: Pruner, upstream: FakeUpstream) -> Iterator[Start]:
    """Starts proxies before the upstream server; all are stopped."""
    running: list[RunningApp] = []

    def begin(url: str | None = None, **options: object) -> RunningApp:
        config = ProxyConfig(url or upstream.url, **{"port": 0, "deadline_s": 120, "shutdown_s": 1, **options})  # type: ignore[arg-type]
        running.append(RunningApp(build_app(pruner, config), 1, server_header=False, date_header=False))
        return running[-1]

    yield begin
    upstream.released.set()
    for each in running:
        each.stop()
