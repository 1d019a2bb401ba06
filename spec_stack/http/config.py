"""The configuration that serve and the proxy share, with every default and meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from spec_stack.settings.checks import check_fields, require
from spec_stack.settings.options import option

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """What serve and the proxy share: address, queue, log lines, and audits of pruned requests."""

    host: str = option("127.0.0.1", "address to listen on; the default accepts connections from the same machine only")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least level of the lines on standard error; a request is a line of info"
    )
    log_json: bool = option(False, "log a JSON object a line, with the request's id")
    max_queued: int = option(
        64, "most waiting requests; serve rejects more (429), the proxy forwards them whole", least=1
    )
    max_queued_per_client: int = option(16, "of those, how many of one client", least=1)
    shutdown_s: float = option(10.0, "seconds that running requests have after SIGTERM")
    audit_rate: float = option(
        0.0,
        "share of pruned requests that are answered again from the whole and from the pruned prompt, while no client "
        "waits; a proxy uses the client's credentials. 0 audits nothing",
    )
    audit_max_loss: float | None = option(
        None,
        "share of lost answers of a route over which its prompts are forwarded whole, by the lower 95 % bound of its "
        "latest 20 audits, until they find less; a request's own keep rate holds. None reports alone",
    )
    audit_idle_s: float = option(0.5, "seconds without a request before an audit begins")
    max_audits: int = option(16, "most requests that wait for an audit; the oldest gives way", least=1)

    def check_server(self) -> None:
        """Raise ValueError for bad values."""
        check_fields(self)
        require(0 <= self.shutdown_s < math.inf, f"shutdown_s must be 0 or more, got {self.shutdown_s!r}")
        for name in ("audit_rate", "audit_max_loss"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 1, f"{name} must be a share, 0 to 1, got {value!r}")
        self.require_positive("audit_idle_s")
        has_audits = self.audit_max_loss is None or self.audit_rate > 0
        require(has_audits, "audit_max_loss needs audits; give an audit_rate over 0")

    def require_positive(self, *names: str) -> None:
        """Require durations over 0, or None."""
        for name in names:
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, f"{name} must be over 0, got {value!r}")
