"""Others' rules for a batch, and what was done here before signals: for comparison with `throughput`, in replay."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.acceptance import logit, sigmoid
from spec_stack.controller.base import BatchMember, DraftSignals, Policy, StepContext, StepRecord, check_gamma
from spec_stack.controller.batch_rule import BatchRule, Floats, PerRequest
from spec_stack.controller.batch_throughput import BatchLogistic
from spec_stack.offline.batch_replay import BatchCosts, Trim

_TYPICAL_ACCEPTANCE = 0.7
_MIN_ACCEPTANCE = 0.02


@dataclass
class _Acceptance:
    rate: float | None = None


@dataclass
class AcceptanceAlone(BatchRule):
    """The batch rule by acceptance alone: by place over all requests, raised or lowered by each request's own."""

    _by_place: list[float] = field(init=False, repr=False)
    _requests: PerRequest[_Acceptance] = field(init=False, repr=False, default_factory=lambda: PerRequest(_Acceptance))
    _typical: float = field(init=False, repr=False, default=_TYPICAL_ACCEPTANCE)

    name = "acceptance-alone"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._by_place = [_TYPICAL_ACCEPTANCE] * max(self.gammas)

    def expected_accepted(self, context: StepContext, members: Sequence[BatchMember]) -> Floats:
        rates = [self._requests.of(member.request_id).rate for member in members] or [self._typical]
        places = [logit(chance, _MIN_ACCEPTANCE) - logit(self._typical, _MIN_ACCEPTANCE) for chance in self._by_place]
        expected = np.zeros((len(rates), len(places) + 1))
        for row, rate in enumerate(rates):
            own, reached, total = logit(self._typical if rate is None else rate, _MIN_ACCEPTANCE), 1.0, 0.0
            for place, odds in enumerate(places):
                reached *= sigmoid(odds + own)
                total += reached
                expected[row, place + 1] = total
        return expected

    def learn(self, record: StepRecord) -> None:
        if not record.gamma:
            return
        for place in range(min(record.num_accepted + 1, record.gamma, len(self._by_place))):
            accepted = float(place < record.num_accepted)
            self._by_place[place] += 0.5 * self.weight * (accepted - self._by_place[place])
        rate = record.num_accepted / (record.num_accepted + (record.num_accepted < record.gamma))
        known = self._requests.of(record.request_id)
        before = self._typical if known.rate is None else known.rate
        known.rate = before + self.weight * (rate - before)
        self._typical += 0.1 * self.weight * (rate - self._typical)


# SGLang's default candidates: batch size from which they hold, gammas, what is added to the bound under which it falls.
_SLOTS = ((1, (1, 3, 5, 7), -0.25), (8, (0, 1, 3), 0.0), (32, (0, 1), 0.0), (64, (0,), 0.0))


@dataclass
class SGLangAdaptive(Policy):
    """SGLang's `--speculative-adaptive` with its default configuration: candidates by batch size, chosen by a moving
    average of accepted tokens, every fifth step after ten.

    Notes
    -----
    After `AdaptiveStepSlot` of SGLang 0.5.21 (`python/sglang/srt/speculative/adaptive_spec_params.py`, with its names'
    meaning kept): the gamma falls to the largest candidate that the average is not half a token under, and rises to
    the first that it is not half a token over. From 0 it always tries the next one.
    """

    start: int = 3
    _slots: dict[int, _Slot] = field(init=False, repr=False)

    name = "sglang-adaptive"

    def __post_init__(self) -> None:
        check_gamma("start", self.start)
        self._slots = {size: _Slot(candidates, falls, self.start) for size, candidates, falls in _SLOTS}
        self._batch: dict[int, tuple[int, list[int]]] = {}

    def choose(self, context: StepContext) -> int:
        size = _SLOTS[max(bisect_right([size for size, *_ in _SLOTS], context.batch_size) - 1, 0)][0]
        self._batch[context.step] = (size, [])
        self._size = context.batch_size
        return self._slots[size].gamma

    def observe(self, record: StepRecord) -> None:
        size, accepted = self._batch[record.step]
        accepted.append(record.num_accepted)
        if len(accepted) == self._size:
            self._slots[size].update(accepted)
            del self._batch[record.step]


class _Slot:
    def __init__(self, candidates: tuple[int, ...], falls: float, start: int) -> None:
        self._candidates = candidates
        self._falls = falls
        self.gamma = start if start in candidates else candidates[len(candidates) // 2]
        self._average = float(self.gamma - 1)
        self._num_steps = 0

    def update(self, accepted: list[int]) -> None:
        if self.gamma > 0:
            self._average = 0.8 * self._average + 0.2 * sum(accepted) / len(accepted)
        self._num_steps += 1
        if self._num_steps <= 10 or (self._num_steps - 10) % 5:
            return
        at = was = self._candidates.index(self.gamma)
        if self.gamma == 0:
            at = min(at + 1, len(self._candidates) - 1)
            if self._candidates[at] > 0 and self._average < 0:
                self._average = float(self._candidates[at] - 1)
        else:
            while at > 0 and self._average <= max(self._candidates[at - 1] - 0.5, 0.5 * (at == 1)) + self._falls:
                if self._candidates[at - 1] == 0 and self._average > 0.5 + self._falls:
                    break
                at -= 1
            if at == was:
                while at < len(self._candidates) - 1 and self._average > self._candidates[at] - 0.5:
                    at += 1
        self.gamma = self._candidates[at]


@dataclass
class SurvivalTrim(Trim):
    """vLLM's adaptive verification: always draft `gamma`, then verify the tokens that most surely survive, over all
    requests, as many as a cost table says pay.

    A token survives where it and all before it are accepted. The chance of each is a logistic function, one per place,
    of the log odds of the draft's confidence in it, refitted from what was verified. Whole blocks are verified at
    first.

    Notes
    -----
    After `enable_adaptive_verification` of vLLM (https://docs.vllm.ai, `adaptive_verification`) and Algorithm 1 of
    DSpark. The confidence is of the step's own tokens, so it has no lag; what it cannot save is the draft's time.
    """

    costs: BatchCosts
    gamma: int = 8
    warm_up: int = 16
    _models: list[BatchLogistic] = field(init=False, repr=False)
    _num_steps: int = field(init=False, repr=False, default=0)

    name = "vllm-survival"

    def __post_init__(self) -> None:
        check_gamma("gamma", self.gamma, least=1)
        self._models = [BatchLogistic((1.0, 1.0)) for _ in range(self.gamma)]

    def choose(self, context: StepContext) -> int:
        self._num_steps += 1
        return min(self.gamma, context.max_gamma, MAX_GAMMA)

    def trimmed(self, proposals: Sequence[DraftSignals]) -> list[int]:
        if self._num_steps <= self.warm_up:
            return [len(signals) for signals in proposals]
        chances = [
            np.array(
                [float(model.probability(_confidence(value))) for model, value in zip(self._models, each, strict=False)]
            )
            for each in (signals.confidence for signals in proposals)
        ]
        survival = [np.cumprod(each) for each in chances]
        surest = sorted(((value, row) for row, each in enumerate(survival) for value in each.tolist()), reverse=True)
        draft_s = self.costs.draft_s(self.gamma, len(proposals))
        best, best_rate, tokens = 0, 0.0, float(len(proposals))
        for number in range(len(surest) + 1):
            if number:
                tokens += surest[number - 1][0]
            rate = tokens / (draft_s + self.costs.verify_s(len(proposals) + number))
            if rate > best_rate:
                best, best_rate = number, rate
        widths = [0] * len(proposals)
        for _, row in surest[:best]:
            widths[row] += 1
        return widths

    def observe(self, record: StepRecord) -> None:
        for place in range(min(record.num_accepted + 1, record.gamma)):
            features = _confidence(record.signals.confidence[place])[None]
            self._models[place].learn(features, np.array([float(place < record.num_accepted)]))


def _confidence(value: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array([logit(value) / 2 - 1, 1.0])
