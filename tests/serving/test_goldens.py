"""Golden outputs of an SGLang server, token for token: dense, pruned, and a follow-up that recalls.

They hold for fp32 on one thread. A change of behaviour that is meant writes what the failed assertion shows into
tests/goldens/sglang.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.goldens.test_goldens import document, question

from .conftest import Server

EXPECTED = Path(__file__).parents[1] / "goldens" / "sglang.json"


def _turn(server: Server, messages: list[dict[str, str]], **custom: Any) -> dict[str, Any]:
    reply = server.chat(messages, 20, custom_params={"spec_stack": {"policy": "fixed", "gamma": 4, **custom}})
    report = reply["spec_stack"]
    return {"text": reply["text"]} | {name: report[name] for name in ("num_kept_tokens", "num_recalled_tokens")}


def test_a_server_gives_the_golden_tokens(server: Server) -> None:
    first = question("Bruno", "red")
    messages = [first | {"content": f"{document()}\n\n{first['content']}"}]
    turns = {
        "dense": _turn(server, messages, sparse_prefill="off"),
        "pruned": _turn(server, messages, sparse_prefill="on", keep_rate=0.08),
    }
    messages += [{"role": "assistant", "content": turns["pruned"]["text"]}, question("Elena", "golden")]
    turns["follow-up"] = _turn(server, messages)
    assert turns["follow-up"]["num_recalled_tokens"] > 0
    assert turns == json.loads(EXPECTED.read_text(encoding="utf-8"))
