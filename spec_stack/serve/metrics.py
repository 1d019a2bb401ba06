"""Prometheus metrics of the server."""

from __future__ import annotations

from collections.abc import Callable

from spec_stack.serve.http import AppMetrics
from spec_stack.types import Metrics


class ServerMetrics(AppMetrics):
    """A server's metrics; the three functions are called on each scrape."""

    def __init__(
        self, num_waiting: Callable[[], int], num_running: Callable[[], int], num_sessions: Callable[[], int]
    ) -> None:
        super().__init__("ok, cancelled, refused, failed")
        self.gauge("requests_running", "Requests being answered", num_running)
        self.gauge("requests_waiting", "Requests in the queue", num_waiting)
        self.gauge("sessions", "Conversations kept", num_sessions)
        self._ttft_s = self.histogram("ttft_seconds", "From the first work to the first token")
        self._prompt_tokens = self.counter("prompt_tokens", "Prompt tokens (all, cached, kept, recalled)", ["part"])
        self._tokens = self.counter("generated_tokens", "Tokens generated")
        self._steps = self.counter("steps", "Forwards of the target")
        self._drafted = self.counter("drafted_tokens", "Tokens drafted")
        self._accepted = self.counter("accepted_tokens", "Drafted tokens accepted")

    def add(self, metrics: Metrics) -> None:
        """Count one answer."""
        self._ttft_s.observe(metrics.ttft_s)
        self._prompt_tokens.labels("all").inc(metrics.num_prompt_tokens)
        self._prompt_tokens.labels("cached").inc(metrics.num_cached_tokens)
        self._prompt_tokens.labels("kept").inc(metrics.num_kept_tokens)
        self._prompt_tokens.labels("recalled").inc(metrics.num_recalled_tokens)
        self._tokens.inc(metrics.num_tokens)
        self._steps.inc(metrics.num_steps)
        self._drafted.inc(metrics.num_proposed)
        self._accepted.inc(metrics.num_accepted)
