"""A follow-up that recalls: a second turn has the same lines wherever a conversation is kept."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from spec_stack import SpecStackGenerator
from spec_stack.cli.chat import Chat
from spec_stack.sglang.decide import KnownTexts, Prompt
from spec_stack.sglang.server_args import ServerConfig
from tests.entry_points.prompts import DOCUMENT, NAMES, RATE, ROWS, Reads, lines_of, lines_of_prompt
from tests.entry_points.test_servers import post
from tests.entry_points.test_sglang import planned
from tests.support.running_app import RunningApp
from tests.support.upstream import FakeUpstream

FIRST = list(ROWS["chat"].messages)
AGAIN = "And what is the number of the locker of Farid?"
CHAT = "/v1/chat/completions"


def second(answer: str) -> list[dict[str, Any]]:
    return [*FIRST, {"role": "assistant", "content": answer}, {"role": "user", "content": AGAIN}]


@pytest.fixture(scope="module")
def session(generator: SpecStackGenerator) -> tuple[str, frozenset[str]]:
    """A session's first answer, and the lines that its target has after the second turn."""
    reads = Reads(generator)
    with generator.session() as opened, reads.of():
        answer = opened.generate(messages=FIRST, max_tokens=1).text
        opened.generate(messages=second(answer), max_tokens=1)
    return answer, lines_of(reads.text())


def test_a_session_recalls_what_is_asked(session: tuple[str, frozenset[str]]) -> None:
    lines = session[1]
    assert {name for name in NAMES for line in lines if line.startswith(f"The locker of {name}")} >= {"Carmen", "Farid"}
    assert len(lines) < 0.6 * len(DOCUMENT.splitlines())


def test_a_server(server: RunningApp, generator: SpecStackGenerator, session: tuple[str, frozenset[str]]) -> None:
    reads = Reads(generator)
    with reads.of():
        for messages in (FIRST, second(session[0])):
            post(server.url + CHAT, {"messages": messages, "max_tokens": 1, "temperature": 0}, authorization="Bearer b")
    assert lines_of(reads.text()) == session[1]


def test_the_chat_of_the_command_line(generator: SpecStackGenerator, session: tuple[str, frozenset[str]]) -> None:
    reads = Reads(generator)
    typed = [AGAIN, FIRST[1]["content"].removeprefix(f"{DOCUMENT}\n\n")]

    def read(prompt: str) -> str:
        if not typed:
            raise EOFError
        return typed.pop()

    with reads.of():
        Chat(generator, {"max_tokens": 1}, FIRST[0]["content"], [DOCUMENT], read, io.StringIO()).run()
    assert lines_of(reads.text()) == session[1]


def test_a_proxy(proxy: RunningApp, upstream: FakeUpstream, session: tuple[str, frozenset[str]]) -> None:
    for messages in (FIRST, second(session[0])):
        post(proxy.url + CHAT, {"messages": messages, "model": "m", "spec_stack": {"keep_rate": RATE}})
    assert lines_of_prompt(upstream.seen[-1].json["messages"]) == session[1]


def test_a_proxy_recalls_what_the_second_turn_protects(
    proxy: RunningApp, upstream: FakeUpstream, session: tuple[str, frozenset[str]]
) -> None:
    first = {"role": "system", "content": "Be brief."}
    dropped = next(line for line in DOCUMENT.splitlines()[20:] if line and line not in session[1])
    for messages, protect in ((FIRST, []), (second(session[0]), []), (second(session[0]), [dropped])):
        options = {"keep_rate": RATE, "protect": protect}
        post(proxy.url + CHAT, {"messages": [first, *messages], "model": "m", "spec_stack": options})
    before, lines = (lines_of_prompt(seen.json["messages"]) for seen in upstream.seen[-2:])
    assert lines - before == {dropped}
    assert before <= lines


def test_sglangs_scheduler(generator: SpecStackGenerator, session: tuple[str, frozenset[str]]) -> None:
    known = KnownTexts(ServerConfig(), generator.tokenizer, None, lambda prompt: 0, sys.maxsize)
    kept: list[str] = []
    for messages in (FIRST, second(session[0])):
        ids = generator.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompt = Prompt(tuple(ids), None, None, generator.config.prefill, "recall")
        plan = planned(generator, known, prompt)
        known.turns.add(prompt.tenant, ids, plan.positions, [])
        kept.append(generator.tokenizer.decode([ids[position] for position in plan.positions]))
    assert lines_of(kept[1]) == session[1]
