"""Seconds of a server's step by batch size and gamma, measured while it runs.

A plane through all that was measured, a + b·size + c·gamma + d·size·gamma, says what a size and gamma that were rarely
taken would cost; how far each one's own steps lie over or under it corrects it there.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Steps whose result may be outstanding. SGLang's overlap leaves one.
MAX_PENDING = 8
# A gamma is tried until `trials` steps had known seconds, but this many times `trials` at most: a step that follows a
# prefill leaves no seconds, and where all do, trying must come to an end all the same.
_TRIES_PER_TRIAL = 4
# The plane's uncertainty before any step, in squared steps; each step says as much as one.
_TRUST = 1e-3
# The plane's share in what a size and gamma cost, in steps.
_PLANE_STEPS = 3.0


class _Own:
    """What a size and gamma took itself: the mean log of its seconds over the plane's, and the step last measured."""

    __slots__ = ("excess", "last_step", "num_seen", "num_tried")

    def __init__(self) -> None:
        self.num_tried = 0
        self.num_seen = 0
        self.excess = 0.0
        self.last_step = 0


class StepSeconds:
    """What a step takes at every batch size and gamma. Mutated by its methods.

    Parameters
    ----------
    gammas : sequence of int
        The candidates.
    weight : float
        Of the last step in a size and gamma's own seconds, in (0, 1], once they have been seen often.
    trials : int
        Steps each gamma is tried for before anything is known of it at any batch size.
    forgetting : float
        Of the plane, per step, in (0, 1].
    """

    def __init__(self, gammas: Sequence[int], weight: float, trials: int, forgetting: float = 0.998) -> None:
        self._gammas = sorted(gammas)
        self._weight = weight
        self._trials = trials
        self._forgetting = forgetting
        self._own: dict[tuple[int, int], _Own] = {}
        self._tried = {gamma: _Own() for gamma in self._gammas}
        self._precision = _TRUST * np.eye(4)
        self._seen = np.zeros(4)
        self._plane: list[float] | None = None
        self._num_seen = 0
        self._cached: dict[int, Floats] = {}
        # A server may tell how a step went while the next one runs already, at another batch size.
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def begin(self, step: int, size: int) -> None:
        """A step of this batch size begins; its result will be charged to it."""
        self._sizes.pop(step, None)
        self._sizes[step] = size
        if len(self._sizes) > MAX_PENDING:
            self._sizes.popitem(last=False)

    @property
    def is_known(self) -> bool:
        """Whether any step had known seconds."""
        return self._num_seen > 0

    def to_try(self, usable: Sequence[int]) -> int | None:
        """The first gamma that is still to be tried, which counts as tried then; None for none."""
        for gamma in usable:
            tried = self._tried[gamma]
            if tried.num_seen < self._trials and tried.num_tried < _TRIES_PER_TRIAL * self._trials:
                tried.num_tried += 1
                return gamma
        return None

    def seconds(self, size: int) -> Floats:
        """Of a step at this batch size, by gamma in their order (num_gammas,)."""
        found = self._cached.get(size)
        if found is None:
            plane = self._on_the_plane(size, np.array(self._gammas, dtype=np.float64))
            excess = [self._excess(size, gamma) for gamma in self._gammas]
            found = self._cached[size] = plane * np.exp(excess)
        return found

    def stale_neighbour(self, best: int, usable: Sequence[int], size: int) -> int:
        """Of the gammas beside the best one, that whose seconds were measured longest ago at this batch size."""
        at = usable.index(best)
        neighbours = [*usable[max(at - 1, 0) : at], *usable[at + 1 : at + 2]]
        return min(neighbours, key=lambda gamma: self._last_step(size, gamma), default=best)

    def observe(self, step: int, gamma: int, share: float) -> None:
        """Take in one request's share of a step's seconds; shares are equal, so one per step is enough. A stall counts
        as a step of twice the usual time."""
        size = self._sizes.pop(step, None)
        if size is None or gamma not in self._tried or not 0 < share < math.inf:
            return
        seconds = share * size
        usual = float(self.seconds(size)[self._gammas.index(gamma)]) if self._num_seen >= len(self._gammas) else seconds
        seconds = min(seconds, 2 * usual)
        self._fit(size, gamma, seconds)
        plane = float(self._on_the_plane(size, np.array([float(gamma)]))[0])
        own = self._own.setdefault((size, gamma), _Own())
        own.num_seen += 1
        weight = max(self._weight, 1 / own.num_seen)
        own.excess += weight * (math.log(seconds / plane) - own.excess)
        own.last_step = step
        self._tried[gamma].num_seen += 1
        self._num_seen += 1
        self._cached.clear()

    def _fit(self, size: int, gamma: int, seconds: float) -> None:
        """One step of recursive least squares; errors count by their share of the seconds."""
        row = np.array([1.0, size, gamma, size * gamma]) / seconds
        self._precision = self._forgetting * self._precision + np.outer(row, row)
        self._seen = self._forgetting * self._seen + row
        self._plane = None

    def _on_the_plane(self, size: int, gammas: Floats) -> Floats:
        """Seconds by gamma, never under a tenth of a plain step's."""
        if self._plane is None:
            self._plane = np.linalg.solve(self._precision, self._seen).tolist()
        base, by_size, by_gamma, by_both = self._plane
        plain = base + by_size * size
        found: Floats = np.maximum(plain + (by_gamma + by_both * size) * gammas, 0.1 * max(plain, 1e-6))
        return found

    def _excess(self, size: int, gamma: int) -> float:
        own = self._own.get((size, gamma))
        return 0.0 if own is None else own.excess * own.num_seen / (own.num_seen + _PLANE_STEPS)

    def _last_step(self, size: int, gamma: int) -> int:
        own = self._own.get((size, gamma))
        return -1 if own is None else own.last_step
