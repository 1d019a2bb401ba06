"""Bodies and answers as OpenAI's reference has them: nulls, batches of one, calls, log-probabilities, browsers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from email.message import Message
from functools import partial
from http.client import HTTPConnection
from typing import Any, get_args, get_type_hints

import pytest

pytest.importorskip("fastapi")
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from transformers import PreTrainedModel

from spec_stack import SpecStackGenerator
from spec_stack.hf.answer_parser import AnswerFormat, AnswerParser, ToolFormat
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.protocol import REQUESTS
from spec_stack.serve.responses import BUILDERS, ResponseBuilder
from spec_stack.tokenizers.vocabulary import Pieces
from spec_stack.types import StepOutput, TokenLogprobs
from tests.serve.conftest import Server, served
from tests.support.models import byte_fallback_tokenizer, make_model

CHAT, TEXT = REQUESTS
ORIGIN = "https://chat.example.org"
LEAST = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, TEXT: {"prompt": "Hi"}}
REFERENCE = {CHAT: ChatParams, TEXT: TextParams}
WHOLE = {BUILDERS[CHAT]: ChatCompletion, BUILDERS[TEXT]: Completion}


HERMES = ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")


def nullable(path: str) -> list[str]:
    """Fields that the reference lets be null, but for the prompt."""
    fields = get_type_hints(REFERENCE[path], include_extras=False)
    return [name for name, kind in fields.items() if type(None) in get_args(kind) and name != "prompt"]


NULLABLE = [(path, name) for path in REQUESTS for name in nullable(path)]


def body(path: str, **fields: Any) -> Any:
    return REQUESTS[path].model_validate(LEAST[path] | fields)


@pytest.mark.parametrize(("path", "name"), [*NULLABLE, (CHAT, "tools"), (CHAT, "tool_choice"), (TEXT, "user")])
def test_a_null_field_is_one_that_is_left_out(path: str, name: str) -> None:
    config = ServeConfig()
    assert len(NULLABLE) > 25
    plain, with_null = (body(path), body(path, **{name: None}))
    assert with_null.source() == plain.source()
    assert with_null.options(config) == plain.options(config)
    assert (with_null.n, with_null.stream, with_null.options(config)["max_tokens"]) == (1, False, None)


@pytest.mark.parametrize("name", ["tool_calls", "function_call", "refusal", "audio", "name"])
def test_a_null_field_of_a_message_is_one_that_is_left_out(name: str) -> None:
    said = {"role": "assistant", "content": None}
    assert body(CHAT, messages=[said | {name: None}]).source().messages == [said]


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        (["Hi"], "Hi", None),
        ([[1, 50, 60]], None, [1, 50, 60]),
        ([7], None, [7]),
    ],
)
def test_a_batch_of_one_prompt_is_that_prompt(prompt: Any, text: str | None, token_ids: list[int] | None) -> None:
    source = body(TEXT, prompt=prompt).source()
    assert (source.prompt, source.input_ids) == (text, token_ids)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (TEXT, {"prompt": ["a", "b"]}, "it must be one text or one list of token ids; send several requests"),
        (TEXT, {"prompt": [[1, "a"]]}, "it must be one text or one list of token ids"),
        (TEXT, {"prompt": 5}, "it must be one text or one list of token ids"),
        (TEXT, {"stop": [1]}, "it must be a string or a list of strings"),
        (CHAT, {"tool_choice": 1}, "it must be a string or an object"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
    ],
)
def test_a_field_of_another_form_is_refused_by_all_its_forms(path: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        body(path, **fields).options(ServeConfig())


@pytest.fixture(scope="module")
def outputs(embedded: SpecStackGenerator) -> list[StepOutput]:
    """A step, and the last one with what it all cost."""
    steps = list(embedded.stream("def f", max_tokens=8, ignore_eos=True, gamma=0))
    return [replace(steps[0], logprobs=None), replace(steps[-1], text="", finish_reason="eos")]


def answer(outputs: Sequence[StepOutput], texts: Sequence[str], path: str = CHAT, **parts: Any) -> ResponseBuilder:
    given = {"parsers": [AnswerParser(AnswerFormat(HERMES), ["add"])], "token_bytes": lambda _: b"x"} | parts
    form = BUILDERS[path]("spec-stack", **given)
    form.steps = [*(replace(outputs[0], text=text) for text in texts), outputs[1]]
    return form


def whole(form: ResponseBuilder) -> dict[str, Any]:
    for step in form.steps:
        form.add(0, step)
    answer = form.whole()
    WHOLE[type(form)].model_validate(answer, strict=True)
    return answer["choices"][0]


def deltas(form: ResponseBuilder) -> list[dict[str, Any]]:
    chunks = [chunk for step in form.steps for chunk in form.add(0, step)]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return [chunk["choices"][0]["delta"] for chunk in chunks]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("texts", "content"),
    [([CALL], None), (["<tool_call>", CALL[11:]], None), (["Well. ", CALL], "Well."), (["Hi"], "Hi"), ([""], "")],
)
def test_the_content_is_there_and_null_beside_a_call(
    outputs: list[StepOutput], texts: list[str], content: str | None
) -> None:
    message = whole(answer(outputs, texts))["message"]
    assert message["content"] == content if content is None else message["content"].strip() == content
    assert message["refusal"] is None
    first, *later = deltas(answer(outputs, texts))
    assert first["role"] == "assistant"
    assert "content" in first
    streamed = [delta["content"] for delta in (first, *later) if delta.get("content") is not None]
    assert "".join(streamed) == (message["content"] or "")
    assert bool(streamed) == (content is not None)


@pytest.mark.parametrize(("max_calls", "num_calls"), [(None, 2), (1, 1)])
def test_one_call_is_left_where_calls_are_not_to_be_parallel(
    outputs: list[StepOutput], max_calls: int | None, num_calls: int
) -> None:
    form = partial(answer, outputs, [CALL, CALL.replace("1", "2")], max_calls=max_calls)
    choice = whole(form())
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (num_calls, "tool_calls")
    calls = [call for delta in deltas(form()) for call in delta.get("tool_calls", ())]
    assert {call["index"] for call in calls} == set(range(num_calls))
    assert body(CHAT, parallel_tool_calls=num_calls != 1).max_calls == max_calls


def test_every_token_has_its_bytes_and_a_name_of_its_own(outputs: list[StepOutput]) -> None:
    tokenizer = byte_fallback_tokenizer("▁be be A")
    ids = tokenizer.convert_tokens_to_ids(["▁be", "be", "<0xE2>", "<0x82>", "<0x41>", "A"])
    ids.append(len(tokenizer) + 3)
    names = [" be", "be", "bytes:\\xe2", "bytes:\\x82", "A", f"token_id:{ids[5]}", f"token_id:{ids[6]}"]
    logprobs = [TokenLogprobs(ids[0], -0.5, -0.5, [(token_id, -1.0) for token_id in ids])]
    for path in REQUESTS:
        form = answer(outputs, ["x"], path, token_bytes=Pieces(tokenizer).bytes_of)
        form.steps[0] = replace(form.steps[0], logprobs=logprobs)
        shown = whole(form)["logprobs"]
        if path == TEXT:
            assert (shown["tokens"], list(shown["top_logprobs"][0])) == ([" be"], names)
            continue
        assert shown["content"][0]["token"] == " be"
        entries = shown["content"][0]["top_logprobs"]
        assert [entry["token"] for entry in entries] == [*names[:5], "A", names[6]]
        assert [bytes(entry["bytes"]) for entry in entries] == [b" be", b"be", b"\xe2", b"\x82", b"A", b"A", b""]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Over a pair of which the tokenizer has a token more than the models have rows."""
    tokenizer = byte_fallback_tokenizer("▁be be")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    models: list[PreTrainedModel] = [make_model(seed=seed, vocab=len(tokenizer)) for seed in (1, 2)]
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    generator = SpecStackGenerator(*models, tokenizer)
    with served(generator, cors_origins=[ORIGIN]) as running:
        yield running


def ask(server: Server, method: str, path: str, fields: Any = None, **headers: str) -> tuple[int, Any, Message]:
    """Status, content and headers."""
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, json.dumps(fields), {"Content-Type": "application/json"} | names)
    response = connection.getresponse()
    content = response.read()
    return response.status, json.loads(content) if content[:1] == b"{" else content, response.headers


def test_a_server_takes_large_seeds_and_tells_twenty_tokens_apart(server: Server) -> None:
    chat = LEAST[CHAT] | {"max_tokens": 2, "logprobs": True, "top_logprobs": 20, "seed": 2**63 - 1, "n": 2}
    status, content, _ = ask(server, "POST", CHAT, chat)
    assert (status, len(content["choices"])) == (200, 2), content
    for token in content["choices"][0]["logprobs"]["content"]:
        assert len({bytes(entry["bytes"]) for entry in token["top_logprobs"]}) == 20


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (TEXT, {"prompt": "be <image>"}, "'<image>'"),
        (TEXT, {"prompt": [[10_000]]}, "vocabulary"),
        (CHAT, {"messages": [{"role": "user", "content": "be <image>"}]}, "'<image>'"),
        (TEXT, {"prompt": "be", "stop": "x" * 1001}, "at most 1000 characters"),
        (TEXT, {"prompt": "be", "stop": ["x"] * 65}, "at most 64"),
        (TEXT, {"prompt": "be", "stop_token_ids": [1] * 65}, "at most 64 items"),
    ],
    ids=["text", "ids", "chat", "stop", "many stops", "many ids"],
)
def test_what_a_server_cannot_take_is_a_400(server: Server, path: str, fields: dict[str, Any], message: str) -> None:
    status, content, _ = ask(server, "POST", path, fields)
    assert status == 400, content
    assert message in content["error"]["message"]


def test_a_browser_asks_beforehand_and_reads_the_answer(server: Server) -> None:
    preflight = {
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization,content-type",
    }
    status, _, headers = ask(server, "OPTIONS", CHAT, Origin=ORIGIN, **preflight)
    assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "authorization" in headers["access-control-allow-headers"]
    for fields, expected in (({"prompt": "be", "max_tokens": 1}, 200), ({"prompt": 5}, 400)):
        status, _, headers = ask(server, "POST", TEXT, fields, Origin=ORIGIN)
        assert (status, headers["access-control-allow-origin"]) == (expected, ORIGIN)
    _, _, headers = ask(server, "OPTIONS", CHAT, Origin="https://other.example.org", **preflight)
    assert "access-control-allow-origin" not in headers
