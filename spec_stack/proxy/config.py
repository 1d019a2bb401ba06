"""The proxy's configuration, with every default and meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from spec_stack.http.config import LOOPBACK, MAX_PORT, HttpConfig
from spec_stack.settings.checks import require
from spec_stack.settings.options import documented, option

_DEFAULT_PORTS = {"http": 80, "https": 443}
PRUNED = {"/chat/completions": "messages", "/completions": "prompt", "/messages": "messages", "/responses": "input"}
"""The field that holds the prompt, by the end of the path: base URLs differ."""


@documented
@dataclass(frozen=True)
class ProxyConfig(HttpConfig):
    """An OpenAI-compatible proxy that prunes prompts before an upstream server."""

    upstream: str = option(
        "", "base URL of the upstream server, as for OpenAI's clients; /v1 may be left out: http://127.0.0.1:8000"
    )
    port: int = option(8001, "port to listen on, 0 to 65535; 0 takes a free one", least=0, most=MAX_PORT)
    marker: str | None = option(None, "text in place of every gap; by default an ellipsis for lines and in sentences")
    recall: bool = option(
        True,
        "recall dropped text that a later turn needs, at its place; upstream's prefix cache hits up to there",
    )
    deadline_s: float = option(
        10.0, "most seconds that scoring may delay a request; after them the whole prompt is forwarded"
    )
    timeout_s: float = option(
        600.0, "seconds without a byte from upstream, after which the answer is 504 or the stream is cut"
    )
    ca_file: str = option(
        "", "file or folder with further certificate authorities for upstream; SSL_CERT_FILE and SSL_CERT_DIR are read"
    )
    outgoing_proxy: str = option(
        "env", "URL of an HTTP proxy on the way to upstream, 'none', or 'env': HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
    )
    max_body_bytes: int = option(32 << 20, "longest body of a request (413)", least=1)
    max_parsed_bytes: int = option(
        4 << 20, "longest body that is parsed for pruning; longer ones are forwarded whole", least=1
    )
    max_conversations: int = option(
        8,
        "conversations whose draft cache is kept, least recently used evicted first; others are scored again",
        least=0,
    )
    max_cached_tokens: int = option(65_536, "tokens in the draft's caches of all conversations; likewise", least=1)
    max_connections: int = option(1024, "most open connections; more are rejected (503)", least=1)

    def __post_init__(self) -> None:
        _check_url(self.upstream)
        for name in ("marker", "ca_file", "outgoing_proxy"):
            value = getattr(self, name)
            require(
                isinstance(value, str) or (name, value) == ("marker", None), f"{name} must be a string, got {value!r}"
            )
        self.check_server()
        self.require_positive("deadline_s", "timeout_s")
        parts = urlsplit(self.upstream)
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
        is_itself = port == self.port and {parts.hostname, self.host} <= {*LOOPBACK, "0.0.0.0", "::"}
        require(not is_itself, f"upstream {self.upstream} is the proxy itself; give it another --port")

    @property
    def base_url(self) -> str:
        """The upstream URL in front of /v1."""
        return self.upstream.rstrip("/").removesuffix("/v1")

    @property
    def names_version(self) -> bool:
        """Whether the upstream URL holds another version than /v1 at its end, which stands for a client's /v1."""
        return re.search(r"/v\d\w*(/|$)", urlsplit(self.base_url).path) is not None


def _check_url(url: object) -> None:
    """Raise ValueError unless this is the URL of a server."""
    wanted = f"upstream must be the URL of a server, such as http://127.0.0.1:8000 or https://host/v1, got {url!r}"
    require(isinstance(url, str) and url.isprintable() and " " not in url, wanted)
    try:
        parts = urlsplit(str(url))
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ValueError(wanted) from error
    bare = str(url).partition("?")[0].rstrip("/")
    if end := next((each for each in (*PRUNED, "/models", "/embeddings") if bare.endswith(each)), None):
        raise ValueError(f"upstream must be the base URL, as for OpenAI's clients: write {bare.removesuffix(end)}")
    require(is_server and not (parts.query or parts.fragment), wanted)
    require(parts.username is None, "upstream must not hold a password; clients send their own Authorization header")
