"""What operators see of the server: readiness, request ids, log lines, and the time limit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from io import StringIO
from threading import Event
from time import monotonic
from typing import Any

import httpx2
import pytest

from spec_stack.http.logs import JsonFormatter, TextFormatter, configure_logging
from spec_stack.serve.config import ServeConfig
from tests.serve.conftest import Server

Start = Callable[..., Server]
Lines = Callable[[int], list[dict[str, Any]]]
CHAT = "/v1/chat/completions"
HTTP = httpx2.Client(timeout=120)
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "temperature": 0}


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The JSON lines, as soon as there are so many of requests; a line is written behind its response."""
    written, logger = StringIO(), logging.getLogger("spec_stack")
    handler, level = logging.StreamHandler(written), logger.level
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)

    def read(num_requests: int) -> list[dict[str, Any]]:
        end = monotonic() + 60
        while written.getvalue().count('"path": ') < num_requests and monotonic() < end:
            Event().wait(0.01)
        return [json.loads(line) for line in written.getvalue().splitlines()]

    yield read
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_server_with_room_in_its_queue_is_ready(start: Start) -> None:
    server = start()
    ready = HTTP.get(f"{server.url}/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})


@pytest.mark.parametrize("given", ["mine-1.2:3_4", "x" * 128])
def test_a_well_formed_id_is_echoed_and_logged(start: Start, lines: Lines, given: str) -> None:
    response = HTTP.post(start().url + CHAT, json=BODY, headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given
    (line,) = [line for line in lines(1) if line.get("path") == CHAT]
    assert (line["request_id"], line["method"], line["status"]) == (given, "POST", 200)
    assert line["reason"] == response.headers["x-spec-stack-reason"]
    assert line["seconds"] > 0
    assert line["message"].startswith(f"POST {CHAT} 200 in ")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", 'a"b'])
def test_another_id_is_replaced_by_one_of_the_servers(start: Start, given: str) -> None:
    url = start().url
    ids = [
        HTTP.get(f"{url}/v1/models", headers=[(b"x-request-id", given.encode())]).headers["x-request-id"]
        for _ in range(2)
    ]
    assert ids[0] != ids[1]
    assert all(len(each) == 16 and int(each, 16) >= 0 for each in ids)


def test_errors_have_ids_and_probes_are_no_lines_of_info(start: Start, lines: Lines) -> None:
    url = start().url
    refused = HTTP.post(url + CHAT, json={"messages": 1})
    assert refused.status_code == 400
    HTTP.get(f"{url}/health")
    HTTP.get(f"{url}/absent%0A?key=secret")
    levels = {line["path"]: (line["level"], line["status"]) for line in lines(3) if "path" in line}
    assert levels == {CHAT: ("info", 400), "/health": ("debug", 200), "/absent%0A": ("info", 404)}
    assert refused.headers["x-request-id"] in {line.get("request_id") for line in lines(3)}


def test_a_request_that_fails_in_the_generating_thread_is_logged_with_its_id(
    start: Start, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(server.worker.sessions, "lend", fail)
    response = HTTP.post(server.url + CHAT, json=BODY, headers={"x-request-id": "failing"})
    assert response.status_code == 500
    (line,) = [line for line in lines(1) if line["level"] == "error"]
    assert (line["request_id"], line["message"]) == ("failing", "a request failed")
    assert "planted" in line["exception"]


def test_an_answer_ends_when_its_time_is_over(start: Start) -> None:
    long = {**BODY, "max_tokens": 64, "ignore_eos": True, "gamma": 0}
    for limit, wanted in ((1e-6, {}), (None, {"max_time": 1e-6}), (1e-6, {"max_time": 100})):
        answer = HTTP.post(start(max_time=limit).url + CHAT, json={**long, **wanted}).json()
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] == "length"


def test_lines_are_text_or_json_from_a_level_on(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        configure_logging("warning", as_json)
        logging.getLogger("spec_stack.http").info("quiet")
        logging.getLogger("uvicorn.error").warning("loud\n%s", "second line")
        said = capsys.readouterr().err
        assert "quiet" not in said
        if as_json:
            assert json.loads(said)["message"] == "loud\nsecond line"
        else:
            assert said.rstrip().endswith("WARNING loud\nsecond line")
    assert "[" not in TextFormatter().format(logging.LogRecord("x", 20, "", 0, "m", None, None))


BAD: dict[str, tuple[Any, ...]] = {
    "port": (-1, 65536, "80", True),
    "max_queued": (0,),
    "max_body_bytes": (True,),
    "max_sessions": (-1,),
    "max_prompt_tokens": (0,),
    "max_time": (0,),
    "api_keys": ("secret", [""]),
    "model_name": ("", " ", 5),
    "cors_origins": ("*", [""], ["chat.example.org"], ["https://chat.example.org/"], [5]),
    "temperature": (-1.0,),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_setting_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        ServeConfig(**{name: value})


def test_a_configuration_listens_on_loopback_and_does_not_show_its_keys() -> None:
    assert ServeConfig().host == "127.0.0.1"
    assert "secret" not in repr(ServeConfig(api_keys=["secret"]))
