"""Measure a server's steps while it runs: seconds by gamma and batch size, and how sure they are."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Steps whose result may be outstanding. SGLang's overlap leaves one.
MAX_PENDING = 8
# The grid's batch sizes, between which steps lie in powers of two; larger ones count as the last.
_SIZES = tuple(2**power for power in range(9))
# In log seconds: how far one step is from the usual, how far apart shapes may be, and that over how many doublings of
# size or of 1 + gamma; what no neighbour tells; how far the level is known before any step.
_NOISE, _SHAPE, _DOUBLINGS, _OWN, _LEVEL = 0.15, 0.4, 2.5, 0.05, 4.0
# A profile was taken on another day.
_PROFILE_NOISE = 0.08
# From step to step: how far the level moves (load, longer texts), and the share of the shape that is forgotten.
_MOVES, _FORGETS = 0.02, 0.0005
# Once so many steps have been taken in, one in so many is, for all that passed: each costs a tenth of a millisecond.
_MANY, _ONE_IN = 64, 4
# Before anything is measured: a draft's forward takes so much of the target's, and so does every token over the first.
_DRAFT_SHARE, _TOKEN_SHARE = 0.1, 0.02


class StepSeconds:
    """What steps of a server take by gamma and batch size, learned from the steps themselves. Mutated by its methods.

    Parameters
    ----------
    gammas : sequence of int
        The candidates, in rising order.
    profile : mapping, optional
        Known seconds of a step by batch size, by gamma; what later steps say goes over it.

    Notes
    -----
    A Gaussian process over log seconds (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter
    2) on a grid of gammas and of batch sizes in powers of two. All share one level, which moves with load and with the
    texts' lengths; what lies near in gamma and size has nearly the same shape over it. So a step with one gamma tells
    how slow steps are now with all, and one measured long ago is still compared fairly. A step is one observation,
    interpolated between two sizes; one far from what was expected counts as two deviations.
    """

    def __init__(self, gammas: Sequence[int], profile: Mapping[int, Mapping[int, float]] | None = None) -> None:
        self._row = {gamma: at for at, gamma in enumerate(gammas)}
        self._sizes = np.log2(np.array(_SIZES, dtype=np.float64))
        places = np.array([(math.log2(1 + gamma), size) for gamma in gammas for size in self._sizes])
        apart = np.square(places[:, None] - places[None]).sum(axis=-1)
        self._prior = _SHAPE**2 * np.exp(-apart / (2 * _DOUBLINGS**2)) + _OWN**2 * np.eye(len(places))
        self._drift = _MOVES**2 + _FORGETS * self._prior
        self._covariance = self._prior + _LEVEL**2
        forwards = [1 + _DRAFT_SHARE * gamma + _TOKEN_SHARE * (gamma + 1) * size for gamma in gammas for size in _SIZES]
        self._log_seconds = np.log(np.array(forwards))
        self._begun: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._has_run: set[tuple[int, int]] = set()
        self.num_seen = self.num_taken_in = 0
        for size, row in (profile or {}).items():
            for gamma, seconds in row.items():
                if gamma in self._row:
                    self._take_in(size, gamma, seconds, _PROFILE_NOISE)

    def begin(self, step: int, batch_size: int, num_requests: int) -> None:
        """A step begins, whose result will be charged to this batch size. num_requests: that share its seconds."""
        self._begun.pop(step, None)
        self._begun[step] = batch_size, num_requests
        if len(self._begun) > MAX_PENDING:
            # A server may tell how a step went while the next one runs already.
            self._begun.popitem(last=False)

    def expected(self, batch_size: int) -> Floats:
        """Seconds of a step of this size, by candidate."""
        at, weight = self._between(batch_size)
        rows = self._log_seconds.reshape(len(self._row), -1)
        found: Floats = np.exp((1 - weight) * rows[:, at] + weight * rows[:, at + 1])
        return found

    def doubt(self, batch_size: int, best: int) -> Floats:
        """How unsure it is, by candidate, that its seconds over those of the candidate numbered `best` are as expected:
        a standard deviation of the logarithm."""
        at, weight = self._between(batch_size)
        low, high = (slice(at + place, None, len(_SIZES)) for place in (0, 1))
        across = self._covariance[low, high]
        between = (1 - weight) ** 2 * self._covariance[low, low] + weight**2 * self._covariance[high, high]
        between += weight * (1 - weight) * (across + across.T)
        spread = between.diagonal() + between[best, best] - 2 * between[best]
        return np.asarray(np.sqrt(np.maximum(spread, 0.0)))

    def observe(self, step: int, gamma: int, seconds: float) -> None:
        """Take in one request's share of a step's seconds; shares are equal, so one per step is enough."""
        if gamma not in self._row or step not in self._begun:
            return
        batch_size, num_requests = self._begun.pop(step)
        shape = gamma, batch_size.bit_length()
        if shape not in self._has_run:
            # The first step of a shape is slow for reasons of its own.
            self._has_run.add(shape)
            return
        self.num_seen += 1
        if self.num_seen > _MANY:
            if self.num_seen % _ONE_IN:
                return
            self._covariance += (_ONE_IN - 1) * self._drift
        self.num_taken_in += 1
        self._covariance += self._drift
        self._take_in(batch_size, gamma, seconds * num_requests, _NOISE)

    def _take_in(self, batch_size: int, gamma: int, seconds: float, noise: float) -> None:
        """One step of a Kalman filter."""
        at, weight = self._between(batch_size)
        at += self._row[gamma] * len(_SIZES)
        shared = (1 - weight) * self._covariance[at] + weight * self._covariance[at + 1]
        spread = (1 - weight) * shared[at] + weight * shared[at + 1] + noise**2
        expected = (1 - weight) * self._log_seconds[at] + weight * self._log_seconds[at + 1]
        furthest = 2 * math.sqrt(spread)
        surprise = min(max(math.log(max(seconds, 1e-9)) - expected, -furthest), furthest)
        self._log_seconds += shared * (surprise / spread)
        self._covariance -= np.outer(shared, shared / spread)

    def _between(self, batch_size: int) -> tuple[int, float]:
        """The grid's size at or under this one, and how far it is to the next, 0 to 1."""
        size = math.log2(min(batch_size, _SIZES[-1]))
        at = min(int(size), len(_SIZES) - 2)
        return at, size - at
