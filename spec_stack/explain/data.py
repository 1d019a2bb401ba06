"""The page of a run as plain data: prompts with what was kept, answers with who wrote what, steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from spec_stack.controller.base import StepRecord

TokenState = Literal["kept", "dropped", "protected", "restored", "cached"]
# How a state is written in the page's data: one letter per token.
STATE_LETTERS: dict[TokenState, str] = {
    "kept": "k",
    "dropped": "d",
    "protected": "p",
    "restored": "r",
    "cached": "c",
}
# What records call the draft model, or say nothing of it.
_DRAFT_NAMES = ("", "draft", "model")


@dataclass(frozen=True)
class WrittenToken:
    """A token of the answer.

    Parameters
    ----------
    text : str
        Its text; empty where only records are at hand.
    step : int
        Index of the step that handed it out.
    writer : str
        "draft" (accepted), "correction", "bonus", "plain" (the target alone), or the name of another proposer.
    """

    text: str
    step: int
    writer: str


@dataclass(frozen=True)
class Step:
    """One step, as the charts show it. Durations in seconds, entropy in bits; see `controller.base.StepRecord`."""

    gamma: int
    num_accepted: int
    num_tokens: int
    draft_s: float
    verify_s: float | None
    controller_s: float
    entropy: list[float]
    confidence: list[float]
    proposer: str
    is_prefill: bool


@dataclass(frozen=True)
class QuerySegment:
    """A segment of the scoring queries: tokens start…stop of the prompt, or behind it those of the look-ahead.

    weight: how much its queries count, from 0 to 1; of a question's words, as much as the one that counts most.
    """

    start: int
    stop: int
    weight: float
    text: str


@dataclass(frozen=True)
class PromptView:
    """A prompt, token by token.

    Parameters
    ----------
    tokens : list of str
        Their texts, N of them.
    states : str
        A letter of STATE_LETTERS for each.
    importance : list of float or None
        (N,), as the draft scored them; None where it did not.
    votes : list of float or None
        Per unit (line or chunk), what the selection went by; None where nothing was scored.
    borders : list of int or None
        Where the units begin, and where the last one ends: tokens of the prompt. A session votes on a turn's new text
        by itself, so they need not begin with 0.
    queries : list of QuerySegment
        What scored it, by weight, the largest first; empty where nothing did.
    """

    tokens: list[str]
    states: str
    importance: list[float] | None = None
    votes: list[float] | None = None
    borders: list[int] | None = None
    queries: list[QuerySegment] = field(default_factory=list)


@dataclass(frozen=True)
class TurnView:
    """One request and its answer.

    Parameters
    ----------
    question : str
        What was asked, short, for the heading.
    prompt : PromptView or None
        None where only records are at hand.
    answer : list of WrittenToken
        What was generated.
    steps : list of Step
        In order; the first prefills.
    metrics : dict
        Plain values, as `types.Metrics.as_dict` has them; empty where only records are at hand.
    dense_estimate_s : float or None
        Seconds that dense prefill would take to the first token, by counting; None where it cannot be said.
    """

    question: str
    prompt: PromptView | None
    answer: list[WrittenToken]
    steps: list[Step]
    metrics: dict[str, Any] = field(default_factory=dict)
    dense_estimate_s: float | None = None


@dataclass(frozen=True)
class RunView:
    """A request, or the turns of a session, under one setting."""

    name: str
    turns: list[TurnView]


@dataclass(frozen=True)
class Explanation:
    """Everything that the page shows.

    Parameters
    ----------
    title : str
        Heading.
    about : dict
        What was run with what: shown as rows of name and value.
    runs : list of RunView
        One, or several to be shown side by side.
    """

    title: str
    about: dict[str, str]
    runs: list[RunView]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def writers_of(record: StepRecord) -> list[str]:
    """Who wrote each of a step's tokens, in order, (record.num_tokens,).

    An accepted token is its proposer's: the draft's unless the record names another one; of a proposal that the draft
    and a look-up made together, the looked-up tokens are the last ones. The token behind them is the
    target's: the bonus after a proposal that was accepted whole, else the correction of the first rejected token, and
    "plain" where nothing was proposed.
    """
    proposer = proposer_of(record)
    last = "plain" if not record.gamma else "bonus" if record.num_accepted == record.gamma else "correction"
    drafted, other = (record.num_drafted_accepted, "lookup") if proposer == "model+lookup" else (0, proposer)
    accepted = [*["draft"] * drafted, *[other] * (record.num_accepted - drafted)]
    return [*accepted, last][: record.num_tokens]


def proposer_of(record: StepRecord) -> str:
    """Who proposed in a step: "draft", or another proposer's name, as far as the record says."""
    return "draft" if record.proposer in _DRAFT_NAMES else record.proposer


def step_of(record: StepRecord) -> Step:
    """A record as the charts show it; seconds that are not known (NaN) become None, which JSON can say."""
    return Step(
        gamma=record.gamma,
        num_accepted=record.num_accepted,
        num_tokens=record.num_tokens,
        draft_s=record.draft_s,
        verify_s=record.verify_s if math.isfinite(record.verify_s) else None,
        controller_s=record.controller_s,
        entropy=list(record.signals.entropy),
        confidence=list(record.signals.confidence),
        proposer=proposer_of(record),
        is_prefill=record.is_prefill,
    )


def written(records: Sequence[StepRecord], texts: Sequence[str] | None = None) -> list[WrittenToken]:
    """The tokens of an answer with who wrote each.

    Parameters
    ----------
    records : sequence of StepRecord
        All steps of the request, in order.
    texts : sequence of str, optional
        The text of each token; None leaves them empty.

    Raises
    ------
    ValueError
        Where there is not one text for each token.
    """
    tokens = [(index, writer) for index, record in enumerate(records) for writer in writers_of(record)]
    if texts is None:
        texts = [""] * len(tokens)
    if len(texts) != len(tokens):
        raise ValueError(f"{len(texts)} texts for {len(tokens)} tokens; give the records of the whole answer")
    return [WrittenToken(text, index, writer) for text, (index, writer) in zip(texts, tokens, strict=True)]


def runs_of_records(records: Sequence[StepRecord]) -> list[RunView]:
    """Recorded runs, one request each, with neither prompt nor text: records hold none."""
    by_run: dict[tuple[str, str, str, float], list[StepRecord]] = {}
    for record in records:
        by_run.setdefault((record.request_id, record.policy, record.precision, record.keep_rate), []).append(record)
    runs = []
    for (request_id, policy, precision, keep_rate), own in by_run.items():
        name = f"{request_id} · {policy} · {precision} · keep_rate {keep_rate:.2f}"
        metrics = {
            "keep_rate": keep_rate,
            "policy": policy,
            "num_tokens": sum(record.num_tokens for record in own),
            "num_proposed": sum(record.gamma for record in own),
            "num_accepted": sum(record.num_accepted for record in own),
        }
        turn = TurnView(own[0].task or request_id, None, written(own), [step_of(record) for record in own], metrics)
        runs.append(RunView(name, [turn]))
    return runs
