"""Reports in a reply, a stream's last chunk and /metrics. Runs in the process that writes replies; no SGLang here."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from spec_stack.sglang.guards import harmless

# Responses are built right after their reply has ended.
_MOST_REPORTS = 4096
_GAMMA_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
_SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class ReplyInfo:
    """One reply's report, put together from what came with its tokens (see `request_state.attach`)."""

    def __init__(self) -> None:
        self._report: dict[str, Any] | None = None
        self._gammas: list[int] = []
        self._accepted: list[int] = []
        self._known: list[list[Any]] = []

    @property
    def num_prompt_tokens(self) -> int | None:
        """The prompt's true length; None where no report has come."""
        return None if self._report is None else int(self._report["num_prompt_tokens"])

    def add(self, carried: Sequence[Any]) -> None:
        """Take in what came with the next tokens."""
        for item in carried:
            if isinstance(item, Mapping):
                self._report = dict(item)
            elif item is not None:
                gamma, num_accepted, *known = item
                self._gammas.append(gamma)
                self._accepted.append(num_accepted)
                if known:
                    self._known.append(known)

    def meta_info(self, is_finished: bool) -> dict[str, Any] | None:
        """The report with the steps so far, at the end with every step's gamma, how many of it were accepted, and the
        draft's signals where the request asked for them; None where none has come. It has no steps where it has no
        policy: they are another's."""
        if self._report is None:
            return None
        if "policy" not in self._report:
            return dict(self._report)
        steps: dict[str, Any] = (
            {"gamma_trace": list(self._gammas), "accepted_trace": list(self._accepted)} if is_finished else {}
        )
        if is_finished and self._known:
            names = ("lag_trace", "confidence_trace", "entropy_trace")
            steps |= {name: [known[at] for known in self._known] for at, name in enumerate(names)}
        return {**self._report, "num_proposed": sum(self._gammas), "num_accepted": sum(self._accepted), **steps}


def correct_acceptance(meta_info: dict[str, Any], report: Mapping[str, Any]) -> None:
    """Put right what SGLang computes from the widest gamma alone. Mutates meta_info."""
    if "num_proposed" not in report:
        return
    num_proposed, num_accepted = report["num_proposed"], report["num_accepted"]
    meta_info["spec_num_proposed_drafts"] = num_proposed
    meta_info["spec_num_correct_drafts"] = num_accepted
    meta_info["spec_accept_rate"] = num_accepted / num_proposed if num_proposed else 0.0
    # SGLang's divides the tokens handed out, of which a stop or a limit may have cut some off.
    meta_info["spec_accept_length"] = vllm_metrics(report)["speculative_decoding"]["mean_acceptance_length"]


def vllm_metrics(report: Mapping[str, Any]) -> dict[str, Any]:
    """The final report in the shape of vLLM's per-request metrics, which benchmark clients read.

    Parameters
    ----------
    report
        With its gamma_trace and accepted_trace, if it has steps.

    Returns
    -------
    dict
        Empty without steps. acceptance_histogram[n] counts the steps with n accepted tokens; mean_acceptance_length has
        the target's own token of each step in it.
    """
    if "gamma_trace" not in report:
        return {}
    accepted, num_steps = report["accepted_trace"], len(report["gamma_trace"])
    num_proposed, num_accepted = report["num_proposed"], report["num_accepted"]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 1.0,
            "draft_acceptance_rate": num_accepted / num_proposed if num_proposed else 0.0,
            "acceptance_histogram": [accepted.count(n) for n in range(max(accepted, default=-1) + 1)],
            "num_spec_steps": num_steps,
            "num_draft_tokens": num_proposed,
            "num_accepted_draft_tokens": num_accepted,
            "num_spec_tokens": max(report["gamma_trace"], default=0),
        }
    }


class ReplyBooks:
    """The replies that have ended: the sums of all, and the newest ones' reports, by request id.

    model_name: the label of the metrics; None keeps no sums.
    """

    def __init__(self, model_name: str | None) -> None:
        self._metrics = None if model_name is None else ReplyMetrics(model_name)
        self._reports: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    def close(self, meta_info: Mapping[str, Any], report: Mapping[str, Any], *, is_counted: bool) -> None:
        """Take in a reply's final report. is_counted: whether it belongs to the sums."""
        self._reports[str(meta_info["id"])] = report
        if len(self._reports) > _MOST_REPORTS:
            self._reports.popitem(last=False)
        if self._metrics is not None and is_counted:
            self._metrics.observe(report, int(meta_info.get("cached_tokens", 0)))

    def report_of(self, request_id: object) -> Mapping[str, Any] | None:
        return self._reports.get(str(request_id))


async def with_report(stream: AsyncIterator[Any], books: Callable[[], ReplyBooks]) -> AsyncIterator[Any]:
    """An OpenAI stream's events, the usage chunk with the report of the reply whose id it bears.

    That chunk comes last, and only where the client asked for it (stream_options.include_usage). Of several replies
    in one stream it bears the id of one.
    """
    async for event in stream:
        # Every other chunk has a choice in it, and most of a stream's cost is in its chunks.
        if not isinstance(event, str) or '"choices":[]' not in event or '"usage":{' not in event:
            yield event
            continue
        reported = event
        with harmless("writing a report", "the reply has none"):
            name, _, data = event.strip().partition(" ")
            chunk = json.loads(data) if name == "data:" else {}
            report = books().report_of(chunk.get("id"))
            if report is not None:
                reported = f"data: {json.dumps(chunk | _shown(report))}\n\n"
        yield reported


def reported_completion(response: Any, books: ReplyBooks) -> Any:
    """A completion as plain values, the report beside its text; as it was, where there is none."""
    report = books.report_of(response.id)
    if report is None:
        return response
    return response.model_dump(mode="json") | _shown(report)


def _shown(report: Mapping[str, Any]) -> dict[str, Any]:
    metrics = vllm_metrics(report)
    return {"spec_stack": dict(report), **({"metrics": metrics} if metrics else {})}


class ReplyMetrics:
    """This project's Prometheus metrics, over all finished replies of a server. One per process, beside SGLang's own.

    Every one is the sum (or histogram) of the replies' reports, so that the two can be held against each other.
    """

    def __init__(self, model_name: str) -> None:
        # SGLang sets the directory that its processes share before anything of this may be imported.
        from prometheus_client import Counter, Histogram

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"spec_stack:{name}", text, ["model_name", *labels])

        self._model_name = model_name
        self._requests = counter("requests_total", "finished requests, by what became of the prompt", "outcome")
        self._tokens = {
            "num_prompt_tokens": counter("prompt_tokens_total", "prompt tokens, whole prompts"),
            "num_kept_tokens": counter("kept_tokens_total", "prompt tokens that the target prefilled or had cached"),
            "num_scored_tokens": counter("scored_tokens_total", "prompt tokens that the draft scored"),
            "num_draft_tokens": counter(
                "draft_prefilled_tokens_total", "prompt tokens that the draft prefilled for it"
            ),
            "num_recalled_tokens": counter("recalled_tokens_total", "dropped tokens of earlier turns that came back"),
            "num_protected_tokens": counter("protected_tokens_total", "prompt tokens of system messages and templates"),
            "cached_tokens": counter("cached_tokens_total", "prompt tokens that were in the radix cache"),
            "num_proposed": counter("proposed_tokens_total", "tokens that the draft proposed"),
            "num_accepted": counter("accepted_tokens_total", "proposed tokens that the target accepted"),
        }
        labels = ["model_name"]
        self._gamma = Histogram("spec_stack:gamma", "tokens drafted per step", labels, buckets=_GAMMA_BUCKETS)
        self._scoring = Histogram("spec_stack:scoring_seconds", "scoring of a prompt", labels, buckets=_SECONDS_BUCKETS)

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
