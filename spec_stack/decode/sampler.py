"""Token sampling of a request: greedy, or from warped distributions with its own generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Warp = Callable[[torch.Tensor], torch.Tensor]


class LogitsProcessors(Protocol):
    """Logits processors of one request; a row may depend on the tokens and rows before it (see `hf.processors`)."""

    def __call__(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """A row (vocab,) in fp32 from the logits (vocab,) after prefix_ids, prompt included.

        Calls on a request's own shaper extend the prefix by one token each, as in plain generation.
        """
        ...

    def fork_for_draft(self) -> LogitsProcessors:
        """A fork for tokens that may be rejected; this shaper stays as it is."""
        ...


class Sampler:
    """The sampling of one request.

    warp: maps logits (n, vocab) to warped logits, for draft and target alike; None is greedy. generator: on the models'
    device; every draw advances it. shaper: applied before the warp; every committed row of the target advances it.
    """

    def __init__(
        self, warp: Warp | None = None, generator: torch.Generator | None = None, shaper: LogitsProcessors | None = None
    ) -> None:
        self._warp = warp
        self._generator = generator
        self.shaper = shaper

    @property
    def is_greedy(self) -> bool:
        return self._warp is None

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Warped distributions (n, vocab) in fp32. Only when sampling."""
        if self._warp is None:
            raise ValueError("a greedy sampler has no distribution")
        return self.warp(logits).softmax(dim=-1)

    def warp(self, logits: torch.Tensor) -> torch.Tensor:
        """Warped logits (n, vocab) in fp32; those of a greedy request are returned as they are."""
        logits = logits.float()
        return logits if self._warp is None else self._warp(logits)

    def draw(self, logits: torch.Tensor) -> tuple[int, torch.Tensor]:
        """One token from one row of logits (vocab,), and its distribution."""
        probs = self.probs(logits[None])[0]
        return self.pick(probs), probs

    def pick(self, weights: torch.Tensor) -> int:
        """An index drawn in proportion to weights (vocab,)."""
        return int(torch.multinomial(weights, 1, generator=self._generator))

    def uniform(self, num: int, device: torch.device) -> torch.Tensor:
        return torch.rand(num, generator=self._generator, device=device)
