"""`confidence` for servers: as far as the draft was sure of its last proposals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import BatchMember, Policy, StepContext, StepRecord, check_gamma
from spec_stack.controller.batch_rule import LastMembers, PerRequest


@dataclass
class _Reach:
    """Tokens that a request's proposal would have, ended after the first doubtful one; None before any is known.

    is_doubtful: its next step's first token is under the threshold.
    """

    tokens: float | None = None
    is_doubtful: bool = False


@dataclass
class BatchConfidence(Policy):
    """As many tokens as the requests' proposals would lately have had, had each ended after the first doubtful token.

    `Confidence` ends a proposal there. A server settles gamma before it drafts, so here the rule looks back: at each
    request's last proposals, by a moving average, and at the first token of the next one, which is drafted by then. The
    batch takes the mean. A proposal without a doubt might have gone on: it counts as twice its length.

    Parameters
    ----------
    threshold : float
        A token that the draft gave a smaller probability is doubtful.
    gammas : tuple of int
        The candidates.
    weight : float
        Of the last proposal in a request's average, in (0, 1].
    start : int
        Tokens while no signals have come.
    """

    threshold: float = 0.4
    gammas: tuple[int, ...] = (1, 2, 4, 8)
    weight: float = 0.3
    start: int = 4
    _requests: PerRequest[_Reach] = field(init=False, repr=False, default_factory=lambda: PerRequest(_Reach))
    _last: LastMembers = field(init=False, repr=False, default_factory=LastMembers)

    name = "confidence"

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is a probability, 0 to 1, got {self.threshold}")
        if not self.gammas:
            raise ValueError("gammas must hold a number")
        for gamma in self.gammas:
            check_gamma("gammas", gamma)
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        check_gamma("start", self.start)

    def choose(self, context: StepContext) -> int:
        members: Sequence[BatchMember] = context.members or self._last.members
        reaches = [self._wanted(member) for member in members] or [float(self.start)]
        wanted = sum(reaches) / len(reaches)
        return min(self.gammas, key=lambda gamma: (abs(gamma - wanted), gamma))

    def _wanted(self, member: BatchMember) -> float:
        reach = self._requests.of(member.request_id)
        tokens = float(self.start) if reach.tokens is None else reach.tokens
        return min(1.0 if reach.is_doubtful else tokens, member.max_gamma)

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill:
            return
        self._last.note(record)
        reach = self._requests.of(record.request_id)
        reach.is_doubtful = record.upcoming is not None and record.upcoming.confidence[0] < self.threshold
        if not record.signals:
            return
        confidences = record.signals.confidence
        doubts = [place for place, confidence in enumerate(confidences) if confidence < self.threshold]
        tokens = float(doubts[0] + 1 if doubts else min(2 * len(confidences), MAX_GAMMA))
        before = tokens if reach.tokens is None else reach.tokens
        reach.tokens = before + self.weight * (tokens - before)
