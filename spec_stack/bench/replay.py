"""Greedy counterfactual replay: score any policy on recorded runs, without a predictor.

Greedy decoding of one prompt gives one text, however far the draft runs ahead. So "is the draft right at output
position q" does not depend on gamma, nor do the draft's signals at q; beyond a wrong token at q the draft follows its
own text, which depends on q alone. Runs of the same prompt at several gammas are merged into these facts, and a policy
is then run over them causally: it sees a drafted token's signals once it has drafted it. Exact where the runs
agree; precisions whose rounding depends on the block's length (INT8) let them disagree, and the merge counts how often.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord, chosen_gamma


class Costs(ABC):
    """Seconds of a step that drafts gamma tokens."""

    @abstractmethod
    def draft_s(self, gamma: int) -> float:
        """The draft's forwards; 0.0 at gamma 0."""

    @abstractmethod
    def verify_s(self, gamma: int) -> float:
        """The target's forward over gamma + 1 tokens."""

    def step_s(self, gamma: int) -> float:
        """Both."""
        return self.draft_s(gamma) + self.verify_s(gamma)


@dataclass(frozen=True)
class CostTable(Costs):
    """Seconds measured at some gammas, in rising order; between and beyond them straight lines, never under zero.

    Gamma 0 drafts for nothing. Beyond the ends the line goes through the outermost two, but does not fall with gamma.
    """

    gammas: tuple[int, ...]
    drafts_s: tuple[float, ...]
    verifies_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.gammas) < 2 or not len(self.gammas) == len(self.drafts_s) == len(self.verifies_s):
            raise ValueError(f"give two or more gammas and as many times, got {self}")
        if any(after <= before for before, after in pairwise(self.gammas)):
            raise ValueError(f"gammas must rise, got {self.gammas}")

    def draft_s(self, gamma: int) -> float:
        return self._at(self.drafts_s, gamma) if gamma else 0.0

    def verify_s(self, gamma: int) -> float:
        return self._at(self.verifies_s, gamma)

    def _at(self, times: tuple[float, ...], gamma: int) -> float:
        first = min(max(bisect_right(self.gammas, gamma) - 1, 0), len(self.gammas) - 2)
        slope = (times[first + 1] - times[first]) / (self.gammas[first + 1] - self.gammas[first])
        if not self.gammas[0] <= gamma <= self.gammas[-1]:
            slope = max(slope, 0.0)
            first += gamma > self.gammas[-1]
        return max(times[first] + slope * (gamma - self.gammas[first]), 0.0)


@dataclass(frozen=True)
class ReplayText:
    """One prompt's greedy output, with what is known of it.

    start is where decoding begins (after what the prefill step gave), end where it stops. correct, entropy and
    confidence are by output position from 0 on; tails[q] holds the signals after the wrong token at q. A signal that
    was never recorded is the nearest earlier one. prefill is the prefill step's record, None where no run has it.
    """

    prompt: str
    precision: str
    task: str
    start: int
    end: int
    correct: Sequence[bool]
    entropy: Sequence[float]
    confidence: Sequence[float]
    tails: Mapping[int, DraftSignals]
    prefill: StepRecord | None = None

    def run_length(self, position: int, limit: int) -> int:
        """How many of `limit` tokens drafted from `position` on would be accepted."""
        for length in range(limit):
            if position + length >= len(self.correct) or not self.correct[position + length]:
                return length
        return limit

    def signal(self, position: int, index: int, run_length: int) -> tuple[float, float]:
        """Entropy and confidence of the index-th token drafted from `position` on, run_length of which are right."""
        tail = self.tails.get(position + run_length)
        if index > run_length and tail:
            # It follows a wrong token. Where fewer were recorded there, the last of them stands for the rest.
            at = min(index - run_length, len(tail)) - 1
            return tail.entropy[at], tail.confidence[at]
        at = min(position + min(index, run_length), len(self.entropy) - 1)
        return self.entropy[at], self.confidence[at]


@dataclass(frozen=True)
class Merged:
    """Texts, how many positions were drafted in at least two runs, and at how many all of those agree."""

    texts: list[ReplayText]
    num_shared: int
    num_unanimous: int


@dataclass
class _Facts:
    votes: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    signals: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    tails: dict[int, DraftSignals] = field(default_factory=dict)
    prefill: StepRecord | None = None
    start: int = 0
    end: int = 0
    task: str = ""


_RunKey = tuple[str, str, str, float]


def _run_of(record: StepRecord) -> _RunKey:
    """A run is one request under one policy, precision and keep_rate."""
    return record.request_id, record.policy, record.precision, record.keep_rate


def merge_runs(records: Iterable[StepRecord]) -> Merged:
    """Merge greedy runs of the same request_id, precision and keep_rate into one text each, by majority.

    A position no run drafted takes the text's majority. Raises ValueError for no records, and for a run whose steps
    are not together, complete and in order.
    """
    facts: dict[tuple[str, str, float], _Facts] = {}
    runs: set[_RunKey] = set()
    last: StepRecord | None = None
    position = 0
    for record in records:
        text = facts.setdefault((record.request_id, record.precision, record.keep_rate), _Facts(task=record.task))
        if last is None or _run_of(last) != _run_of(record):
            if _run_of(record) in runs:
                raise ValueError(f"the run {_run_of(record)} appears a second time; keep one per request and policy")
            runs.add(_run_of(record))
            position = 0
        elif record.step != last.step + 1:
            raise ValueError(f"step {record.step} after {last.step} in the run {_run_of(record)}; keep runs in order")
        last = record
        _add_step(text, record, position)
        position += record.num_tokens
        text.end = max(text.end, position)
        if record.is_prefill:
            text.start, text.prefill = position, record
    if not facts:
        raise ValueError("no records to replay")
    shared = unanimous = 0
    texts = []
    for (prompt, precision, _), text in facts.items():
        for votes in text.votes.values():
            shared += len(votes) > 1
            unanimous += len(votes) > 1 and len(set(votes)) == 1
        texts.append(_as_text(prompt, precision, text))
    return Merged(texts, shared, unanimous)


def _add_step(text: _Facts, record: StepRecord, position: int) -> None:
    accepted, signals = record.num_drafted_accepted, record.signals
    if record.num_drafted == 0:
        return
    # What was looked up behind the draft's tokens says nothing of the draft.
    for index in range(min(accepted + 1, record.num_drafted)):
        text.votes[position + index].append(index < accepted)
        text.signals[position + index].append((signals.entropy[index], signals.confidence[index]))
    wrong = position + accepted
    tail = DraftSignals(signals.entropy[accepted + 1 :], signals.confidence[accepted + 1 :])
    if len(tail) > len(text.tails.get(wrong, ())):
        text.tails[wrong] = tail


def _as_text(prompt: str, precision: str, facts: _Facts) -> ReplayText:
    length = max([facts.end, *(position + 1 for position in facts.votes)])
    means = {position: sum(votes) / len(votes) for position, votes in facts.votes.items()}
    fallback = not means or sum(means.values()) / len(means) > 0.5
    known = {position: np.mean(values, axis=0).tolist() for position, values in facts.signals.items()}
    entropy, confidence = [], []
    last = known[min(known)] if known else (0.0, 1.0)
    for position in range(length):
        last = known.get(position, last)
        entropy.append(float(last[0]))
        confidence.append(float(last[1]))
    correct = [means[position] >= 0.5 if position in means else fallback for position in range(length)]
    signals = entropy, confidence, dict(facts.tails)
    return ReplayText(prompt, precision, facts.task, facts.start, facts.end, correct, *signals, facts.prefill)


def fit_costs(records: Iterable[StepRecord], least: int = 20) -> dict[str, Costs]:
    """Costs per precision, from measured decode steps: the mean at every gamma that was taken often.

    Often is `least` times and a tenth of the commonest gamma's; rarer ones are mostly a request's last steps. Stalls
    count, since they are in the seconds of the runs too. Raises ValueError for a precision without two such gammas.
    """
    samples: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if not record.is_prefill:
            samples[record.precision][record.gamma].append((record.draft_s, record.verify_s))
    costs: dict[str, Costs] = {}
    for precision, by_gamma in samples.items():
        often = max(least, max(map(len, by_gamma.values())) / 10)
        gammas = sorted(gamma for gamma, times in by_gamma.items() if len(times) >= often)
        if len(gammas) < 2:
            counts = {gamma: len(times) for gamma, times in sorted(by_gamma.items())}
            raise ValueError(f"{precision}: {counts} steps per gamma; costs need {often:.0f} or more at two gammas")
        means = [np.mean(by_gamma[gamma], axis=0).tolist() for gamma in gammas]
        costs[precision] = CostTable(
            tuple(gammas),
            tuple(float(draft_s) for draft_s, _ in means),
            tuple(float(verify_s) for _, verify_s in means),
        )
    return costs


@dataclass(frozen=True)
class Score:
    """The outcome of a policy on one text. seconds are the steps' by the costs given, without the policy's own
    calls."""

    num_tokens: int
    seconds: float
    gammas: list[int]

    @property
    def num_steps(self) -> int:
        return len(self.gammas)


def replay(text: ReplayText, policy: Policy, costs: Costs, *, max_gamma: int = MAX_GAMMA) -> Score:
    """Run a policy over one text, with these costs for its clock. The policy is mutated: it learns as it would live.

    max_gamma: most tokens in a step.
    """
    position, last = text.start, _prefill_of(text, costs, policy.name)
    # As live: the prefill step is observed, not chosen.
    policy.observe(last)
    gammas: list[int] = []
    seconds = 0.0
    while position < text.end:
        context = StepContext(last.step + 1, text.end - position - 1, last, text.precision, text.task)
        limit, signals = min(chosen_gamma(policy, context), max_gamma), DraftSignals()
        run_length = text.run_length(position, limit)
        while len(signals) < limit:
            signals.append(*text.signal(position, len(signals), run_length))
            if len(signals) < limit and not policy.keep_drafting(context, signals):
                break
        gamma = len(signals)
        accepted = min(run_length, gamma)
        last = StepRecord(
            request_id=text.prompt,
            step=context.step,
            policy=policy.name,
            precision=text.precision,
            task=text.task,
            is_prefill=False,
            keep_rate=last.keep_rate,
            gamma=gamma,
            num_accepted=accepted,
            num_tokens=accepted + 1,
            signals=signals,
            draft_s=costs.draft_s(gamma),
            verify_s=costs.verify_s(gamma),
            policy_s=0.0,
        )
        policy.observe(last)
        seconds += last.draft_s + last.verify_s
        gammas.append(gamma)
        position += accepted + 1
    return Score(position - text.start, seconds, gammas)


def _prefill_of(text: ReplayText, costs: Costs, policy: str) -> StepRecord:
    """The record of the prefill step under a policy; of a plain step where no run has it."""
    if text.prefill is not None:
        # Context lengths are not counted in the steps of a replay, and the cost tables have none.
        return replace(text.prefill, policy=policy, num_target_slots=0, num_draft_slots=0)
    return StepRecord(
        request_id=text.prompt,
        step=0,
        policy=policy,
        precision=text.precision,
        task=text.task,
        is_prefill=True,
        keep_rate=1.0,
        gamma=0,
        num_accepted=0,
        num_tokens=text.start,
        signals=DraftSignals(),
        draft_s=0.0,
        verify_s=costs.verify_s(0),
        policy_s=0.0,
    )


def oracle(text: ReplayText, costs: Costs, *, max_gamma: int = MAX_GAMMA) -> Score:
    """The least time any choice of gammas could take over a text.

    Parameters as in `replay`. By dynamic programming over positions, from the last to the first.
    """
    best: dict[int, tuple[float, int, int]] = {}
    for position in range(text.end - 1, text.start - 1, -1):
        room = min(max_gamma, text.end - position - 1)
        # Past the first wrong token too: costs as measured may say that a longer proposal takes less time.
        num_right = text.run_length(position, room)
        options = []
        for gamma in range(room + 1):
            following = position + min(gamma, num_right) + 1
            rest = best[following][0] if following < text.end else 0.0
            options.append((costs.step_s(gamma) + rest, gamma, following))
        best[position] = min(options)
    position, gammas = text.start, []
    while position < text.end:
        gammas.append(best[position][1])
        position = best[position][2]
    return Score(position - text.start, best[text.start][0] if gammas else 0.0, gammas)
