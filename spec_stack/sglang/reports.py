"""Reports in replies, stream ends and /metrics, in the tokenizer's process. No SGLang import."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from spec_stack.sglang.errors import log_and_continue
from spec_stack.sglang.request_state import META_INFO

# Responses are built right after their reply has ended.
_MOST_REPORTS = 4096
_GAMMA_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
_SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
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


class ReportAssembler:
    """One reply's report, assembled from its tokens' customized_info (see `request_state.attach`)."""

    def __init__(self) -> None:
        self._report: dict[str, Any] | None = None
        self._gammas: list[int] = []
        self._accepted: list[int] = []

    def add(self, carried: Sequence[Any]) -> None:
        """Add what came with the next tokens."""
        for item in carried:
            if isinstance(item, Mapping):
                self._report = dict(item)
            elif item is not None:
                gamma, num_accepted = item
                self._gammas.append(gamma)
                self._accepted.append(num_accepted)

    def meta_info(self, is_finished: bool) -> dict[str, Any] | None:
        """The report with the steps so far, at the end one by one; None without one, no steps without a policy."""
        if self._report is None or "policy" not in self._report:
            return None if self._report is None else dict(self._report)
        counts = {"num_proposed": sum(self._gammas), "num_accepted": sum(self._accepted)}
        steps = {"gamma_trace": list(self._gammas), "accepted_trace": list(self._accepted)} if is_finished else {}
        return {**self._report, **counts, **steps}


def correct_acceptance(meta_info: dict[str, Any], report: Mapping[str, Any]) -> None:
    """Correct what SGLang computes from the widest gamma alone. Mutates meta_info. report: a finished reply's."""
    if "num_proposed" not in report:
        return
    num_proposed, num_accepted = report["num_proposed"], report["num_accepted"]
    num_steps = len(report["gamma_trace"])
    meta_info["spec_num_proposed_drafts"] = num_proposed
    meta_info["spec_num_correct_drafts"] = num_accepted
    meta_info["spec_accept_rate"] = num_accepted / num_proposed if num_proposed else 0.0
    # SGLang divides the output tokens, of which a stop or a limit may have cut some off.
    meta_info["spec_accept_length"] = 1 + num_accepted / num_steps if num_steps else 1.0


class ReportStore:
    """Finished replies: the newest reports by request id, and the sums of all.

    model_name: the label of the metrics; None keeps no sums.
    """

    def __init__(self, model_name: str | None) -> None:
        self._metrics = None if model_name is None else ReplyMetrics(model_name)
        self._reports: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    def close(self, meta_info: Mapping[str, Any], report: Mapping[str, Any], *, is_counted: bool) -> None:
        """Add a reply's final report. is_counted: it belongs to the sums."""
        self._reports[str(meta_info["id"])] = report
        if len(self._reports) > _MOST_REPORTS:
            self._reports.popitem(last=False)
        if self._metrics is not None and is_counted:
            self._metrics.observe(report, int(meta_info.get("cached_tokens", 0)))

    def report_of(self, request_id: object) -> Mapping[str, Any] | None:
        return self._reports.get(str(request_id))


async def with_report(stream: AsyncIterator[Any], books: ReportStore) -> AsyncIterator[Any]:
    """An OpenAI stream with the report in its usage chunk (stream_options.include_usage), the last one.

    Of several replies in one stream that chunk has the id of one.
    """
    async for event in stream:
        # Every other chunk has a choice in it, and most of a stream's cost is in its chunks.
        if not isinstance(event, str) or '"choices":[]' not in event or '"usage":{' not in event:
            yield event
            continue
        reported = event
        with log_and_continue("writing a report", "the reply has none"):
            name, _, data = event.strip().partition(" ")
            chunk = json.loads(data) if name == "data:" else {}
            report = books.report_of(chunk.get("id"))
            if report is not None:
                reported = f"data: {json.dumps(chunk | _shown(report))}\n\n"
        yield reported


def reported_completion(response: Any, books: ReportStore) -> Any:
    """A completion as plain values with the report beside its text; unchanged without one."""
    report = books.report_of(response.id)
    return response if report is None else response.model_dump(mode="json") | _shown(report)


def _shown(report: Mapping[str, Any]) -> dict[str, Any]:
    return {META_INFO: dict(report)}


class ReplyMetrics:
    """Prometheus metrics, summed over all finished replies' reports. One per process, beside SGLang's own."""

    def __init__(self, model_name: str) -> None:
        # SGLang must set the shared directory before prometheus_client is imported.
        from prometheus_client import Counter, Histogram

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"spec_stack:{name}", text, ["model_name", *labels])

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Any:
            return Histogram(f"spec_stack:{name}", text, ["model_name"], buckets=buckets)

        self._model_name = model_name
        self._requests = counter("requests_total", "finished requests, by the outcome of the prompt", "outcome")
        self._tokens = {name: counter(*described) for name, described in _COUNTED.items()}
        self._gamma = histogram("gamma", "tokens drafted per step", _GAMMA_BUCKETS)
        self._scoring = histogram("scoring_seconds", "scoring of a prompt", _SECONDS_BUCKETS)

    def observe(self, report: Mapping[str, Any], num_cached: int) -> None:
        """Count a finished reply; report is its final one."""
        self._requests.labels(self._model_name, report["outcome"]).inc()
        counts = {"num_proposed": 0, "num_accepted": 0, "cached_tokens": num_cached, **report}
        for name, counted in self._tokens.items():
            counted.labels(self._model_name).inc(counts[name])
        for gamma in report.get("gamma_trace", ()):
            self._gamma.labels(self._model_name).observe(gamma)
        if report["num_scored_tokens"]:
            self._scoring.labels(self._model_name).observe(report["scoring_s"])
