"""Prometheus metrics of the proxy."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class ProxyMetrics:
    """The proxy's metrics; `num_waiting` and `num_conversations` are called on each scrape."""

    def __init__(self, num_waiting: Callable[[], int], num_conversations: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "spec_stack_requests",
            "Requests by how they ended (ok: upstream answered, cancelled, refused, failed)",
            ["outcome"],
            registry=registry,
        )
        self.prompts = Counter(
            "spec_stack_prompts",
            "Prompts by what was forwarded (pruned; or the whole: dense, short, long, busy, late, failed, unread)",
            ["outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "spec_stack_prompt_tokens",
            "Prompt tokens by the draft's tokenizer (all, kept, restored)",
            ["part"],
            registry=registry,
        )
        self.wait_s = Histogram("spec_stack_wait_seconds", "From a prompt's arrival to its scoring", registry=registry)
        self.scoring_s = Histogram("spec_stack_scoring_seconds", "Scoring and pruning of a prompt", registry=registry)
        Gauge("spec_stack_prompts_waiting", "Prompts waiting to be scored", registry=registry).set_function(num_waiting)
        Gauge("spec_stack_sessions", "Conversations kept", registry=registry).set_function(num_conversations)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        exposed: bytes = generate_latest(self._registry)
        return exposed
