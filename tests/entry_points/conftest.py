"""The embedded pair, and what `generate` keeps of every prompt of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

pytest.importorskip("fastapi")

from spec_stack import Pruner, SpecStackConfig, SpecStackGenerator
from spec_stack.proxy.app import build_app as build_proxy
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.app import build_app
from spec_stack.serve.config import ServeConfig
from tests.entry_points.prompts import PREFILL, ROWS, Reads, by_messages, lines_of
from tests.support.running_app import RunningApp
from tests.support.upstream import FakeUpstream

Expected = Callable[[str], frozenset[str]]


@pytest.fixture(scope="session")
def generator() -> SpecStackGenerator:
    return SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", config=SpecStackConfig(PREFILL))


@pytest.fixture(scope="session")
def pruner() -> Pruner:
    return Pruner.from_pretrained(device="cpu", precision="fp32", config=PREFILL)


@pytest.fixture(scope="session")
def expected(generator: SpecStackGenerator) -> Expected:
    """The lines that the target reads under `generate`, of chats by messages and of texts."""

    @cache
    def kept(name: str) -> frozenset[str]:
        reads = Reads(generator)
        with reads.of():
            generator.generate(**by_messages(generator, ROWS[name]), max_tokens=1)
        return lines_of(reads.text())

    return kept


@pytest.fixture(scope="session")
def server(generator: SpecStackGenerator) -> Iterator[RunningApp]:
    app = RunningApp(build_app(generator, ServeConfig(port=0)), 1)
    yield app
    app.stop()


@pytest.fixture(scope="session")
def upstream() -> Iterator[FakeUpstream]:
    fake = FakeUpstream()
    yield fake
    fake.stop()


@pytest.fixture(scope="session")
def proxy(pruner: Pruner, upstream: FakeUpstream) -> Iterator[RunningApp]:
    app = RunningApp(build_proxy(pruner, ProxyConfig(upstream.url, port=0, deadline_s=120, marker="")), 1)
    yield app
    app.stop()
