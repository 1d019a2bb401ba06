"""When a policy that has stopped drafting tries again: seldom, and more seldom while it does not pay."""

from __future__ import annotations

from dataclasses import dataclass, field

# Tokens that the draft has to catch up on in a usual step: the last one drafted, and the target's own.
USUAL_UNREAD = 2
_MOST_WAKES = 4


@dataclass
class Probing:
    """Counts idle steps. A probe that does not pay doubles the wait for the next one.

    A draft that has idled must first prefill what was written meanwhile. That step's time says nothing of drafting:
    taken for its cost, it would keep a cheap draft off for good. So such a probe is two steps: `is_waking` is true
    in the first, whose times are to be left out, and the second measures. Where something comes between (look-ups,
    which ask nobody, or another request) the draft is woken again at once, since little is unread; after `_MOST_WAKES`
    times it waits as before.

    Parameters
    ----------
    first, last : int
        Idle steps before the first probe, and before the last kind of it.
    share : float
        Most of the time decoded since the last probe that a probe may cost.
    """

    first: int = 16
    last: int = 256
    share: float = 0.02
    is_waking: bool = field(init=False, repr=False, default=False)
    # Of the probe that is under way; 0 where none is.
    _num_wakes: int = field(init=False, repr=False, default=0)
    _wait: int = field(init=False, repr=False)
    _num_idle: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        if not 2 <= self.first <= self.last:
            raise ValueError(f"probes need a first wait of 2 or more and a last one not under it, got {self}")
        self._wait = self.first

    def begin(self) -> None:
        """A step begins. Call it first in every step, whether a probe is asked for or not."""
        self.is_waking = False

    def is_due(self, cost_s: float, step_s: float, num_unread: int = 0) -> bool:
        """Count an idle step of step_s seconds; whether the next one may probe at a cost of cost_s beside it.

        num_unread are the tokens that the draft would have to read first.
        """
        self._num_idle += 1
        measures = num_unread <= USUAL_UNREAD
        waited = self._num_idle >= self._wait and cost_s <= self.share * self._num_idle * step_s
        if not waited and not 0 < self._num_wakes < (_MOST_WAKES + measures):
            self._num_wakes = 0
            return False
        self._num_idle = 0
        self.is_waking = not measures
        self._num_wakes = 0 if measures else self._num_wakes + 1
        if measures:
            self._wait = min(2 * self._wait, self.last)
        return True

    def reset(self) -> None:
        """Drafting pays: the next idle stretch begins with short waits."""
        self._num_idle, self._wait, self._num_wakes = 0, self.first, 0
