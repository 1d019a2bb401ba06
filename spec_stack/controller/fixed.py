"""The same gamma in every step."""

from __future__ import annotations

from dataclasses import dataclass

from spec_stack.config import DecodeConfig
from spec_stack.controller.base import Policy, StepContext, check_gamma


@dataclass
class Fixed(Policy):
    """The same gamma in every step. The name tells which, so that records of several gammas can be told apart.

    Parameters
    ----------
    gamma : int
        Tokens proposed in every step; 0 is plain decoding.
    """

    gamma: int = DecodeConfig.gamma

    def __post_init__(self) -> None:
        check_gamma("gamma", self.gamma)
        self.name = f"fixed-{self.gamma}"

    def choose(self, context: StepContext) -> int:
        return self.gamma
