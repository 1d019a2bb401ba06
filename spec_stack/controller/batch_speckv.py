"""`speckv` for servers: the paper's predictor on each request's own last signals, one gamma for the batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spec_stack.controller.base import BatchMember, DraftSignals, StepContext, StepRecord
from spec_stack.controller.batch_cost import MAX_PENDING, Floats
from spec_stack.controller.batch_rule import BatchRule, PerRequest
from spec_stack.controller.predictor import step_features
from spec_stack.controller.speckv import OnlineRidge, RatePredictor, rates_of

_TYPICAL_RATE = 0.5
_MIN_EXPECTED = 0.5


@dataclass
class _Request:
    """signals: of its last step that drafted. recent: what has lately come of what was expected of it, 1 at most."""

    signals: DraftSignals | None = None
    recent: float = 1.0


@dataclass(frozen=True)
class _Asked:
    """signals: the newest that were known of a request. rates: predicted from them, by gamma."""

    signals: DraftSignals
    rates: Mapping[int, float]


@dataclass
class BatchSpecKV(BatchRule):
    """The candidate with most expected tokens, acceptance_rate * gamma + 1, over the batch and per measured second.

    Each request's acceptance rate is predicted from the signals of its own last step, and brought down by what has
    lately come of such predictions for that request.

    Parameters
    ----------
    predictor : str, Path or RatePredictor, optional
        As of `SpecKV`: a file, or an object that predicts; without one a ridge is learned online, over all requests.

    Raises
    ------
    ValueError
        For an option out of range and a bad predictor file.
    """

    predictor: str | Path | RatePredictor | None = None
    _rates: RatePredictor = field(init=False, repr=False)
    _online: OnlineRidge | None = field(init=False, repr=False, default=None)
    _requests: PerRequest[_Request] = field(init=False, repr=False, default_factory=lambda: PerRequest(_Request))
    _typical: float = field(init=False, repr=False, default=_TYPICAL_RATE)
    # By step, what was known of each request when its gamma was chosen.
    _asked: OrderedDict[int, dict[str, _Asked]] = field(init=False, repr=False, default_factory=OrderedDict)

    name = "speckv"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rates, self._online = rates_of(self.predictor)

    def expected_accepted(self, context: StepContext, members: Sequence[BatchMember]) -> Floats:
        known = [self._requests.of(member.request_id) for member in members]
        rates = self._predicted([each.signals for each in known], context.precision)
        self._asked.pop(context.step, None)
        self._asked[context.step] = {
            member.request_id: _Asked(each.signals, dict(zip(self.gammas, own, strict=True)))
            for member, each, own in zip(members, known, rates, strict=True)
            if each.signals is not None
        }
        if len(self._asked) > MAX_PENDING:
            self._asked.popitem(last=False)
        expected = np.zeros((max(len(known), 1), max(self.gammas) + 1))
        for row, (member, each, own) in enumerate(zip(members, known, rates, strict=True)):
            for gamma, rate in zip(self.gammas, own, strict=True):
                expected[row, gamma] = each.recent * rate * min(gamma, member.max_gamma)
        return expected

    def _predicted(self, signals: Sequence[DraftSignals | None], precision: str) -> list[Sequence[float]]:
        """For each request's signals the acceptance rates at `gammas`, all in one call of the predictor."""
        typical = [self._typical] * len(self.gammas)
        if self._online is not None and not self._online.num_seen:
            return [typical for _ in signals]
        rows = []
        for each in signals:
            if each is not None:
                *features, _ = step_features(each, precision, 0)
                rows += [(*features, float(gamma)) for gamma in self.gammas]
        found = self._rates.acceptance_rates(rows) if rows else ()
        size = len(self.gammas)
        by_request = iter([found[at : at + size] for at in range(0, len(rows), size)])
        return [typical if each is None else next(by_request) for each in signals]

    def learn(self, record: StepRecord) -> None:
        if not record.gamma:
            return
        known = self._requests.of(record.request_id)
        rate = record.num_accepted / record.gamma
        asked = self._asked.get(record.step, {}).get(record.request_id)
        if asked is not None:
            # A request's own cap may be no candidate; the nearest one stands for it.
            at = min(asked.rates, key=lambda gamma: abs(gamma - record.gamma))
            expected = asked.rates[at] * record.gamma
            share = record.num_accepted / max(expected, _MIN_EXPECTED)
            known.recent = min(max(known.recent + self.weight * (share - known.recent), 0.0), 1.0)
            if self._online is not None:
                self._online.learn(step_features(asked.signals, record.precision, record.gamma), rate)
        self._typical += 0.1 * self.weight * (rate - self._typical)
        if record.signals:
            known.signals = record.signals
