"""Audits of pruned requests: a planted loss is found, its route goes dense and recovers, and no client waits."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from spec_stack.http.audits import is_lost
from spec_stack.proxy.audits import greedy, words_of
from spec_stack.proxy.config import ProxyConfig
from tests.proxy.conftest import Start
from tests.proxy.test_pruning import CHAT, CODE, LONG, QUESTION, metrics, post, reason
from tests.support.running_app import until
from tests.support.upstream import FakeUpstream

AUDITED = {"audit_rate": 1.0, "audit_idle_s": 0.01}
# The upstream server's answer to it depends on whether all of it is there.
BREAKS = [{"role": "user", "content": f"# breaks\n{CODE}\n{QUESTION}"}]


def says(body: Any) -> str:
    content = body["messages"][0]["content"]
    is_short = len(content) < len(CODE)
    return "It is 17, a pear." if is_short and content.startswith("# breaks") else "It is 42, an apple."


def counted(url: str, outcome: str, route: str = CHAT) -> float:
    return metrics(url).get(f'spec_stack_audits_total{{outcome="{outcome}",route="{route}"}}', 0.0)


def test_a_planted_loss_turns_the_route_off_and_it_recovers(
    start: Start, upstream: FakeUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.says = says
    url = start(**AUDITED, audit_max_loss=0.1).url
    caplog.set_level(logging.WARNING, "spec_stack")
    for number in range(5):
        assert reason(post(url, CHAT, {"messages": BREAKS})).startswith("on: ")
        until(lambda number=number: counted(url, "lost") == number + 1)  # type: ignore[misc]
    # Five audits are the least that decide.
    response = post(url, CHAT, {"messages": BREAKS})
    assert reason(response).startswith(f"off: audits of {CHAT} found more lost answers than audit_max_loss=0.1")
    assert upstream.seen[-1].json == {"messages": BREAKS}
    other = post(url, CHAT, {"messages": BREAKS}, **{"x-spec-stack-route": "another"})
    assert reason(other).startswith("on: ")
    by_request = post(url, CHAT, {"messages": BREAKS, "spec_stack": {"keep_rate": 0.3}})
    assert reason(by_request).startswith("on: ")
    told = [record.getMessage() for record in caplog.records]
    assert sum("an audited answer was lost" in each for each in told) >= 5
    assert any("is off: whole prompts are forwarded" in each for each in told)
    assert not any("pear" in each or "apple" in each or "MAX_OCCURRENCES" in each for each in told)
    # While it is off, audits go on with prompts that are pruned for them alone.
    num_whole = 0
    while reason(post(url, CHAT, {"messages": LONG})).startswith("off: audits"):
        num_whole += 1
        until(lambda number=num_whole: counted(url, "agreed") + counted(url, "lost") >= number + 6)  # type: ignore[misc]
    # Twenty audits decide that it is on again.
    assert 15 <= num_whole <= 20


def idle(url: str, upstream: FakeUpstream) -> bool:
    """Whether no audit has been sent for a while."""
    before = len(upstream.seen)
    time.sleep(0.2)
    return len(upstream.seen) == before


def test_a_request_does_not_wait_for_an_audit(start: Start, upstream: FakeUpstream) -> None:
    may_answer, audits = threading.Event(), []

    def wait(body: Any) -> str:
        if body.get("temperature") == 0:
            audits.append(body)
            may_answer.wait(30)
        return "It is 42."

    upstream.says = wait
    url = start(**AUDITED).url
    for number in range(3):
        # The audit of the request before hangs upstream.
        until(lambda number=number: len(audits) >= number)  # type: ignore[misc]
        response = post(url, CHAT, {"messages": LONG, "temperature": 0.7, "stream": False})
        assert response.json()["choices"][0]["message"]["content"] == "It is 42."
    until(lambda: counted(url, "interrupted") + counted(url, "agreed") == 0 and len(audits) >= 3)
    may_answer.set()
    until(lambda: counted(url, "agreed") + counted(url, "interrupted") == 3)
    whole, part = (len(each["messages"][0]["content"]) for each in audits[-2:])
    assert whole > 2 * part
    assert all(each["max_tokens"] == 64 and "stream" not in each for each in audits)


def test_no_audit_without_a_rate(start: Start, upstream: FakeUpstream) -> None:
    url = start(audit_idle_s=0.01).url
    post(url, CHAT, {"messages": LONG})
    assert idle(url, upstream)
    assert len(upstream.seen) == 1


def test_an_answer_that_cannot_be_read_is_counted(start: Start, upstream: FakeUpstream) -> None:
    url = start(**AUDITED).url
    post(url, CHAT, {"messages": LONG}, **{"x-behave": "cookies"})
    until(lambda: counted(url, "failed") == 1)


@pytest.mark.parametrize("behaviour", ["too_many", "redirect", "die_first", "die_in_stream", "die_in_body"])
def test_a_request_that_got_no_answer_is_not_audited(start: Start, upstream: FakeUpstream, behaviour: str) -> None:
    url = start(**AUDITED).url
    with suppress(httpx2.RemoteProtocolError):
        post(url, CHAT, {"messages": LONG}, **{"x-behave": behaviour})
    assert idle(url, upstream)
    assert len(upstream.seen) == 1


def test_a_stream_that_its_client_leaves_is_not_audited(start: Start, upstream: FakeUpstream) -> None:
    url, body = start(**AUDITED).url, {"messages": LONG, "stream": True}
    with httpx2.stream("POST", url + CHAT, json=body, headers={"x-behave": "hang_in_stream"}, timeout=60) as response:
        next(response.iter_bytes())
    assert upstream.left.wait(30)
    assert idle(url, upstream)
    assert len(upstream.seen) == 1


def test_a_stream_is_audited_at_its_end(start: Start, upstream: FakeUpstream) -> None:
    url = start(**AUDITED).url
    post(url, CHAT, {"messages": LONG, "stream": True})
    until(lambda: counted(url, "agreed") == 1)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"message": {"content": "Room 7, Vienna."}}]},
        {"choices": [{"text": "Room 7, Vienna."}]},
        {"content": [{"type": "text", "text": "Room 7,"}, {"type": "text", "text": "Vienna."}]},
        {"output": [{"type": "message", "content": [{"type": "output_text", "text": "Room 7, Vienna."}]}]},
    ],
)
def test_the_words_of_every_api_are_read(answer: Any) -> None:
    assert words_of(answer) == {"room": 1, "7": 1, "vienna": 1}


def test_calls_are_compared_without_their_ids() -> None:
    def answer(number: int, city: str) -> Any:
        call = {"id": f"call_{number}", "function": {"name": "population", "arguments": f'{{"city": "{city}"}}'}}
        return {"choices": [{"message": {"content": None, "tool_calls": [call]}}]}

    assert words_of(answer(1, "Wien")) == words_of(answer(2, "Wien")) != words_of(answer(1, "Graz"))
    input_of = words_of({"content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 4}}]})
    assert input_of["4"] == 1


@pytest.mark.parametrize(
    ("whole", "part", "lost"),
    [
        ("The code is 284.", "The code is 284", False),
        ("The code is 284.", "The code is 352.", True),
        ("The depot at Linz.", "It is the depot at Linz.", False),
        ("The depot at Linz reported spoiled oranges.", "I do not know, the text says nothing.", True),
        ("", "", False),
    ],
)
def test_an_answer_is_lost_with_its_numbers_or_most_of_its_words(whole: str, part: str, lost: bool) -> None:
    words = [words_of({"choices": [{"text": text}]}) for text in (whole, part)]
    assert is_lost(words[0], words[1]) is lost


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [], "stream": True, "n": 3}, {"messages": [], "max_tokens": 64}),
        ({"messages": [], "max_completion_tokens": 9}, {"messages": [], "max_completion_tokens": 9}),
        ({"prompt": "a", "max_tokens": 500}, {"prompt": "a", "max_tokens": 64}),
        ({"input": "a"}, {"input": "a", "max_output_tokens": 64, "store": False}),
    ],
)
def test_an_audit_asks_for_one_short_greedy_answer(body: Any, expected: Any) -> None:
    assert greedy(body) == {**expected, "temperature": 0}


@pytest.mark.parametrize("options", [{"audit_rate": 2.0}, {"audit_max_loss": -1.0}, {"audit_max_loss": 0.1}])
def test_a_bad_share_is_named(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ProxyConfig("http://127.0.0.1:8000", **options)  # type: ignore[arg-type]
