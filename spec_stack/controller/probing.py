"""When a policy that has stopped drafting tries again: seldom, and more seldom while it does not pay."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Probing:
    """Counts idle steps. A probe that does not pay doubles the wait for the next one.

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
    _wait: int = field(init=False, repr=False)
    _num_idle: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        if not 2 <= self.first <= self.last:
            raise ValueError(f"probes need a first wait of 2 or more and a last one not under it, got {self}")
        self._wait = self.first

    def is_due(self, cost_s: float, step_s: float) -> bool:
        """Count an idle step of step_s seconds; whether the next one may probe at a cost of cost_s beside it."""
        self._num_idle += 1
        if self._num_idle < self._wait or cost_s > self.share * self._num_idle * step_s:
            return False
        self._num_idle = 0
        self._wait = min(2 * self._wait, self.last)
        return True

    def reset(self) -> None:
        """Drafting pays: the next idle stretch begins with short waits."""
        self._num_idle, self._wait = 0, self.first
