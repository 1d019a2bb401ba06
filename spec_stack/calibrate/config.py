"""Budget and margins of a calibration. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_stack.settings.checks import check_fields, require_int
from spec_stack.settings.options import documented, option


@documented
@dataclass(frozen=True)
class CalibrateConfig:
    """How much a calibration may take, and what it may give up."""

    lengths: Sequence[int] = option(
        (2048, 4096, 8192),
        "of the prompts, in tokens; the shortest one chooses, the others tell how much to keep of longer prompts",
    )
    prompts: int = option(
        88,
        "prompts of the shortest length, about two to a document; of every other a quarter as many; more are surer",
        1,
    )
    margin: float = option(
        0.1, "recall given up, by a smaller share, against what the chosen setting keeps at keep_rate 0.2"
    )
    budget_s: float = option(600.0, "seconds after which it chooses by what it has")
    seed: int = option(0, "draws the prompts")

    def __post_init__(self) -> None:
        check_fields(self)
        if not (isinstance(self.lengths, tuple) and self.lengths):
            raise ValueError(f"lengths must be a list of one or more numbers of tokens, got {self.lengths!r}")
        for length in self.lengths:
            require_int("a length of lengths", length, 1)
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must be from 0 to under 1, got {self.margin}")
        if not self.budget_s > 0:
            raise ValueError(f"budget_s must be over 0, got {self.budget_s}; it is the seconds of one call")
