"""The proxy before a real engine that somebody has started: vLLM, llama.cpp, Ollama, SGLang.

SPEC_STACK_ENGINE_URL=http://127.0.0.1:8701 SPEC_STACK_ENGINE_DRAFT=DIR pytest -m nightly tests/proxy/test_engines.py

The draft is the embedded one by default. The figures are logged, since they are of the engine and the machine.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

import pytest
from openai import OpenAI

from spec_stack import Pruner
from spec_stack.proxy.app import build_app
from spec_stack.proxy.config import ProxyConfig
from tests.support.running_app import RunningApp

ENGINE, DRAFT = os.environ.get("SPEC_STACK_ENGINE_URL"), os.environ.get("SPEC_STACK_ENGINE_DRAFT")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(ENGINE is None, reason="SPEC_STACK_ENGINE_URL names no running engine"),
]
logger = logging.getLogger(__name__)
NUM_LINES = 110
NOTES = "".join(
    f"Note {at}: the {'harbour' if at % 2 else 'station'} office reported nothing unusual on day {at}.\n"
    for at in range(NUM_LINES)
)
FACT = "The code of the green door is 48213.\n"
QUESTION = "What is the code of the green door? Answer with the number."
BEFORE, AFTER = NOTES[: len(NOTES) // 2].rpartition("\n")[0] + "\n", NOTES[len(NOTES) // 2 :].partition("\n")[2]


@dataclass(frozen=True)
class Answer:
    """An answer with its usage, and seconds to its first token."""

    text: str
    ttft_s: float
    prompt_tokens: int | None
    cached_tokens: int | None


def ask(url: str, messages: list[Any]) -> Answer:
    client = OpenAI(base_url=f"{url.removesuffix('/v1')}/v1", api_key="any", max_retries=0, timeout=1200)
    model, text, usage, first_s, began = client.models.list().data[0].id, "", None, None, monotonic()
    for chunk in client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        piece = chunk.choices[0].delta.content if chunk.choices else None
        first_s = monotonic() - began if piece and first_s is None else first_s
        text += piece or ""
    details = usage and usage.prompt_tokens_details
    return Answer(text, first_s or 0.0, usage and usage.prompt_tokens, details and details.cached_tokens)


def test_a_real_engine_answers_as_well_from_the_pruned_prompt() -> None:
    assert ENGINE is not None
    pruner = Pruner.from_pretrained(DRAFT, device="cpu")
    running = RunningApp(build_app(pruner, ProxyConfig(ENGINE, port=0, recall=False, deadline_s=600, timeout_s=1200)))
    try:
        messages: list[Any] = [{"role": "user", "content": f"{BEFORE}{FACT}{AFTER}\n{QUESTION}"}]
        answers = {"direct": ask(ENGINE, messages), "proxy": ask(running.url, messages)}
        follow_up = {"role": "user", "content": "Thank you. Say goodbye."}
        turn = [*messages, {"role": "assistant", "content": answers["proxy"].text}, follow_up]
        answers["proxy, second turn"] = ask(running.url, turn)
    finally:
        running.stop()
    logger.info(json.dumps({name: asdict(answer) for name, answer in answers.items()}))
    assert "48213" in answers["proxy"].text
    direct, proxied, second = answers.values()
    if direct.prompt_tokens is not None and proxied.prompt_tokens is not None:
        assert proxied.prompt_tokens < direct.prompt_tokens / 2
    if second.cached_tokens is not None:
        # A whole number of the engine's blocks of 128 tokens, or fewer.
        assert second.cached_tokens >= (proxied.prompt_tokens or 0) // 128 * 128 - 128
