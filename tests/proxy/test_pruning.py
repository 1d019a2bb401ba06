"""What the proxy leaves out of prompts, what it leaves alone, and what it says of it."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from spec_stack import PrefillConfig, Pruner, SpecStackGenerator
from spec_stack.proxy.app import build_app
from spec_stack.proxy.config import ProxyConfig
from tests.proxy.conftest import Start
from tests.support.running_app import RunningApp
from tests.support.upstream import FakeUpstream

CODE = (Path(__file__).parents[1] / "support" / "code_to_prune.txt").read_text()
OTHER = (Path(__file__).parents[1] / "support" / "other_code_to_prune.txt").read_text()
QUESTION = "What is the value of MAX_OCCURRENCES?"
LONG = [{"role": "user", "content": f"{CODE}\n{QUESTION}"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def post(url: str, path: str, body: Any, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(url + path, content=content, headers=headers, timeout=120)


def reason(response: httpx2.Response) -> str:
    return response.headers["x-spec-stack-reason"]


def metrics(url: str) -> dict[str, float]:
    lines = httpx2.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_a_long_chat_is_pruned_and_nothing_else_is_changed(
    pruner: Pruner, start: Start, upstream: FakeUpstream
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": CODE}}]
    body = {"messages": LONG, "tools": tools, "tool_choice": "none", "logprobs": True, "model": "m", "unknown": [1.50]}
    given = {"authorization": "Bearer secret", "x-unknown": "a, b;c", "user-agent": "mine/1"}
    response = post(start().url, CHAT, body, **given)
    expected = pruner.prune(LONG)
    assert response.status_code == 200
    seen = upstream.seen[-1]
    assert seen.json == {**body, "messages": expected.messages}
    assert len(expected.messages[0]["content"]) < len(CODE) / 2
    assert int(response.headers["x-spec-stack-prompt-tokens"]) == expected.num_tokens
    assert int(response.headers["x-spec-stack-kept-tokens"]) == expected.num_kept_tokens < expected.num_tokens / 2
    assert reason(response).startswith("on: ")
    assert {name: seen.headers[name] for name in given} == given
    # Of these, the test's own client has sent the last two.
    assert seen.headers.keys() - given.keys() == {
        *("host", "content-length", "accept", "accept-encoding", "x-request-id")
    }
    assert seen.headers["host"] == upstream.url.removeprefix("http://")


def test_a_short_prompt_and_every_other_path_pass_as_they_are(start: Start, upstream: FakeUpstream) -> None:
    url = start().url
    spaced = b'{ "messages" : [{"role":"user","content":"Hi"}],  "seed":1 }'
    # Code of more bytes than the threshold has tokens, and of fewer tokens.
    middle = json.dumps({"messages": [{"role": "user", "content": CODE[:900]}]}).encode()
    for body in (spaced, middle):
        response = post(url, CHAT, body)
        assert upstream.seen[-1].body == body
        assert reason(response) == "off: the prompt is shorter than min_prompt_tokens=400"
        assert "x-spec-stack-kept-tokens" not in response.headers
    long = json.dumps({"input": CODE * 3, "messages": LONG}).encode()
    for path in ("/v1/embeddings", "/tokenize?x=%20a&y", "/v1/a%2Fb/", "/v1/messages/count_tokens"):
        response = post(url, path, long)
        assert (upstream.seen[-1].body, upstream.seen[-1].path) == (long, path)
        assert reason(response).startswith("off: only POST to paths that end with /chat/completions, ")
    for method in ("GET", "DELETE", "PUT", "OPTIONS"):
        response = httpx2.request(method, f"{url}/v1/models")
        assert response.status_code == 200
        assert upstream.seen[-1].method == method
        assert reason(response).startswith("off: only POST")


def test_an_upstream_that_prunes_too_does_not_report_in_the_proxys_place(start: Start, upstream: FakeUpstream) -> None:
    url = start().url
    pruned = post(url, CHAT, {"messages": LONG}, **{"x-behave": "prune"})
    whole = post(url, CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, **{"x-behave": "prune"})
    assert reason(pruned).startswith("on: the prompt has")
    assert int(pruned.headers["x-spec-stack-kept-tokens"]) > 7
    assert reason(whole) == "off: the prompt is shorter than min_prompt_tokens=400"
    assert "x-spec-stack-kept-tokens" not in whole.headers


def test_completions_are_pruned_if_they_are_one_text(pruner: Pruner, start: Start, upstream: FakeUpstream) -> None:
    url, text = start().url, f"{CODE}\n{QUESTION}"
    shorter = pruner.prune(text).messages
    post(url, TEXT, {"prompt": text, "max_tokens": 3})
    assert upstream.seen[-1].json == {"prompt": shorter, "max_tokens": 3}
    post(url, TEXT, {"prompt": [text]})
    assert upstream.seen[-1].json == {"prompt": [shorter]}
    for body in (
        {"prompt": [text, text]},
        {"prompt": [1, 2, 3] * 500},
        {"prompt": text, "echo": True},
        {"prompt": text, "suffix": "}"},
        {"prompt": text, "prompt_logprobs": 0},
    ):
        response = post(url, TEXT, body)
        assert upstream.seen[-1].json == body
        assert reason(response).startswith("off: ")


@pytest.mark.parametrize("max_conversations", [8, 0], ids=["kept", "scored anew"])
def test_a_later_turn_begins_with_what_the_turn_before_kept(
    pruner: Pruner, start: Start, upstream: FakeUpstream, max_conversations: int
) -> None:
    url = start(max_conversations=max_conversations).url
    turns = [
        LONG,
        [*LONG, {"role": "assistant", "content": "Four."}, {"role": "user", "content": "Are you sure?"}],
    ]
    turns.append([*turns[1], {"role": "assistant", "content": "Yes."}, {"role": "user", "content": f"{OTHER}\nWhy?"}])
    sent = []
    for messages in turns:
        post(url, CHAT, {"messages": messages})
        sent.append(upstream.seen[-1].json["messages"])
    conversation = pruner.conversation()
    assert sent == [conversation.prune(messages).messages for messages in turns]
    assert sent[1][0] == sent[0][0] != LONG[0]
    assert sent[2][:4] == sent[1] + [turns[2][3]]
    assert len(sent[2][4]["content"]) < len(OTHER) / 2
    # The same request again is the same prompt.
    post(url, CHAT, {"messages": turns[2]})
    assert upstream.seen[-1].json["messages"] == sent[2]


@pytest.mark.parametrize("recall", [True, False])
def test_what_a_later_turn_asks_for_comes_back_unless_recall_is_off(
    start: Start, upstream: FakeUpstream, recall: bool
) -> None:
    url, first = start(recall=recall).url, [{"role": "user", "content": f"{CODE}{OTHER}\n{QUESTION}"}]
    keep = {"x-spec-stack-keep-rate": "0.1"}
    post(url, CHAT, {"messages": first}, **keep)
    sent = upstream.seen[-1].json["messages"][0]["content"]
    dropped = max((line for line in OTHER.splitlines(keepends=True) if line not in sent), key=len)
    answered = {"role": "assistant", "content": "Four."}
    question = {"role": "user", "content": f"What does it mean by this: {dropped}"}
    response = post(url, CHAT, {"messages": [*first, answered, question]}, **keep)
    again = upstream.seen[-1].json["messages"][0]["content"]
    assert (dropped in again) == recall
    assert (again != sent) == recall
    assert (response.headers["x-spec-stack-recalled-tokens"] != "0") == recall


def test_a_turn_goes_on_from_turns_at_its_own_keep_rate_alone(
    pruner: Pruner, start: Start, upstream: FakeUpstream
) -> None:
    url, answered = start(marker="[gap]").url, {"role": "assistant", "content": "Four."}
    turns = [LONG, [*LONG, answered, {"role": "user", "content": "Are you sure?"}]]
    for keep_rate in (0.1, 0.5, None, 0.2):
        headers = {} if keep_rate is None else {"x-spec-stack-keep-rate": str(keep_rate)}
        conversation = pruner.conversation()
        for messages in turns:
            post(url, CHAT, {"messages": messages}, **headers)
            expected = conversation.prune(messages, keep_rate=keep_rate, marker="[gap]").messages
            assert upstream.seen[-1].json["messages"] == expected
            assert "[gap]" in expected[0]["content"]


def test_a_prompt_that_is_too_long_or_a_draft_that_is_busy_forwards_the_whole_prompt(
    start: Start, upstream: FakeUpstream
) -> None:
    def whole(url: str, body: dict[str, Any]) -> str:
        content = json.dumps(body).encode()
        response = post(url, CHAT, content)
        assert response.status_code == 200
        assert content in [seen.body for seen in upstream.seen]
        return reason(response)

    url = start(max_parsed_bytes=800_000).url
    assert whole(url, {"messages": [{"role": "user", "content": CODE * 100}]}).startswith("off: the prompt is too long")
    assert whole(url, {"messages": LONG, "x": "y" * 800_000}) == "off: the body is too long to parse"
    assert whole(url, {"messages": LONG, "x": float("inf")}) == "off: the body is not JSON"
    url = start(max_queued_per_client=1).url
    bodies = [{"messages": [{"role": "user", "content": f"{at} {CODE}"}]} for at in range(6)]
    with ThreadPoolExecutor(6) as pool:
        reasons = list(pool.map(lambda body: reason(post(url, CHAT, body)), bodies))
    assert any("busy" in each for each in reasons)
    assert any(each.startswith("on: ") for each in reasons)


def test_a_draft_that_is_too_slow_forwards_the_whole_prompt(start: Start, upstream: FakeUpstream) -> None:
    response = post(start(deadline_s=0.001).url, CHAT, {"messages": LONG})
    assert reason(response) == "off: scoring takes longer than deadline_s=0.001"
    assert upstream.seen[-1].json == {"messages": LONG}


def test_metrics_and_health_say_what_was_done(start: Start) -> None:
    url = start().url
    post(url, CHAT, {"messages": LONG})
    post(url, CHAT, {"messages": [{"role": "user", "content": "Hi"}]})
    post(url, "/v1/embeddings", {"input": "Hi"}, **{"x-behave": "die_first"})
    expected = {
        'spec_stack_prompts_total{outcome="pruned"}': 1,
        'spec_stack_prompts_total{outcome="short"}': 1,
        'spec_stack_requests_total{outcome="ok"}': 2,
        'spec_stack_requests_total{outcome="failed"}': 1,
        "spec_stack_scoring_seconds_count": 1,
        "spec_stack_prompts_waiting": 0,
        "spec_stack_sessions": 1,
    }
    assert expected.items() <= metrics(url).items()
    health = httpx2.get(f"{url}/health", timeout=60)
    assert health.json() == {"status": "ok"}
    assert "x-spec-stack-reason" not in health.headers


@pytest.mark.parametrize(
    ("path", "field", "first", "then"),
    [
        (CHAT, "messages", [{"role": "user", "content": CODE}], [{"role": "user", "content": QUESTION}]),
        (TEXT, "prompt", CODE, f"\n{QUESTION}"),
    ],
)
def test_a_question_behind_an_earlier_prompt_is_pruned_as_if_nothing_came_before(
    pruner: Pruner, start: Start, upstream: FakeUpstream, path: str, field: str, first: Any, then: Any
) -> None:
    url = start().url
    post(url, path, {field: first})
    post(url, path, {field: first + then})
    assert upstream.seen[-1].json == {field: pruner.prune(first + then).messages}


def test_clients_share_no_conversation(start: Start) -> None:
    url = start().url
    for key in ("one", "two", "one"):
        post(url, CHAT, {"messages": LONG}, authorization=f"Bearer {key}")
    assert metrics(url)["spec_stack_sessions"] == 2


def changed(messages: list[dict[str, Any]]) -> None:
    """What clients change between turns and the draft does not read."""
    for at, message in enumerate(messages):
        message |= {"id": f"{len(messages)}-{at}", "name": f"n{len(messages)}"}
    for message in messages[:-2]:
        message.pop("reasoning_content", None)
    for message in messages[:-1]:
        message["content"] = message["content"][0]["text"]
    messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    messages[-1]["content"].insert(0, {"type": "image_url", "image_url": {"url": "data:x"}})


def test_a_conversation_goes_on_whatever_the_draft_does_not_read(
    pruner: Pruner, start: Start, upstream: FakeUpstream
) -> None:
    url, conversation, chat = start().url, pruner.conversation(), list[dict[str, Any]]()
    for at in range(4):
        chat.append({"role": "user", "content": [{"type": "text", "text": f"{CODE[900 * at :][:1800]}\n{QUESTION}"}]})
        messages = json.loads(json.dumps(chat))
        changed(messages)
        post(url, "/v1/messages", {"messages": messages})
        expected = conversation.prune(chat).messages
        sent = upstream.seen[-1].json["messages"]
        for message, wanted, given in zip(sent, expected, messages, strict=True):
            text = message["content"] if isinstance(message["content"], str) else message["content"][-1]["text"]
            assert text == wanted["content"][0]["text"]
            assert {**message, "content": 0} == {**given, "content": 0}
        answer = {"type": "text", "text": f"It is {at}."}
        chat.append({"role": "assistant", "content": [answer], "reasoning_content": f"Thought {at}."})
    assert metrics(url)["spec_stack_sessions"] == 1


@pytest.mark.slow
def test_late_work_goes_on_for_the_next_turn_and_gives_way_to_other_clients(
    embedded: SpecStackGenerator, upstream: FakeUpstream
) -> None:
    config = PrefillConfig(keep_rate=0.3, min_prompt_tokens=400, prefill_chunk=512)
    pruner = Pruner(embedded.draft, embedded.tokenizer, config)
    long = [{"role": "user", "content": f"{CODE * 12}\n{QUESTION}"}]
    answered = [*long, {"role": "assistant", "content": "Four."}, {"role": "user", "content": "Are you sure?"}]
    with ExitStack() as stack:
        url = stack.enter_context(RunningApp(build_app(pruner, ProxyConfig(upstream.url, deadline_s=2)))).url
        # Each part of a prompt takes a while: one for the short prompt, some twenty for the long one.
        stack.enter_context(embedded.draft.register_forward_pre_hook(lambda *_: time.sleep(0.25)))
        assert "deadline_s" in reason(post(url, CHAT, {"messages": long}, authorization="Bearer one"))
        # One long prompt does not hold the draft beyond its deadline.
        assert reason(post(url, CHAT, {"messages": LONG}, authorization="Bearer two")).startswith("on: ")
        for _ in range(20):
            response = post(url, CHAT, {"messages": answered}, authorization="Bearer one")
            if not reason(response).startswith("off: scoring"):
                break
        assert len(upstream.seen[-1].body) < len(CODE) * 6


class FailingPruner(Pruner):
    """Has no memory for a prompt."""

    def conversation(self, *args: Any) -> Any:
        def prune(*given: Any, **options: Any) -> Any:
            raise MemoryError("no room for: def my_private_code")

        conversation = super().conversation(*args)
        conversation.prune = prune  # type: ignore[method-assign]
        return conversation


def test_a_draft_that_fails_forwards_the_whole_prompt_and_the_log_quotes_nothing(
    upstream: FakeUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    pruner = FailingPruner.from_pretrained(device="cpu", config=PrefillConfig(min_prompt_tokens=400))
    with RunningApp(build_app(pruner, ProxyConfig(upstream.url, port=0, shutdown_s=1)), 1) as app:
        assert reason(post(app.url, CHAT, {"messages": LONG})) == "off: the draft cannot score the prompt (MemoryError)"
        assert upstream.seen[-1].json == {"messages": LONG}
        assert "my_private_code" not in caplog.text
        assert "scoring failed: MemoryError at " in caplog.text


class CountingPruner(Pruner):
    """Counts the readings of its conversations."""

    num_read = 0

    def conversation(self, *args: Any) -> Any:
        conversation = super().conversation(*args)
        prune = conversation.prune

        def counted(*given: Any, **options: Any) -> Any:
            self.num_read += 1
            return prune(*given, **options)

        conversation.prune = counted  # type: ignore[method-assign]
        return conversation


def test_a_long_history_of_short_turns_is_read_at_once(upstream: FakeUpstream) -> None:
    pruner = CountingPruner.from_pretrained(device="cpu", config=PrefillConfig(keep_rate=0.3, min_prompt_tokens=400))
    with RunningApp(build_app(pruner, ProxyConfig(upstream.url, port=0, deadline_s=120, shutdown_s=1)), 1) as app:
        chat: list[dict[str, Any]] = []
        for at in range(40):
            chat += [{"role": "user", "content": f"Is {at} prime?"}, {"role": "assistant", "content": f"See {at}."}]
        response = post(app.url, CHAT, {"messages": [*chat, *LONG]})
        assert reason(response).startswith("on: the new text")
        assert upstream.seen[-1].json["messages"][:-1] == chat
        assert pruner.num_read == 2
        # As if every turn had come on its own.
        conversation = pruner.conversation()
        for stop in range(1, 80, 2):
            conversation.prune(chat[:stop])
        assert upstream.seen[-1].json["messages"] == conversation.prune([*chat, *LONG]).messages
