"""Who proposes tokens: what a proposer is, what it may ask the policy, and the proposers by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Protocol

from spec_stack.clock import Clock
from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord
from spec_stack.controller.lookup import LookupGate
from spec_stack.decode.lookup_index import LookupIndex
from spec_stack.decode.sampler import Sampler
from spec_stack.types import Proposal, SteppableModel


@dataclass(frozen=True)
class Means:
    """The parts that proposers are made of.

    Parameters
    ----------
    draft : SteppableModel
        The draft, whose cache is advanced by who drafts with it.
    sampler : Sampler
        Draws the draft's tokens.
    end_ids : collection of int
        Tokens after which nothing more is proposed.
    gate : LookupGate
        Says when a look-up pays.
    index : LookupIndex
        Where look-ups look; takes in the text as it is written.
    """

    draft: SteppableModel
    sampler: Sampler
    end_ids: Collection[int]
    gate: LookupGate
    index: LookupIndex = field(default_factory=LookupIndex)


@dataclass(frozen=True)
class Guide:
    """A step's policy, as proposers ask it: on the controller's time, and within what the request has left."""

    policy: Policy
    context: StepContext
    clock: Clock

    def choose(self) -> int:
        """The policy's gamma, cut to what the request and the library allow.

        Raises TypeError where it is no number.
        """
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
        """The policy's chance that all drafted tokens are right, and that they and the next one are."""
        with self.clock.measure("controller"):
            return self.policy.chances(signals)


class Proposer(Protocol):
    """Proposes what may come next. Verification does not care who did.

    A proposal is token ids and what they were drawn from: None, or a one-hot row, for tokens that were chosen. What is
    proposed at a place, and whether anything is, may depend on what stands before that place alone: a proposal that is
    cut by what was drawn after the cut would bias the output.
    """

    def propose(self, committed_ids: Sequence[int], guide: Guide) -> Proposal:
        """The tokens to verify in a step.

        Parameters
        ----------
        committed_ids : sequence of int
            The whole prompt and what was generated.
        guide : Guide
            The policy's answers.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """Told how the step went. Learns, or does nothing."""
        ...
