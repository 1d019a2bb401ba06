"""How a request draws tokens: greedy, or from warped distributions with a generator of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Warp = Callable[[torch.Tensor], torch.Tensor]


class Shaper(Protocol):
    """Logits processors of one request: what they make of a row depends on the tokens before it, and maybe on the rows
    they were shown before (`hf.processors` makes them)."""

    def __call__(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """A row (vocab,) in fp32 from the logits (vocab,) after prefix_ids: the whole prompt and what follows it.

        Of a request's own shaper every prefix is one token longer than the last, as in plain generation.
        """
        ...

    def for_draft(self) -> Shaper:
        """A shaper that goes on from here on tokens that may be rejected, and leaves this one as it is."""
        ...

    def only_token(self, prefix_ids: Sequence[int]) -> int | None:
        """The one token that may follow, where no other is allowed."""
        ...


class Sampler:
    """How one request draws.

    Parameters
    ----------
    warp : callable, optional
        Maps logits (n, vocab) to warped logits, for draft and target alike; None is greedy.
    generator : torch.Generator, optional
        On the models' device; every draw advances it.
    shaper : Shaper, optional
        Goes over every row before it is warped. It is advanced by every row of the target that counts.
    """

    def __init__(
        self,
        warp: Warp | None = None,
        generator: torch.Generator | None = None,
        shaper: Shaper | None = None,
    ) -> None:
        self._warp = warp
        self._generator = generator
        self.shaper = shaper

    @property
    def is_greedy(self) -> bool:
        return self._warp is None

    @property
    def device(self) -> torch.device:
        """Where the draws are made."""
        return self._generator.device if self._generator is not None else torch.device("cpu")

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Warped distributions (n, vocab) in fp32. Only when sampling."""
        if self._warp is None:
            raise ValueError("a greedy sampler has no distribution")
        return self.warp(logits).softmax(dim=-1)

    def warp(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab) in fp32 as tokens are drawn from them; those of a greedy request are left as they are."""
        logits = logits.float()
        return logits if self._warp is None else self._warp(logits)

    def draw(self, logits: torch.Tensor) -> tuple[int, torch.Tensor]:
        """One token from one row of logits (vocab,), and the distribution it was drawn from."""
        probs = self.probs(logits[None])[0]
        return self.pick(probs), probs

    def pick(self, weights: torch.Tensor) -> int:
        """An index drawn in proportion to weights (vocab,)."""
        return int(torch.multinomial(weights, 1, generator=self._generator))

    def uniform(self, num: int, device: torch.device) -> torch.Tensor:
        return torch.rand(num, generator=self._generator, device=device)
