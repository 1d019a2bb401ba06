"""Measure what one kind of step brings in its time: of this request as far as it has shown it, before that of all."""

from __future__ import annotations

_KEEP = 0.97
"""Of what was seen, with every step that is taken in."""
_IDLE_KEEP = 0.99


class RequestRate:
    """Tokens per unit of time over a discounted past. Mutated by all but `value`.

    The estimate is an average of three, weighed by the time that each has seen: this request's own, what all requests
    showed, worth `shared_weight` at most, and a start. The past is forgotten with time, not with steps, so
    one long step counts as what it took.

    Parameters
    ----------
    start : float
        The rate before anything is seen.
    weight : float
        The time that the start is worth.
    shared_weight : float
        The time that all requests' rate is worth beside this one's own.
    keep : float
        What is kept of the past with every step.
    """

    def __init__(self, start: float, weight: float, shared_weight: float = 4.0, keep: float = _KEEP) -> None:
        self._start, self._weight, self._shared_weight, self._keep = start, weight, shared_weight, keep
        self._shared = (0.0, 0.0)
        self._own = (0.0, 0.0)

    def begin_request(self) -> None:
        """Forget the request; what it showed is known of all."""
        self._own = (0.0, 0.0)

    def add(self, num_tokens: float, time: float) -> None:
        """Take in a step."""
        self._shared = _aged(self._shared, self._keep, num_tokens, time)
        self._own = _aged(self._own, self._keep, num_tokens, time)

    def fade(self) -> None:
        """Let what was seen weigh less against what will be."""
        self._shared = _aged(self._shared, _IDLE_KEEP)
        self._own = _aged(self._own, _IDLE_KEEP)

    @property
    def value(self) -> float:
        """Tokens per unit of time."""
        tokens, time = self._shared
        shared = (tokens + self._start * self._weight) / (time + self._weight)
        tokens, time = self._own
        return (tokens + shared * self._shared_weight) / (time + self._shared_weight)


def _aged(seen: tuple[float, float], keep: float, num_tokens: float = 0.0, time: float = 0.0) -> tuple[float, float]:
    return seen[0] * keep + num_tokens, seen[1] * keep + time
