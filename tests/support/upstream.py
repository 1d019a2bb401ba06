"""A server of OpenAI's API that says nothing new: it records every request, and answers as the header x-behave says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_HEAD = b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m",  "choices":['
_USAGE = b'"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}'
EVENTS = [
    _HEAD + b'{"index":0,"delta":{"role":"assistant","content":"Vi"},"finish_reason":null}]}\n\n',
    b": a comment\n\n" + _HEAD + b'{"index":0,"delta":{"content":"enna \xc3\xa9"},"finish_reason":"stop"}]}\n\n',
    _HEAD + b"]," + _USAGE + b"}\r\n\r\n",
    b"data: [DONE]\n\n",
]
MALFORMED = [b"data: {\n\n", b"event: \xff\x00\r\ndata", b": [DO", b"\n\n\n"]
TOO_MANY = b'{ "error": {"message": "slow down",  "code": "rate_limit_exceeded"}}'


@dataclass(frozen=True)
class ReceivedRequest:
    """A request as it arrived, with names of headers in small letters."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeUpstream:
    """Runs until `stop`, or to the end of its block. says: the answer to a body. left: set when a client has left a
    stream or a response that does not come."""

    seen: list[ReceivedRequest] = field(default_factory=list)
    says: Callable[[Any], str] = field(default=lambda body: "Vienna")
    left: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        upstream = self

        class Handler(_Handler):
            fake = upstream

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: FakeUpstream

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        """Every method is handled alike."""
        if not name.startswith("do_"):
            raise AttributeError(name)
        return self.handle_any

    def handle_any(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.fake.seen.append(ReceivedRequest(self.command, self.path, headers, self.body))
        getattr(self, "behave_" + self.headers.get("x-behave", "answer"))()

    def behave_answer(self) -> None:
        try:
            body = json.loads(self.body) if self.body else {}
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            self.send(400, b'{"error": {"message": "not an object"}}')
        elif body.get("stream"):
            self.stream(EVENTS)
        else:
            try:
                self.send(200, json.dumps(_answer(self.path, body, self.fake.says)).encode())
            except BrokenPipeError:
                self.fake.left.set()

    def behave_too_many(self) -> None:
        self.send(429, TOO_MANY, {"Retry-After": "7", "x-ratelimit-remaining": "0"})

    def behave_redirect(self) -> None:
        self.send(307, b"", {"Location": "http://192.0.2.1/other"})

    def behave_cookies(self) -> None:
        self.send(200, b"{}", {"Set-Cookie": "a=1", "set-cookie": "b=2", "Connection": "x-hop", "x-hop": "1"})

    def behave_prune(self) -> None:
        self.send(200, b"{}", {"x-spec-stack-reason": "on: mine", "X-Spec-Stack-Kept-Tokens": "7"})

    def behave_gzip(self) -> None:
        # Bytes that are not gzip at all: nobody on the way may decode them.
        self.send(200, b"not really", {"Content-Encoding": "gzip"})

    def behave_malformed(self) -> None:
        self.stream(MALFORMED)

    def behave_die_first(self) -> None:
        self.close_connection = True

    def behave_nonsense(self) -> None:
        self.wfile.write(b"NONSENSE\r\n\r\n")
        self.close_connection = True

    def behave_die_in_stream(self) -> None:
        self.begin_stream()
        self.chunk(EVENTS[0])
        self.close_connection = True

    def behave_die_in_body(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"id": ')
        self.close_connection = True

    def behave_hang(self) -> None:
        self.wait_until_left()

    def behave_hang_in_stream(self) -> None:
        self.begin_stream()
        self.chunk(EVENTS[0])
        self.wait_until_left()

    def wait_until_left(self) -> None:
        """Send nothing until the client closes the connection or `released` is set."""
        self.connection.settimeout(0.02)
        while not self.fake.released.is_set():
            try:
                if not self.connection.recv(1):
                    self.fake.left.set()
                    break
            except TimeoutError:
                continue
            except OSError:
                self.fake.left.set()
                break
        self.close_connection = True

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def stream(self, parts: list[bytes]) -> None:
        self.begin_stream()
        for part in parts:
            self.chunk(part)
        self.wfile.write(b"0\r\n\r\n")

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, part: bytes) -> None:
        self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


def _answer(path: str, body: dict[str, Any], says: Callable[[Any], str]) -> dict[str, Any]:
    """The shortest answer that OpenAI's client takes for one."""
    if path.startswith("/v1/models"):
        return {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x"}]}
    if path.startswith("/v1/embeddings"):
        return {"object": "list", "model": "m", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}]}
    usage = {"prompt_tokens": len(json.dumps(body)) // 4, "completion_tokens": 1, "total_tokens": 1}
    said = says(body)
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "text": said}
    if "messages" in body:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
