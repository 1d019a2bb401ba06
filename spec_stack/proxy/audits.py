"""A proxied request answered again for an audit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from spec_stack.http.audits import MAX_TOKENS, Words, words_in
from spec_stack.proxy.upstream import Upstream

_MAX_BYTES = 1 << 20
Body = Mapping[str, Any]


async def answer_again(upstream: Upstream, request: Request, body: Body) -> Words:
    """The words of a short greedy answer. Raises ValueError for none, and `UpstreamError`."""
    response = await upstream.send(
        request, json.dumps(greedy(body)).encode(), is_changed=True, but={b"accept-encoding"}
    )
    try:
        parts, num_bytes = [], 0
        async for part in response.aiter_stream():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > _MAX_BYTES:
                raise ValueError("the answer is too long")
    finally:
        await response.aclose()
    if response.status != 200:
        raise ValueError(f"the status is {response.status}")
    return words_of(json.loads(b"".join(parts)))


def greedy(body: Body) -> dict[str, Any]:
    """The body of a request for one short greedy answer, not streamed."""
    changed = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "n", "store")}
    names = ("max_output_tokens", "max_completion_tokens", "max_tokens")
    name = next((name for name in names if name in body), names[0] if "input" in body else names[-1])
    requested = body.get(name)
    most = min(requested, MAX_TOKENS) if isinstance(requested, int) else MAX_TOKENS
    return {**changed, name: most, "temperature": 0, **({"store": False} if "input" in body else {})}


def words_of(answer: Any) -> Words:
    """The words of an answer of any of the APIs, with its tool calls. Raises LookupError and TypeError for another."""
    if "choices" in answer:
        first = answer["choices"][0]
        message = first.get("message", first)
        told = [message.get("content") or message.get("text") or "", message.get("tool_calls") or ""]
    else:
        items = answer["content"] if "content" in answer else answer["output"]
        parts = [part for item in items for part in item.get("content", [item])]
        calls = ("name", "input", "arguments")
        told = [part.get("text") or {name: part.get(name, "") for name in calls} for part in parts]
    return words_in(each if isinstance(each, str) else json.dumps(_without_ids(each)) for each in told)


def _without_ids(value: Any) -> Any:
    """Calls without their ids, which differ between answers."""
    if isinstance(value, list):
        return [_without_ids(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_ids(each) for name, each in value.items() if name != "id"}
    return value
