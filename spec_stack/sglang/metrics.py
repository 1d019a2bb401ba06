"""Prometheus metrics next to SGLang's own, over finished replies and over a scheduler's work. No SGLang import.

All exist from the launch on. `deploy/` has a dashboard and alerts over them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spec_stack.sglang.decide import OUTCOMES
from spec_stack.sglang.errors import num_failures

if TYPE_CHECKING:
    from spec_stack.sglang.audits import ServerAudits

# Responses are built right after their reply has ended.
_MOST_REPORTS = 4096
_GAMMA_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
_SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_SHARE_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1)
_COUNTED = {
    "num_prompt_tokens": ("prompt_tokens_total", "prompt tokens, whole prompts"),
    "num_kept_tokens": ("kept_tokens_total", "prompt tokens that the target prefilled or had cached"),
    "num_scored_tokens": ("scored_tokens_total", "prompt tokens that the draft scored"),
    "num_draft_tokens": ("draft_prefilled_tokens_total", "prompt tokens that the draft prefilled for it"),
    "num_recalled_tokens": ("recalled_tokens_total", "recalled tokens of earlier turns"),
    "num_protected_tokens": ("protected_tokens_total", "prompt tokens of system messages and templates"),
    "cached_tokens": ("cached_tokens_total", "prompt tokens that were in the radix cache"),
    "num_proposed": ("proposed_tokens_total", "tokens that the draft proposed"),
    "num_accepted": ("accepted_tokens_total", "proposed tokens that the target accepted"),
}
_GAUGES = {
    "num_waiting": ("prompts_to_score", "prompts that wait for their score", "livesum"),
    "oldest_s": ("oldest_prompt_to_score_seconds", "since the first of them arrived", "livemax"),
    "num_tokens": ("draft_pool_tokens", "capacity of the draft's KV pool", "livesum"),
    "num_used": ("draft_pool_used_tokens", "tokens that it holds", "livesum"),
}
_TOTALS = {
    "num_evicted": ("draft_pool_evicted_tokens_total", "tokens of the draft's KV pool that made room for others"),
    "num_failures": ("failures_total", "exceptions of the plugin, each in the scheduler's log"),
}


class ReportStore:
    """Finished replies: the newest reports by request id, and metrics of all.

    model_name: the label of the metrics; None keeps none. audits: of pruned replies, if any.
    """

    audits: ServerAudits | None = None

    def __init__(self, model_name: str | None) -> None:
        self._model_name = model_name
        self._reports: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        if model_name is None:
            return
        outcomes = _metric("Counter", "requests_total", "finished requests, by the outcome of the prompt", ["outcome"])
        self._requests = {outcome: outcomes.labels(model_name, outcome) for outcome in OUTCOMES}
        self._tokens = {name: _metric("Counter", *told).labels(model_name) for name, told in _COUNTED.items()}
        gamma = _metric("Histogram", "gamma", "tokens drafted per step", buckets=_GAMMA_BUCKETS)
        scoring = _metric("Histogram", "scoring_seconds", "scoring of a prompt", buckets=_SECONDS_BUCKETS)
        what = "share of the draft's attention that is dropped, at the last rate tried"
        dropped = _metric("Histogram", "dropped_attention", what, buckets=_SHARE_BUCKETS)
        self._gamma, self._scoring = gamma.labels(model_name), scoring.labels(model_name)
        self._dropped = dropped.labels(model_name)

    def close(self, meta_info: Mapping[str, Any], report: Mapping[str, Any], *, is_counted: bool) -> None:
        """Add a reply's final report. is_counted: it belongs to the metrics."""
        self._reports[str(meta_info["id"])] = report
        if len(self._reports) > _MOST_REPORTS:
            self._reports.popitem(last=False)
        if self._model_name is not None and is_counted:
            self._count(report, int(meta_info.get("cached_tokens", 0)))

    def _count(self, report: Mapping[str, Any], num_cached: int) -> None:
        self._requests[report["outcome"]].inc()
        counts = {"num_proposed": 0, "num_accepted": 0, "cached_tokens": num_cached, **report}
        for name, counted in self._tokens.items():
            counted.inc(counts[name])
        for gamma in report.get("gamma_trace", ()):
            self._gamma.observe(gamma)
        if report["num_scored_tokens"]:
            self._scoring.observe(report["scoring_s"])
        if (dropped := report.get("dropped_attention")) is not None:
            self._dropped.observe(dropped)

    def report_of(self, request_id: object) -> Mapping[str, Any] | None:
        return self._reports.get(str(request_id))


class SchedulerMetrics:
    """What waits in a scheduler, and its draft's pool."""

    def __init__(self, model_name: str) -> None:
        self._gauges = {
            name: _metric("Gauge", given, text, multiprocess_mode=mode).labels(model_name)
            for name, (given, text, mode) in _GAUGES.items()
        }
        self._totals = {name: _metric("Counter", *told).labels(model_name) for name, told in _TOTALS.items()}
        self._told: dict[str, float] = {}

    def tell(self, num_waiting: int, oldest_s: float, pool: Mapping[str, int]) -> None:
        """Set all, once a round. pool: as `DraftPrefixes.state`."""
        now: dict[str, float] = {**pool, "num_waiting": num_waiting, "oldest_s": oldest_s}
        now["num_failures"] = sum(num_failures().values())
        for name in [name for name in now if now[name] != self._told.get(name)]:
            if name in self._gauges:
                self._gauges[name].set(now[name])
            if name in self._totals:
                self._totals[name].inc(now[name] - self._told.get(name, 0))
        self._told = now


def _metric(kind: str, name: str, text: str, labels: Sequence[str] = (), **options: Any) -> Any:
    # SGLang must set the shared directory before this is imported.
    import prometheus_client

    return getattr(prometheus_client, kind)(f"spec_stack:{name}", text, ["model_name", *labels], **options)
