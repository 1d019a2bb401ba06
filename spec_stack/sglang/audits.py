"""Audits of a server's pruned requests (`http.audits`), answered again inside the server. No SGLang import."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from contextvars import Context
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from spec_stack.http.audits import MAX_TOKENS, Audit, Audits, Words, words_in
from spec_stack.http.config import HttpConfig
from spec_stack.sglang.headers import RequestHeaders, use_headers
from spec_stack.sglang.request import KEY

_NAME = f"{KEY} audit"
_LOWEST = 1 << 30


class ServerAudits:
    """Audits in the process that reads requests. manager: SGLang's TokenizerManager."""

    def __init__(self, manager: Any, config: HttpConfig) -> None:
        self._manager = manager
        self._audits = Audits(config, {"namespace": KEY})
        self._running: asyncio.Task[None] | None = None

    def client_waits(self) -> AbstractContextManager[None]:
        """In this block a client waits: a running audit ends, and none begins."""
        return self._audits.client_waits()

    def route_of(self, scope: MutableMapping[str, Any]) -> tuple[str, str]:
        """The route of an HTTP request (ASGI's scope), and why its prompts are left whole; empty where they are not."""
        route = self._audits.route_of(Request(scope))
        return route, self._audits.why_whole(route)

    def offer(self, request: Any, report: Mapping[str, Any]) -> None:
        """Audit a finished request of HTTP later, by chance, if it was pruned or audits left it whole. request:
        SGLang's GenerateReqInput."""
        is_pruned = bool(report["sparse_prefill"])
        # Audits' own have no route.
        if "route" not in report or not (is_pruned or report["outcome"] == "audited"):
            return
        if self._running is None:
            # Without the context of the request that runs SGLang's loop now.
            self._running = asyncio.get_running_loop().create_task(self._audits.run(), context=Context())
        num_kept = report["num_kept_tokens"] if is_pruned else None
        self._audits.offer(Audit(report["route"], partial(self._answers, request, num_kept, report.get("header"))))

    async def _answers(self, request: Any, num_kept: int | None, header: str | None) -> tuple[Words, Words] | None:
        """Of the whole and of the pruned prompt; None where it is not pruned as it was. num_kept: of its tokens; None
        for all. header: the keep rate that it came with."""
        custom = (request.sampling_params or {}).get("custom_params") or {}
        own, apart = request.extra_key, f"{request.extra_key or ''} {_NAME}"
        # A dense prefix in the cache would change how a prompt is pruned: the other answer has its own.
        of_pruned, of_whole = (f"{apart} pruned", own) if num_kept is None else (own, f"{apart} whole")
        with use_headers(RequestHeaders(header)):
            pruned = await self._answer(request, custom, of_pruned)
        report = pruned["meta_info"][KEY]
        if not report["sparse_prefill"] or num_kept not in (None, report["num_kept_tokens"]):
            return None
        whole = await self._answer(request, {**custom, KEY: {"sparse_prefill": "off"}}, of_whole)
        return _words(whole), _words(pruned)

    async def _answer(self, request: Any, custom: Mapping[str, Any], extra_key: str | None) -> dict[str, Any]:
        """A short greedy answer. Raises ValueError for none."""
        sampling, args = dict(request.sampling_params or {}), self._manager.server_args
        most = min(sampling.get("max_new_tokens") or MAX_TOKENS, MAX_TOKENS)
        # SGLang refuses more than the most.
        least = min(sampling.get("min_new_tokens") or 0, most)
        lengths = {"max_new_tokens": most, "min_new_tokens": least}
        changed = {"temperature": 0, "n": 1, **lengths, "custom_params": custom}
        priority = _LOWEST if args.schedule_low_priority_values_first else -_LOWEST
        again = type(request)(
            text=request.text,
            input_ids=request.input_ids,
            sampling_params={**sampling, **changed},
            rid=f"{_NAME} {uuid4().hex}",
            extra_key=extra_key,
            cache_salt=request.cache_salt,
            priority=priority if args.enable_priority_scheduling else None,
            log_metrics=False,
        )
        try:
            answers = [answer async for answer in self._manager.generate_request(again)]
        except asyncio.CancelledError:
            self._manager.abort_request(again.rid)
            raise
        (answer,) = answers
        if answer["meta_info"]["finish_reason"]["type"] == "abort":
            raise ValueError("the answer was aborted")
        return dict(answer)


def _words(answer: Mapping[str, Any]) -> Words:
    """Of its text, or its tokens where the server has no tokenizer."""
    return words_in([answer["text"]] if "text" in answer else map(str, answer["output_ids"]))
