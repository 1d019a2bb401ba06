"""Gamma policies: how far the draft may run ahead. One class and one registry line each."""

from __future__ import annotations

from collections.abc import Callable

from spec_stack.config import MAX_GAMMA, DecodeConfig
from spec_stack.records import DraftSignals, GammaPolicy, StepContext, StepRecord


class FixedPolicy:
    """The same gamma at every step; 0 is plain decoding."""

    name = "fixed"

    def __init__(self, gamma: int = DecodeConfig.gamma) -> None:
        if not 0 <= gamma <= MAX_GAMMA:
            raise ValueError(f"gamma must be 0 to {MAX_GAMMA}, got {gamma}")
        self.gamma = gamma

    def choose(self, context: StepContext) -> int:
        return self.gamma

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return True

    def observe(self, record: StepRecord) -> None:
        """Learns nothing."""


_FACTORIES: dict[str, Callable[..., GammaPolicy]] = {
    "fixed": FixedPolicy,
}


def policy_names() -> list[str]:
    """The names `make_policy` knows."""
    return sorted(_FACTORIES)


def make_policy(name: str, **options: object) -> GammaPolicy:
    """A new policy by its registered name. Raises ValueError for an unknown one."""
    if name not in _FACTORIES:
        raise ValueError(f"unknown policy {name!r}; use one of {policy_names()}")
    return _FACTORIES[name](**options)
