"""How audits are counted, without a server."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi")

from fastapi import Request
from prometheus_client import CollectorRegistry

from spec_stack.http.audits import ROUTE_HEADER, Audit, Audits, Words
from spec_stack.http.config import HttpConfig


def test_names_that_clients_choose_make_few_routes_whenever_they_come() -> None:
    async def answer() -> tuple[Words, Words]:
        return Words(), Words()

    async def offer_all() -> set[str]:
        registry = CollectorRegistry()
        audits = Audits(HttpConfig(audit_rate=1.0, max_audits=10), {"registry": registry})
        headers = [[(ROUTE_HEADER.encode(), f"r{at}".encode())] for at in range(100)]
        names = [audits.route_of(Request({"type": "http", "path": "/", "headers": each})) for each in headers]
        # All of them have come before any is audited.
        for name in names:
            audits.offer(Audit(name, answer))
        return {sample.labels["route"] for metric in registry.collect() for sample in metric.samples if sample.labels}

    routes = asyncio.run(offer_all())
    assert "other" in routes
    assert len(routes) <= 33
