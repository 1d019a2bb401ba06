"""Audits inside a server: both answers are asked for when no client waits, and a client that comes ends one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY

from spec_stack.http.audits import MAX_TOKENS
from spec_stack.http.config import HttpConfig
from spec_stack.sglang.audits import ServerAudits
from spec_stack.sglang.headers import current_headers
from tests.support.sglang_requests import REPORT

PRUNED = {**REPORT, "route": "/generate"}


@dataclass
class GenerateReqInput:
    """SGLang's GenerateReqInput."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str = "a client's"
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    log_metrics: bool = True


@dataclass
class Manager:
    """SGLang's TokenizerManager. says: the answers to whole and pruned prompts; it may answer while it `may`."""

    says: tuple[str, str] = ("It is 42.", "It is 42.")
    requests: list[GenerateReqInput] = field(default_factory=list)
    headers: list[str | None] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    may: asyncio.Event = field(default_factory=asyncio.Event)
    server_args: Any = field(
        default_factory=lambda: SimpleNamespace(
            enable_priority_scheduling=True, schedule_low_priority_values_first=False
        )
    )

    async def generate_request(self, request: GenerateReqInput) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        self.headers.append(current_headers().keep_rate)
        await self.may.wait()
        is_whole = (request.sampling_params or {})["custom_params"]["spec_stack"] == {"sparse_prefill": "off"}
        kept = REPORT["num_prompt_tokens" if is_whole else "num_kept_tokens"]
        info = {"spec_stack": {**REPORT, "num_kept_tokens": kept}, "finish_reason": {"type": "stop"}}
        yield {"text": self.says[not is_whole], "meta_info": info}

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)


def _counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("spec_stack_audits_total", {"route": "/generate", "outcome": outcome}) or 0.0


async def _until(counts: Any) -> None:
    async with asyncio.timeout(60):
        while not counts():
            await asyncio.sleep(0.01)


async def _audit(audits: ServerAudits, manager: Manager) -> None:
    custom = {"spec_stack": {"keep_rate": 0.3}, "mine": 1}
    sampling = {"temperature": 0.7, "n": 3, "max_new_tokens": 2000, "min_new_tokens": 100, "custom_params": custom}
    client = GenerateReqInput(input_ids=[5, 6], sampling_params=sampling, extra_key="tenant", cache_salt="salt")

    # Dense replies, and the audits' own, are not audited.
    audits.offer(client, {**PRUNED, "sparse_prefill": False, "outcome": "cached"})
    audits.offer(GenerateReqInput(), REPORT)
    with audits.client_waits():
        audits.offer(client, PRUNED)
        await asyncio.sleep(0.7)
        assert manager.requests == []
    await _until(lambda: manager.requests)
    with audits.client_waits():
        await _until(lambda: manager.aborted)
    assert manager.aborted == [manager.requests[0].rid]
    manager.may.set()
    await _until(lambda: _counted("agreed") == 1)
    pruned, whole = manager.requests[-2:]
    assert len(manager.requests) == 3
    assert (pruned.extra_key, whole.extra_key) == ("tenant", "tenant spec_stack audit whole")
    for each, own in ((pruned, custom), (whole, {**custom, "spec_stack": {"sparse_prefill": "off"}})):
        # SGLang refuses more than the most.
        lengths = {"max_new_tokens": MAX_TOKENS, "min_new_tokens": MAX_TOKENS}
        changed = {"temperature": 0, "n": 1, **lengths, "custom_params": own}
        assert each.sampling_params == {**sampling, **changed}
        assert (each.input_ids, each.cache_salt, each.log_metrics) == ([5, 6], "salt", False)
        assert (each.priority or 0) < -(10**6)

    manager.says = ("It is 42.", "It is 17.")
    # A keep rate that came by a header holds for the pruned answer again.
    audits.offer(client, {**PRUNED, "header": "0.3"})
    await _until(lambda: _counted("lost") == 1)
    assert (manager.headers, current_headers().keep_rate) == ([None, None, None, "0.3", None], None)
    # Pruned otherwise than the client's, it tells nothing of it.
    audits.offer(client, {**PRUNED, "num_kept_tokens": 3})
    await _until(lambda: len(manager.requests) == 6)
    await asyncio.sleep(0.05)
    assert (_counted("lost"), _counted("agreed"), _counted("failed")) == (1, 1, 0)
    # What audits left whole is pruned for them alone, apart from the client's dense prefix.
    audits.offer(client, {**PRUNED, "sparse_prefill": False, "outcome": "audited", "num_kept_tokens": 9})
    await _until(lambda: _counted("lost") == 2)
    assert [each.extra_key for each in manager.requests[-2:]] == ["tenant spec_stack audit pruned", "tenant"]


async def _lose_and_recover(audits: ServerAudits, manager: Manager) -> None:
    scope = {"type": "http", "path": "/lossy", "headers": [], "query_string": b""}
    sampling = {"custom_params": {"spec_stack": {"explain": True}}}
    client, report = GenerateReqInput(input_ids=[5, 6], sampling_params=sampling), {**REPORT, "route": "/lossy"}
    manager.may.set()
    manager.says = ("It is 42.", "It is 17.")

    async def audit(report: dict[str, Any]) -> None:
        num_before = len(manager.requests)
        audits.offer(client, report)
        await _until(lambda: len(manager.requests) == num_before + 2)
        await asyncio.sleep(0.02)

    for _ in range(5):
        assert audits.route_of(scope) == ("/lossy", "")
        await audit(report)
    why = audits.route_of(scope)[1]
    assert why.startswith("off: audits of /lossy found more lost answers than audit_max_loss=0.1")
    named = {**scope, "headers": [(b"x-spec-stack-route", b"another")]}
    assert audits.route_of(named) == ("another", "")
    manager.says, num_whole = ("It is 42.", "It is 42."), 0
    while audits.route_of(scope)[1]:
        await audit({**report, "sparse_prefill": False, "outcome": "audited", "num_kept_tokens": 9})
        num_whole += 1
    # Twenty audits decide that it is on again.
    assert num_whole == 20


def test_pruned_replies_are_answered_again_and_lost_answers_turn_their_route_off_for_a_while() -> None:
    async def run() -> None:
        manager = Manager()
        audits = ServerAudits(manager, HttpConfig(audit_rate=1.0, audit_max_loss=0.1, audit_idle_s=0.01))
        await _audit(audits, manager)
        await _lose_and_recover(audits, manager)

    asyncio.run(run())
