"""Requests and responses pass as they are, whatever the upstream server and the client do."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import openai
import pytest

from spec_stack.proxy.config import ProxyConfig
from tests.proxy.conftest import Start
from tests.proxy.test_pruning import CHAT, LONG, post, reason
from tests.support.ports import free_port
from tests.support.running_app import until
from tests.support.upstream import EVENTS, MALFORMED, TOO_MANY, FakeUpstream

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def test_streams_pass_byte_by_byte(start: Start) -> None:
    url = start().url
    for body in ({**HELLO, "stream": True}, {"messages": LONG, "stream": True}):
        response = post(url, CHAT, body)
        assert response.content == b"".join(EVENTS)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert post(url, CHAT, HELLO, **{"x-behave": "malformed"}).content == b"".join(MALFORMED)


def test_the_first_event_does_not_wait_for_the_second(start: Start) -> None:
    with httpx2.stream(
        "POST", start().url + CHAT, json=HELLO, headers={"x-behave": "hang_in_stream"}, timeout=60
    ) as response:
        assert next(response.iter_raw()) == EVENTS[0]


def test_errors_redirects_cookies_and_encodings_pass_untouched(start: Start, upstream: FakeUpstream) -> None:
    proxy = start()
    response = post(proxy.url, CHAT, {"messages": LONG}, **{"x-behave": "too_many"})
    assert (response.status_code, response.content) == (429, TOO_MANY)
    assert (response.headers["retry-after"], response.headers["x-ratelimit-remaining"]) == ("7", "0")
    with pytest.raises(openai.RateLimitError, match="slow down"):
        proxy.client().chat.completions.create(model="m", messages=LONG, extra_headers={"x-behave": "too_many"})
    response = post(proxy.url, CHAT, HELLO, **{"x-behave": "redirect"})
    assert (response.status_code, response.headers["location"]) == (307, "http://192.0.2.1/other")
    response = post(proxy.url, CHAT, HELLO, **{"x-behave": "cookies"})
    assert response.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "x-hop" not in response.headers
    assert "cookie" not in post(proxy.url, CHAT, HELLO).request.headers
    assert "cookie" not in upstream.seen[-1].headers
    with httpx2.stream("POST", proxy.url + CHAT, json=HELLO, headers={"x-behave": "gzip"}) as response:
        assert b"".join(response.iter_raw()) == b"not really"
        assert response.headers["content-encoding"] == "gzip"
    assert post(proxy.url, CHAT, b"[]").status_code == 400


@pytest.mark.parametrize("behave", ["die_in_stream", "die_in_body"])
def test_a_response_that_is_cut_is_cut_for_the_client(start: Start, behave: str) -> None:
    url = start().url
    with httpx2.stream("POST", url + CHAT, json=HELLO, headers={"x-behave": behave}) as response:
        assert response.status_code == 200
        parts = response.iter_raw()
        assert next(parts) in (EVENTS[0], b'{"id": ')
        with pytest.raises(httpx2.RemoteProtocolError):
            next(parts)
    assert post(url, CHAT, HELLO).status_code == 200


def test_without_a_response_it_is_502_or_504(start: Start, upstream: FakeUpstream) -> None:
    url = start(timeout_s=0.5).url
    for behave, status in (("die_first", 502), ("nonsense", 502), ("hang", 504)):
        response = post(url, CHAT, {"messages": LONG}, **{"x-behave": behave})
        assert response.status_code == status
        assert response.json()["error"]["type"] == "server_error"
        assert reason(response).startswith("on: ")
    with httpx2.stream("POST", url + CHAT, json=HELLO, headers={"x-behave": "hang_in_stream"}, timeout=60) as response:
        parts = response.iter_raw()
        assert next(parts) == EVENTS[0]
        with pytest.raises(httpx2.RemoteProtocolError):
            next(parts)
    response = post(start(f"http://127.0.0.1:{free_port()}").url, CHAT, HELLO)
    assert (response.status_code, response.json()["error"]["code"]) == (502, 502)


def test_it_is_alive_before_it_is_ready(start: Start) -> None:
    assert httpx2.get(f"{start().url}/ready").status_code == 200
    url = start(f"http://127.0.0.1:{free_port()}").url
    assert httpx2.get(f"{url}/health").status_code == 200
    ready = httpx2.get(f"{url}/ready", timeout=60)
    assert ready.status_code == 503
    assert ready.json()["status"].startswith("upstream does not answer: ConnectError")


def test_the_requests_id_is_passed_on_and_comes_back(start: Start, upstream: FakeUpstream) -> None:
    url = start().url
    for given in ("mine", "not well formed"):
        response = post(url, CHAT, HELLO, **{"x-request-id": given})
        sent = upstream.seen[-1].headers["x-request-id"]
        assert sent == response.headers["x-request-id"]
        assert (sent == given) == (given == "mine")


@pytest.mark.parametrize("behave", ["hang", "hang_in_stream"])
def test_a_client_that_leaves_ends_the_upstream_request(start: Start, upstream: FakeUpstream, behave: str) -> None:
    with socket.create_connection(("127.0.0.1", start().port), timeout=30) as client:
        body = json.dumps(HELLO).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nx-behave: {behave}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: len(upstream.seen) == 1)
        if behave == "hang_in_stream":
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert upstream.left.wait(30)


def test_no_path_leads_elsewhere(start: Start, upstream: FakeUpstream) -> None:
    with FakeUpstream() as other:
        proxy = start(f"{upstream.url}/base/v1/")
        host = other.url.removeprefix("http://")
        for target, arrives in (
            (f"{other.url}/x", None),
            ("/v1/models", "/base/v1/models"),
            (f"//{host}/x", f"/base//{host}/x"),
            (f"/@{host}/x?a=b@{host}", f"/base/@{host}/x?a=b@{host}"),
            ("/../admin", None),
            ("/v1/%2e%2e/%2E%2e/admin", None),
            ("/v1/..\\admin", None),
        ):
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
                client.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status = int(client.makefile("rb").readline().split()[1])
            assert status in ((400, 404) if arrives is None else (200,)), target
            if arrives is not None:
                assert upstream.seen[-1].path == arrives
        assert len(upstream.seen) == 3
        assert not other.seen


def test_a_long_body_is_refused(start: Start, upstream: FakeUpstream) -> None:
    response = post(start(max_body_bytes=1000).url, CHAT, {"messages": LONG})
    assert (response.status_code, response.json()["error"]["type"]) == (413, "invalid_request_error")
    assert not upstream.seen


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "must be the URL of a server"),
        ("ftp://host", "must be the URL"),
        ("http://host:99999", "must be the URL"),
        ("http://host/v1?key=1", "must be the URL"),
        ("http://ho st", "must be the URL"),
        ("http://me:secret@host", "password"),
        ("http://localhost:8001/v1", "is the proxy itself"),
    ],
)
def test_a_wrong_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProxyConfig(url)


def test_the_default_port_of_a_scheme_counts_for_the_proxy_itself() -> None:
    with pytest.raises(ValueError, match="is the proxy itself"):
        ProxyConfig("http://localhost", port=80)


@pytest.mark.parametrize(
    "wrong", [{"deadline_s": 0}, {"timeout_s": "1"}, {"max_queued": 0}, {"port": -1}, {"marker": 3}, {"recall": 1}]
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ProxyConfig("http://host", **wrong)


REFUSAL = b'HTTP/1.1 401 Unauthorized\r\nContent-Length: 13\r\nConnection: close\r\n\r\n{"error":"x"}'


class Refusing:
    """A server that answers after the first bytes of a body, as Go's: it then ends its own side, and soon all."""

    def __init__(self, answer: bytes, context: ssl.SSLContext | None = None) -> None:
        self._answer, self._context = answer, context
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                connection = self._socket.accept()[0]
                if self._context is not None:
                    connection = self._context.wrap_socket(connection, server_side=True)
            except OSError:
                # Closed, or a client that does not trust the certificate.
                continue
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(self._answer)
                if self._context is None:
                    connection.shutdown(socket.SHUT_WR)
                Event().wait(0.3)

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (REFUSAL, 401),
        (REFUSAL.replace(b"401 Unauthorized", b"413 Content Too Large"), 413),
        (REFUSAL.replace(b"401 Unauthorized", b"429 Too Many Requests"), 429),
        (REFUSAL.replace(b"401 Unauthorized", b"503 Unavailable"), 503),
    ],
)
def test_a_refusal_before_the_end_of_the_body_is_passed_on(start: Start, answer: bytes, status: int) -> None:
    with Refusing(answer) as server:
        url = start(f"http://127.0.0.1:{server.port}").url
        for num_bytes in (100, 1_000_000, 12_000_000):
            response = post(url, CHAT, {"messages": [{"role": "user", "content": "x" * num_bytes}]})
            assert (response.status_code, response.content) == (status, b'{"error":"x"}')


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a private authority, ca.pem, and a server's certificate for 127.0.0.1 of it, server.pem."""
    folder = tmp_path_factory.mktemp("authority")
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    new = "-newkey rsa:2048 -nodes -subj /CN=Test"
    for line in (
        f"req -x509 {new} -keyout ca.key -out ca.pem -days 3 -addext basicConstraints=critical,CA:TRUE",
        f"req {new} -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out only.pem -days 3 -extfile names",
    ):
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)
    (folder / "server.pem").write_text((folder / "server.key").read_text() + (folder / "only.pem").read_text())
    named = subprocess.run(
        ["openssl", "x509", "-hash", "-noout", "-in", "ca.pem"], cwd=folder, check=True, capture_output=True, text=True
    )
    (folder / "hashed").mkdir()
    shutil.copy(folder / "ca.pem", folder / "hashed" / f"{named.stdout.strip()}.0")
    return folder


@pytest.mark.parametrize(
    ("option", "variable", "name"),
    [
        ({}, "SSL_CERT_FILE", "ca.pem"),
        ({}, "SSL_CERT_DIR", "hashed"),
        ({"ca_file": "ca.pem"}, "", ""),
        ({"ca_file": "hashed"}, "", ""),
    ],
)
def test_a_private_authority_is_trusted_where_it_is_named(
    start: Start, authority: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, str], variable: str, name: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.pem")
    with Refusing(REFUSAL, context) as server:
        url = f"https://127.0.0.1:{server.port}"
        assert post(start(url).url, CHAT, HELLO).status_code == 502
        if variable:
            monkeypatch.setenv(variable, str(authority / name))
        proxy = start(url, **{key: str(authority / value) for key, value in option.items()})
        for num_bytes in (100, 12_000_000):
            response = post(proxy.url, CHAT, {"messages": [{"role": "user", "content": "x" * num_bytes}]})
            assert (response.status_code, response.content) == (401, b'{"error":"x"}')


def test_the_way_to_upstream_may_lead_through_a_proxy(
    start: Start, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = "http://far.invalid"
    assert post(start(f"{far}/base/v1", outgoing_proxy=upstream.url).url, CHAT, HELLO).status_code == 200
    assert upstream.seen[-1].path == f"{far}/base{CHAT}"
    # Set only while the proxies begin: the client of these tests reads them too.
    with monkeypatch.context() as environment:
        environment.setenv("HTTP_PROXY", upstream.url.replace("//", "//me:secret@"))
        found, without, near = start(far), start(far, outgoing_proxy="none"), start()
        environment.setenv("NO_PROXY", "far.invalid")
        excepted = start(far)
    assert post(found.url, CHAT, HELLO).status_code == 200
    assert upstream.seen[-1].headers["proxy-authorization"].startswith("Basic ")
    num_seen = len(upstream.seen)
    assert post(without.url, CHAT, HELLO).status_code == post(excepted.url, CHAT, HELLO).status_code == 502
    assert len(upstream.seen) == num_seen
    # A server on this machine is reached straight.
    assert post(near.url, CHAT, HELLO).status_code == 200
    assert upstream.seen[-1].path == CHAT
    with pytest.raises(ValueError, match="HTTP proxy"):
        start(far, outgoing_proxy="socks5://127.0.0.1:1")
