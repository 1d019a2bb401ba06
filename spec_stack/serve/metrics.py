"""Prometheus metrics of the server."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spec_stack.types import Metrics


class ServerMetrics:
    """A server's metrics; `num_waiting` and `num_sessions` are called on each scrape."""

    def __init__(self, num_waiting: Callable[[], int], num_sessions: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "spec_stack_requests",
            "Requests by how they ended (ok, cancelled, refused, failed)",
            ["outcome"],
            registry=registry,
        )
        self.running = Gauge("spec_stack_requests_running", "Requests being answered", registry=registry)
        Gauge("spec_stack_requests_waiting", "Requests in the queue", registry=registry).set_function(num_waiting)
        Gauge("spec_stack_sessions", "Conversations kept", registry=registry).set_function(num_sessions)
        self.wait_s = Histogram("spec_stack_wait_seconds", "From a request to its first work", registry=registry)
        self._ttft_s = Histogram("spec_stack_ttft_seconds", "From the first work to the first token", registry=registry)
        self._prompt_tokens = Counter(
            "spec_stack_prompt_tokens", "Prompt tokens (all, cached, kept, restored)", ["part"], registry=registry
        )
        self._tokens = Counter("spec_stack_generated_tokens", "Tokens generated", registry=registry)
        self._steps = Counter("spec_stack_steps", "Forwards of the target", registry=registry)
        self._drafted = Counter("spec_stack_drafted_tokens", "Tokens drafted", registry=registry)
        self._accepted = Counter("spec_stack_accepted_tokens", "Drafted tokens accepted", registry=registry)

    def add(self, metrics: Metrics) -> None:
        """Count one answer."""
        self._ttft_s.observe(metrics.ttft_s)
        self._prompt_tokens.labels("all").inc(metrics.num_prompt_tokens)
        self._prompt_tokens.labels("cached").inc(metrics.num_cached_tokens)
        self._prompt_tokens.labels("kept").inc(metrics.num_kept_tokens)
        self._prompt_tokens.labels("restored").inc(metrics.num_restored_tokens)
        self._tokens.inc(metrics.num_tokens)
        self._steps.inc(metrics.num_steps)
        self._drafted.inc(metrics.num_proposed)
        self._accepted.inc(metrics.num_accepted)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        exposed: bytes = generate_latest(self._registry)
        return exposed
