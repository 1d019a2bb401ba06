"""The protocol of proposers, their parts, and their view of the policy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Protocol

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord
from spec_stack.controller.ngram import NgramPolicy
from spec_stack.decode.clock import Clock
from spec_stack.decode.ngram_index import NgramIndex
from spec_stack.decode.sampler import Sampler
from spec_stack.types import Proposal, SteppableModel


@dataclass(frozen=True)
class ProposerInputs:
    """The parts of proposers.

    draft: its cache is advanced. sampler: draws the draft's tokens. end_ids: tokens after which nothing is proposed.
    ngram_policy: decides when n-gram lookup pays. index: the text so far, for it.
    """

    draft: SteppableModel
    sampler: Sampler
    end_ids: Collection[int]
    ngram_policy: NgramPolicy
    index: NgramIndex = field(default_factory=NgramIndex)


@dataclass(frozen=True)
class StepPolicy:
    """A step's policy for proposers: timed as controller time, bounded by the request's remaining tokens."""

    policy: Policy
    context: StepContext
    clock: Clock

    def choose(self) -> int:
        """The policy's gamma, cut to the request's and the library's bounds. Raises TypeError where it is no number."""
        with self.clock.measure("controller"):
            gamma = self.policy.choose(self.context)
        if not isinstance(gamma, Integral):
            kind = type(self.policy).__name__
            raise TypeError(
                f"choose() of the policy {self.policy.name!r} ({kind}) must give a whole number, got {gamma!r}"
            )
        return max(0, min(int(gamma), self.context.max_gamma, MAX_GAMMA))

    def keep_drafting(self, signals: DraftSignals) -> bool:
        """Return whether the policy wants one token more."""
        with self.clock.measure("controller"):
            return self.policy.keep_drafting(self.context, signals)

    def chances(self, signals: DraftSignals) -> tuple[float, float]:
        """The policy's P(all drafted tokens are right), and P(these and the next one are)."""
        with self.clock.measure("controller"):
            return self.policy.chances(signals)


class Proposer(Protocol):
    """Proposes tokens for verification.

    A proposed token, and whether there is one, may depend only on the tokens before it: a proposal that is cut by what
    was drawn after the cut biases the output.
    """

    def propose(self, committed_ids: Sequence[int], guide: StepPolicy) -> Proposal:
        """The tokens to verify in a step. committed_ids: the whole prompt and the output so far."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Learn from the step's record."""
        ...
