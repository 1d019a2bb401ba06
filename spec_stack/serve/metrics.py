"""Prometheus metrics, of the server and of all applications."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from spec_stack.types import Metrics

# Counter, meaning, and the field of an answer's metrics.
_COUNTED = (
    ("generated_tokens", "Tokens generated", "num_tokens"),
    ("steps", "Forwards of the target", "num_steps"),
    ("drafted_tokens", "Tokens drafted", "num_proposed"),
    ("accepted_tokens", "Drafted tokens accepted", "num_accepted"),
)
_PROMPT_PARTS = {
    "all": "num_prompt_tokens",
    "cached": "num_cached_tokens",
    "kept": "num_kept_tokens",
    "recalled": "num_recalled_tokens",
}


class AppMetrics:
    """The metrics that all applications have. outcomes: how a request may end, for the help text."""

    def __init__(self, outcomes: str) -> None:
        self.registry = CollectorRegistry()
        self.requests = self.counter("requests", f"Requests by how they ended ({outcomes})", ["outcome"])
        self.wait_s = self.histogram("wait_seconds", "From a request to its first work")

    def counter(self, name: str, meaning: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"spec_stack_{name}", meaning, labels or [], registry=self.registry)

    def gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """A number that is read on each scrape."""
        Gauge(f"spec_stack_{name}", meaning, registry=self.registry).set_function(value)

    def histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"spec_stack_{name}", meaning, registry=self.registry)


class ServerMetrics(AppMetrics):
    """The server's metrics."""

    def __init__(self) -> None:
        super().__init__("ok, cancelled, refused, failed")
        self._ttft_s = self.histogram("ttft_seconds", "From the first work to the first token")
        self._prompt_tokens = self.counter("prompt_tokens", "Prompt tokens (all, cached, kept, recalled)", ["part"])
        self._counters = {field: self.counter(name, meaning) for name, meaning, field in _COUNTED}

    def add(self, metrics: Metrics) -> None:
        """Count one answer."""
        self._ttft_s.observe(metrics.ttft_s)
        for part, field in _PROMPT_PARTS.items():
            self._prompt_tokens.labels(part).inc(getattr(metrics, field))
        for field, counter in self._counters.items():
            counter.inc(getattr(metrics, field))
