"""Requests of every base URL, encoding, form and option, and the errors that clients understand."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from typing import Any

import pytest

from spec_stack import Pruner
from spec_stack.proxy.config import ProxyConfig
from tests.proxy.conftest import Start
from tests.proxy.test_pruning import CHAT, CODE, LONG, OTHER, QUESTION, TEXT, post, reason
from tests.support.ports import free_port
from tests.support.upstream import FakeUpstream

MESSAGES = "/v1/messages"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/chat/completions/",
        "/openai/deployments/my-gpt/chat/completions?api-version=2024-10-21",
        "/v1beta/openai/chat/completions",
        "/v1/projects/p/locations/l/endpoints/openapi/chat/completions",
        "/v1/messages?beta=true",
        "/anthropic/v1/messages",
        "/completions",
        "/openai/deployments/m/completions?api-version=1",
        "/api/v1/completions/",
    ],
)
def test_a_prompt_is_found_by_how_the_path_ends(start: Start, upstream: FakeUpstream, path: str) -> None:
    is_text = "completions" in path and "chat" not in path
    body = {"prompt": f"{CODE}\n{QUESTION}"} if is_text else {"messages": LONG}
    assert reason(post(start().url, path, body)).startswith("on: ")
    assert upstream.seen[-1].path == path
    assert len(upstream.seen[-1].body) < len(CODE) / 2


@pytest.mark.parametrize(
    "given",
    [
        f"{CODE}\n{QUESTION}",
        LONG,
        [{"role": "user", "content": [{"type": "input_text", "text": f"{CODE}\n{QUESTION}"}]}],
    ],
)
def test_the_input_of_responses_is_pruned(pruner: Pruner, start: Start, upstream: FakeUpstream, given: Any) -> None:
    url = start().url
    assert reason(post(url, "/v1/responses", {"input": given, "store": False})).startswith("on: ")
    assert upstream.seen[-1].json["store"] is False
    sent = upstream.seen[-1].json["input"]
    while not isinstance(sent, str):
        sent = sent[0].get("content", sent[0].get("text")) if isinstance(sent, list) else sent
    assert sent == pruner.prune(LONG).messages[0]["content"]
    response = post(url, "/v1/responses", {"input": given, "previous_response_id": "r"})
    assert reason(response) == "off: previous_response_id is about the whole prompt"


@pytest.mark.parametrize(
    ("base", "path", "arrives"),
    [
        ("", "/v1/chat/completions", "/v1/chat/completions"),
        ("/v1", "/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/", "/tokenize", "/tokenize"),
        ("/api/v1", "/v1/chat/completions", "/api/v1/chat/completions"),
        ("/v1beta/openai", "/v1/chat/completions", "/v1beta/openai/chat/completions"),
        ("/v1beta/openai/", "/chat/completions", "/v1beta/openai/chat/completions"),
        ("/api/paas/v4", "/v1/chat/completions", "/api/paas/v4/chat/completions"),
        ("/api/v3", "/v1/models", "/api/v3/models"),
        (
            "/v1/projects/p/endpoints/openapi",
            "/v1/chat/completions",
            "/v1/projects/p/endpoints/openapi/chat/completions",
        ),
        ("/inference", "/chat/completions", "/inference/chat/completions"),
    ],
)
def test_a_clients_v1_stands_for_the_version_that_upstream_names(
    start: Start, upstream: FakeUpstream, base: str, path: str, arrives: str
) -> None:
    post(start(upstream.url + base).url, path, {"messages": LONG})
    assert upstream.seen[-1].path == arrives


@pytest.mark.parametrize(
    ("pasted", "base"),
    [
        ("http://host/v1/chat/completions", "http://host/v1"),
        ("http://host/chat/completions/", "http://host"),
        ("https://api.anthropic.com/v1/messages", "https://api.anthropic.com/v1"),
        ("https://host/openai/deployments/m/chat/completions?api-version=1", "https://host/openai/deployments/m"),
        ("http://host/v1/models", "http://host/v1"),
    ],
)
def test_a_pasted_endpoint_is_told_its_base_url(pasted: str, base: str) -> None:
    with pytest.raises(ValueError, match=f"write {base}$"):
        ProxyConfig(pasted)


def test_options_are_taken_from_the_body_and_upstream_does_not_see_them(
    pruner: Pruner, start: Start, upstream: FakeUpstream
) -> None:
    url = start().url
    document = [{"role": "user", "content": f"{CODE}{OTHER}"}]
    line = "    return scoring_limit is None"
    options: list[dict[str, Any]] = [
        {"question": QUESTION},
        {"question": "What is the value of MAX_OCCURRENCES?", "keep_rate": 0.1},
        {"protect": [line]},
        {"protect": ["class ", "import "], "question": "Why?", "keep_rate": 0.5},
        {"keep_rate": 0.2},
        {},
    ]
    for given in options:
        post(url, CHAT, {"messages": document, "model": "m", "spec_stack": given})
        assert upstream.seen[-1].json == {"messages": pruner.prune(document, **given).messages, "model": "m"}
    assert line in pruner.prune(document, protect=[line]).messages[0]["content"]
    # A short prompt and a whole one are sent without the field too, and the header is the default of the field.
    header = {"x-spec-stack-keep-rate": "0.1"}
    assert reason(post(url, CHAT, {"messages": document, "spec_stack": {"keep_rate": 1}}, **header)).startswith("off: ")
    assert upstream.seen[-1].json == {"messages": document}
    response = post(url, CHAT, {"messages": document}, **{"x-spec-stack-keep-rate": "1"})
    assert reason(response) == "off: keep_rate is 1"
    post(url, CHAT, {"messages": [{"role": "user", "content": "Hi"}], "spec_stack": {"protect": ["x"]}})
    assert upstream.seen[-1].json == {"messages": [{"role": "user", "content": "Hi"}]}
    post(url, CHAT, {"messages": document, "spec_stack": {"question": QUESTION}}, **header)
    assert upstream.seen[-1].json["messages"] == pruner.prune(document, question=QUESTION, keep_rate=0.1).messages
    assert "x-spec-stack-keep-rate" not in upstream.seen[-1].headers


def test_a_null_is_as_an_option_that_is_not_there_and_upstream_does_not_see_it(
    pruner: Pruner, start: Start, upstream: FakeUpstream
) -> None:
    url, document = start().url, [{"role": "user", "content": f"{CODE}{OTHER}"}]
    short = [{"role": "user", "content": "Hi"}]
    for messages in (short, document):
        post(url, CHAT, {"messages": messages, "spec_stack": None})
        assert upstream.seen[-1].json == {"messages": pruner.prune(messages).messages}
    # Of a key that stands twice, the last value holds.
    twice = json.dumps({"messages": short, "spec_stack": {"keep_rate": 0.5}})[:-1] + ', "spec_stack": null}'
    post(url, CHAT, twice.encode())
    assert upstream.seen[-1].json == {"messages": short}
    nulls = dict.fromkeys(("keep_rate", "max_dropped_attention", "question", "protect"))
    post(url, CHAT, {"messages": document, "spec_stack": nulls}, **{"x-spec-stack-keep-rate": "0.1"})
    assert upstream.seen[-1].json == {"messages": pruner.prune(document, keep_rate=0.1).messages}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep_rat": 0.2}, "keep_rat is not known; did you mean keep_rate?"),
        ({"protected": ["x"]}, "did you mean protect?"),
        ({"banana": 1}, "banana is not known; known are keep_rate, max_dropped_attention, question, protect"),
        ({"keep_rate": 2}, "keep_rate"),
        ({"keep_rate": "0.2"}, "keep_rate"),
        ({"keep_rate": float("nan")}, "spec_stack.keep_rate: "),
        ({"max_dropped_attention": float("inf")}, "spec_stack.max_dropped_attention: "),
        ({"protect": "x"}, "protect"),
        ({"protect": ["x"] * 65}, "protect"),
        ({"question": 7}, "question"),
        ({"question": " "}, "spec_stack.question: it is empty"),
        ({"question": "x" * 4001}, "question"),
        ("keep_rate", "must be an object"),
    ],
)
def test_a_wrong_option_is_refused_by_name(start: Start, upstream: FakeUpstream, given: Any, message: str) -> None:
    response = post(start().url, CHAT, {"messages": LONG, "spec_stack": given})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert not upstream.seen


def test_the_argument_of_openais_client_is_no_field(start: Start, upstream: FakeUpstream) -> None:
    url = start().url
    for extra in ({"spec_stack": {"keep_rate": 0.2}}, {"keep_rate": 0.2}):
        response = post(url, CHAT, {"messages": LONG, "extra_body": extra})
        assert response.status_code == 400
        assert "extra_body is an argument of OpenAI's client" in response.json()["error"]["message"]
    assert not upstream.seen
    body = {"messages": [{"role": "user", "content": "Hi"}], "extra_body": {"top_k": 4}}
    post(url, CHAT, body)
    assert upstream.seen[-1].json == body


def test_an_unknown_header_of_this_package_is_refused_where_a_prompt_is_pruned(
    start: Start, upstream: FakeUpstream
) -> None:
    url, headers = start().url, {"x-spec-stack-keeprate": "0.2"}
    response = post(url, CHAT, {"messages": LONG}, **headers)
    assert response.status_code == 400
    assert "known are x-spec-stack-keep-rate, x-spec-stack-route" in response.json()["error"]["message"]
    assert not upstream.seen
    assert post(url, "/v1/embeddings", {"input": "Hi"}, **headers).status_code == 200


def test_what_json_has_not_is_refused_beside_an_option_and_else_upstreams_to_judge(
    start: Start, upstream: FakeUpstream
) -> None:
    url = start().url
    for given in ({"keep_rate": float("nan")}, {"spec_stack": {"keep_rate": 0.2}, "temperature": float("nan")}):
        response = post(url, CHAT, json.dumps({"messages": LONG, **given}).encode())
        assert response.status_code == 400
        assert "\n" not in response.json()["error"]["message"]
    assert not upstream.seen
    body = json.dumps({"messages": LONG, "temperature": float("nan")}).encode()
    assert reason(post(url, CHAT, body)) == "off: the body is not JSON"
    assert upstream.seen[-1].body == body


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"keep_rate": 0.3}, 'spec_stack: {"keep_rate": …}'),
        ({"max_dropped_attention": 0.1}, 'spec_stack: {"max_dropped_attention": …}'),
        ({"question": QUESTION}, 'spec_stack: {"question": …}'),
        ({"protect": ["class "]}, 'spec_stack: {"protect": …}'),
        ({"Keep-Rate": 0.3}, 'spec_stack: {"keep_rate": …}'),
        ({"sparse_prefill": "off"}, 'spec_stack: {"keep_rate": 1}'),
        ({"spec-stack": {"keep_rate": 0.2}}, "did you mean spec_stack?"),
        ({"specStack": {"keep_rate": 0.2}}, "did you mean spec_stack?"),
    ],
)
def test_an_option_outside_of_the_field_and_another_spelling_of_it_are_refused(
    start: Start, upstream: FakeUpstream, given: dict[str, Any], hint: str
) -> None:
    url = start().url
    response = post(url, CHAT, {"messages": LONG, **given})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(given))
    assert hint in response.json()["error"]["message"]
    assert not upstream.seen
    post(url, CHAT, {"messages": LONG, **dict.fromkeys(given), "keep_last": 3})
    assert upstream.seen[-1].json.keys() == {"messages", *given, "keep_last"}


def test_questions_about_one_document_do_not_depend_on_each_other(
    pruner: Pruner, start: Start, upstream: FakeUpstream
) -> None:
    url, document = start().url, [{"role": "user", "content": f"{CODE}{OTHER}"}]
    for question in (QUESTION, "What does it return?", QUESTION):
        post(url, CHAT, {"messages": document, "spec_stack": {"question": question}})
        assert upstream.seen[-1].json["messages"] == pruner.prune(document, question=question).messages


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [("gzip", gzip.compress), ("x-gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)],
)
def test_an_encoded_body_is_pruned_and_sent_plain(
    pruner: Pruner, start: Start, upstream: FakeUpstream, encoding: str, encode: Any
) -> None:
    url, plain = start().url, json.dumps({"messages": LONG}).encode()
    response = post(url, CHAT, encode(plain), **{"content-encoding": encoding})
    assert reason(response).startswith("on: ")
    assert upstream.seen[-1].json["messages"] == pruner.prune(LONG).messages
    assert "content-encoding" not in upstream.seen[-1].headers
    short = encode(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode())
    post(url, CHAT, short, **{"content-encoding": encoding})
    assert upstream.seen[-1].body == short
    assert upstream.seen[-1].headers["content-encoding"] == encoding


@pytest.mark.parametrize(
    ("encoding", "body", "why"),
    [
        ("gzip", b"not gzip", "the body is not gzip, as its Content-Encoding says"),
        ("deflate", gzip.compress(b"{}"), "the body is not deflate, as its Content-Encoding says"),
        ("gzip", gzip.compress(b'{"messages": []}')[:-9], "the body ends within its gzip stream"),
        ("gzip", gzip.compress(b"{"), "the body is not JSON"),
        ("br", b"x", "the body's Content-Encoding is not read, only gzip, x-gzip, deflate are"),
        ("gzip, gzip", b"x", "the body's Content-Encoding is not read, only gzip, x-gzip, deflate are"),
        ("gzip", gzip.compress(b" " * 50_000_000), "the body is too long to parse"),
        ("identity", gzip.compress(b"{}"), "the body is not JSON"),
        ("identity", b"[]", "the body is not a JSON object"),
    ],
    ids=["no gzip", "gzip as deflate", "cut", "no JSON", "br", "twice", "too long", "plain", "a list"],
)
def test_the_reason_tells_an_encoded_body_from_a_broken_one(
    start: Start, upstream: FakeUpstream, encoding: str, body: bytes, why: str
) -> None:
    response = post(start().url, CHAT, body, **{"content-encoding": encoding})
    assert reason(response) == f"off: {why}"
    assert upstream.seen[-1].body == body


@pytest.mark.parametrize(
    ("status", "kind", "body", "headers"),
    [
        (502, "api_error", {"messages": []}, {}),
        (400, "invalid_request_error", {"messages": []}, {"x-spec-stack-keep-rate": "7"}),
        (413, "request_too_large", {"messages": ["x" * 3000]}, {}),
    ],
)
def test_errors_have_the_form_of_the_api(
    start: Start, status: int, kind: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    url = start(f"http://127.0.0.1:{free_port()}", max_body_bytes=2000).url
    for path, more in ((MESSAGES, {}), ("/messages", {"anthropic-version": "2023-06-01"})):
        response = post(url, path, body, **headers, **more)
        assert response.status_code == status
        assert response.json().keys() == {"type", "error"}
        assert response.json()["type"] == "error"
        assert response.json()["error"].keys() == {"type", "message"}
        assert response.json()["error"]["type"] == kind
    assert post(url, CHAT, body, **headers).json()["error"]["code"] == status


@pytest.mark.parametrize(
    "call",
    [
        {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "cat my-private-notes.txt"}},
        "my-private-notes.txt",
    ],
)
def test_parts_that_are_not_pruned_do_not_end_pruning(
    start: Start, upstream: FakeUpstream, caplog: pytest.LogCaptureFixture, call: Any
) -> None:
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Done."},
        {"role": "assistant", "content": "Yes?"},
        *LONG,
    ]
    with caplog.at_level(logging.DEBUG):
        assert reason(post(start().url, CHAT, {"messages": messages})).startswith("on: ")
    assert upstream.seen[-1].json["messages"][:4] == messages[:4]
    assert "my-private-notes" not in caplog.text


def test_half_a_character_does_not_end_pruning(start: Start, upstream: FakeUpstream) -> None:
    url = start().url
    for half in ("\ud83d", "\ude00"):
        messages = [{"role": "user", "content": f"{CODE}\n{QUESTION} {half}"}]
        assert reason(post(url, CHAT, {"messages": messages})).startswith("on: ")
        assert upstream.seen[-1].json["messages"][0]["content"].endswith(f"{QUESTION} {half}")


def test_the_log_quotes_no_message(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        response = post(start().url, TEXT, {"prompt": "my private text. " * 30_000})
        assert reason(response).startswith("off: the prompt is too long")
    assert "my private text" not in caplog.text
