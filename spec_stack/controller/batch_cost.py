"""Measure a server's steps while it runs: seconds by gamma, at every batch size (in powers of two)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

# Steps whose result may be outstanding. SGLang's overlap leaves one.
MAX_PENDING = 8
# A gamma is tried until `trials` steps had known seconds, but this many times `trials` at most: a step that follows a
# prefill leaves no seconds, and where all do, trying must come to an end all the same.
_TRIES_PER_TRIAL = 4


class _GammaCost:
    """Seconds of a step with one gamma at one batch size; a stall counts as a step of twice the usual time."""

    def __init__(self) -> None:
        self.num_tried = 0
        self.num_seen = 0
        self.seconds = math.inf
        self.last_step = 0

    def observe(self, seconds: float, step: int, weight: float, trials: int) -> None:
        if self.num_seen < trials:
            # The first steps of a shape are slow for reasons of their own, so the quickest of them starts the average.
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += weight * (min(seconds, 2 * self.seconds) - self.seconds)
        self.num_seen += 1
        self.last_step = step


class StepSeconds:
    """Which gammas are still to be tried at a batch size, and what each took there. Mutated by its methods.

    Parameters
    ----------
    gammas : sequence of int
        The candidates.
    weight : float
        Of the last step in a gamma's seconds, in (0, 1].
    trials : int
        Steps each gamma is tried for at a new batch size.
    """

    def __init__(self, gammas: Sequence[int], weight: float, trials: int) -> None:
        self._gammas = sorted(gammas)
        self._weight = weight
        self._trials = trials
        self._costs: dict[tuple[str, int], dict[int, _GammaCost]] = {}
        # A server may tell how a step went while the next one runs already, at another batch size.
        self._buckets: OrderedDict[int, int] = OrderedDict()

    def begin(self, step: int, precision: str, batch_size: int) -> dict[int, _GammaCost]:
        """The costs at the size of a step that begins; its result will be charged to them."""
        bucket = batch_size.bit_length()
        self._buckets.pop(step, None)
        self._buckets[step] = bucket
        if len(self._buckets) > MAX_PENDING:
            self._buckets.popitem(last=False)
        return self._costs_at(precision, bucket)

    def to_try(self, usable: Sequence[int], costs: dict[int, _GammaCost]) -> int | None:
        """The first gamma that is still to be tried, which counts as tried then; None for none."""
        for gamma in usable:
            if costs[gamma].num_seen < self._trials and costs[gamma].num_tried < _TRIES_PER_TRIAL * self._trials:
                costs[gamma].num_tried += 1
                return gamma
        return None

    def observe(self, step: int, precision: str, gamma: int, seconds: float) -> None:
        """Take in one request's share of a step's seconds; shares are equal, so one per step is enough."""
        bucket = self._buckets.get(step)
        if bucket is not None and gamma in self._gammas:
            self._costs_at(precision, bucket)[gamma].observe(seconds, step, self._weight, self._trials)
            del self._buckets[step]

    def _costs_at(self, precision: str, bucket: int) -> dict[int, _GammaCost]:
        return self._costs.setdefault((precision, bucket), {gamma: _GammaCost() for gamma in self._gammas})


def stale_neighbour(best: int, usable: Sequence[int], costs: dict[int, _GammaCost]) -> int:
    """Return the gamma beside the best one whose seconds were measured longest ago."""
    at = usable.index(best)
    neighbours = [*usable[max(at - 1, 0) : at], *usable[at + 1 : at + 2]]
    return min(neighbours, key=lambda gamma: costs[gamma].last_step, default=best)
