"""Measure a server's steps while it runs: seconds by gamma, batch size and length, and how sure they are."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Steps whose result may be outstanding. SGLang's overlap leaves one.
MAX_PENDING = 8
# The grid's batch sizes, between which steps lie in powers of two; larger ones count as the last.
_SIZES = tuple(2**power for power in range(9))
# The lengths of contexts between which steps lie likewise; under the first one length hardly shows.
_LENGTHS = tuple(512 * 2**power for power in range(10))
# In log seconds: how far one step is from the usual, how far apart shapes may be, and that over how many doublings of
# size or of 1 + gamma; what no neighbour tells; how far the level is known before any step.
_NOISE, _SHAPE, _DOUBLINGS, _OWN, _LEVEL = 0.15, 0.4, 2.5, 0.05, 4.0
# And with every doubling of the contexts: how far the level may move, and each doubling of 1 + gamma over it.
_LONGER, _LONGER_DRAFTS = 0.3, 0.1
# Lengths in an eighth of a doubling are one.
_GRAIN = 8
# Shapes whose weights are kept.
_MOST_SHAPES = 256
# A profile was taken on another day.
_PROFILE_NOISE = 0.08
# From step to step: how far the level moves (load), and the share of the shape that is forgotten.
_MOVES, _FORGETS = 0.02, 0.0005
# Once so many steps have been seen, one in so many is taken in for all that passed, as each costs a tenth of a
# millisecond; one with another gamma than the last always is, or what was tried would not be known.
_MANY, _ONE_IN = 64, 4
# Before anything is measured: a draft's forward takes so much of the target's, and so does every token over the first.
_DRAFT_SHARE, _TOKEN_SHARE = 0.1, 0.02


class _Shape(NamedTuple):
    """A step as the grid knows it: the size of its batch, and eighths of doublings of its contexts' mean length."""

    batch_size: int
    length: int

    @classmethod
    def of(cls, batch_size: int, num_slots: float) -> _Shape:
        length = math.log2(min(max(num_slots, _LENGTHS[0]), _LENGTHS[-1]) / _LENGTHS[0])
        return cls(min(batch_size, _SIZES[-1]), round(_GRAIN * length))


class StepSeconds:
    """What steps of a server take by gamma, batch size and length, learned from the steps. Mutated by its methods.

    Parameters
    ----------
    gammas : sequence of int
        The candidates, in rising order.
    profile : mapping, optional
        Known seconds of a step by batch size, by gamma, at any one length; what later steps say goes over it.

    Notes
    -----
    A Gaussian process over log seconds (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter
    2) on a grid of gammas and of batch sizes in powers of two. All share one level, which moves with load; what lies
    near in gamma and size has nearly the same shape over it. So a step with one gamma tells how slow steps are now with
    all, and one measured long ago is still compared fairly. On top comes what length does, for all sizes alike: a
    level, and a share of it for each doubling of 1 + gamma, both a walk over doublings of the mean of the batch's
    contexts, so what is known at one length is a start for the next. A step is one observation, interpolated between
    two sizes and two lengths; one far from what was expected counts as two deviations.
    """

    def __init__(self, gammas: Sequence[int], profile: Mapping[int, Mapping[int, float]] | None = None) -> None:
        self._row = {gamma: at for at, gamma in enumerate(gammas)}
        self._doublings = np.log2(1 + np.array(gammas, dtype=np.float64))
        sizes = np.log2(np.array(_SIZES, dtype=np.float64))
        places = np.array([(doublings, size) for doublings in self._doublings for size in sizes])
        apart = np.square(places[:, None] - places[None]).sum(axis=-1)
        shape = _SHAPE**2 * np.exp(-apart / (2 * _DOUBLINGS**2)) + _OWN**2 * np.eye(len(places))
        steps = np.arange(len(_LENGTHS), dtype=np.float64)
        walk = np.minimum(steps[:, None], steps[None])
        prior = _blocks(shape, _LONGER**2 * walk, _LONGER_DRAFTS**2 * walk)
        level = np.zeros_like(prior)
        level[: len(places), : len(places)] = 1.0
        self._drift = _MOVES**2 * level + _FORGETS * prior
        self._covariance = prior + _LEVEL**2 * level
        # Over the grid's cells, then what each length adds, then what it adds for each doubling of 1 + gamma.
        self._state = np.zeros(len(prior))
        forwards = [1 + _DRAFT_SHARE * gamma + _TOKEN_SHARE * (gamma + 1) * size for gamma in gammas for size in _SIZES]
        self._state[: len(places)] = np.log(np.array(forwards))
        self._weights: OrderedDict[_Shape, Floats] = OrderedDict()
        self._begun: OrderedDict[int, tuple[_Shape, int]] = OrderedDict()
        self._has_run: set[tuple[int, int]] = set()
        self.num_seen = self.num_taken_in = self._num_passed = 0
        self._last_gamma = -1
        for size, row in (profile or {}).items():
            for gamma, seconds in row.items():
                if gamma in self._row:
                    self._take_in(_Shape.of(size, 0), gamma, seconds, _PROFILE_NOISE)

    def begin(self, step: int, batch_size: int, num_requests: int, num_slots: float = 0) -> None:
        """A step begins, whose result will be charged to this batch size. num_requests: that share its seconds.
        num_slots: the mean of the tokens that they attend to; 0 where nobody counts them."""
        self._begun.pop(step, None)
        self._begun[step] = _Shape.of(batch_size, num_slots), num_requests
        if len(self._begun) > MAX_PENDING:
            # A server may tell how a step went while the next one runs already.
            self._begun.popitem(last=False)

    def expected(self, batch_size: int, num_slots: float = 0) -> Floats:
        """Seconds of a step of this size and length, by candidate."""
        found: Floats = np.exp(self._weights_of(_Shape.of(batch_size, num_slots)) @ self._state)
        return found

    def doubt(self, batch_size: int, best: int, num_slots: float = 0) -> Floats:
        """How unsure it is, by candidate, that its seconds over those of the candidate numbered `best` are as expected:
        a standard deviation of the logarithm."""
        weights = self._weights_of(_Shape.of(batch_size, num_slots))
        between = weights - weights[best]
        spread = ((between @ self._covariance) * between).sum(axis=1)
        return np.asarray(np.sqrt(np.maximum(spread, 0.0)))

    def observe(self, step: int, gamma: int, seconds: float) -> None:
        """Take in one request's share of a step's seconds; shares are equal, so one per step is enough."""
        if gamma not in self._row or step not in self._begun:
            return
        shape, num_requests = self._begun.pop(step)
        graph = gamma, shape.batch_size.bit_length()
        if graph not in self._has_run:
            # The first step of a shape is slow for reasons of its own.
            self._has_run.add(graph)
            return
        self.num_seen += 1
        self._num_passed += 1
        if self.num_seen > _MANY and gamma == self._last_gamma and self._num_passed < _ONE_IN:
            return
        self.num_taken_in += 1
        self._covariance += self._num_passed * self._drift
        self._num_passed, self._last_gamma = 0, gamma
        self._take_in(shape, gamma, seconds * num_requests, _NOISE)

    def _take_in(self, shape: _Shape, gamma: int, seconds: float, noise: float) -> None:
        """One step of a Kalman filter."""
        weights = self._weights_of(shape)[self._row[gamma]]
        shared = self._covariance @ weights
        spread = float(weights @ shared) + noise**2
        furthest = 2 * math.sqrt(spread)
        surprise = math.log(max(seconds, 1e-9)) - float(weights @ self._state)
        self._state += shared * (min(max(surprise, -furthest), furthest) / spread)
        self._covariance -= np.outer(shared, shared / spread)

    def _weights_of(self, shape: _Shape) -> Floats:
        """What each part of the state counts in the logarithm of a step's seconds: (candidates, state)."""
        if shape not in self._weights:
            self._weights[shape] = self._made_weights(shape)
            if len(self._weights) > _MOST_SHAPES:
                self._weights.popitem(last=False)
        return self._weights[shape]

    def _made_weights(self, shape: _Shape) -> Floats:
        sizes = _between(math.log2(shape.batch_size), len(_SIZES))
        lengths = _between(shape.length / _GRAIN, len(_LENGTHS))
        cells = np.kron(np.eye(len(self._row)), sizes)
        return np.hstack([cells, np.tile(lengths, (len(self._row), 1)), np.outer(self._doublings, lengths)])


def _between(place: float, num_points: int) -> Floats:
    """The shares of a grid's points 0, 1, 2, … in what lies at this place: of the two beside it."""
    shares: Floats = np.maximum(1 - np.abs(np.arange(num_points) - place), 0.0)
    return shares


def _blocks(*matrices: Floats) -> Floats:
    """The matrices one after the other along the diagonal."""
    size = sum(len(matrix) for matrix in matrices)
    found, at = np.zeros((size, size)), 0
    for matrix in matrices:
        found[at : at + len(matrix), at : at + len(matrix)] = matrix
        at += len(matrix)
    return found
