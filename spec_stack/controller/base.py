"""The base class of policies, with the context before a step and the record after it. Loads no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from spec_stack.config import MAX_GAMMA


@dataclass(slots=True)
class DraftSignals:
    """The draft's own view of the tokens it drafted, one entry per token, in order.

    entropy: of the draft's unwarped next-token distribution, in bits. confidence: the largest probability of that
    distribution.
    """

    entropy: list[float] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.entropy)

    def append(self, entropy: float, confidence: float) -> None:
        self.entropy.append(entropy)
        self.confidence.append(confidence)


# Not frozen: a server makes one per request and step, and frozen dataclasses cost four times as much.
@dataclass(slots=True)
class StepRecord:
    """One step of one request: a proposal and its verification.

    Parameters
    ----------
    request_id, policy, task : str
        Labels. A run, in files of records, is one request under one policy.
    step : int
        Counts from 0, the prefill step.
    precision : str
        The target's.
    is_prefill : bool
        The step that prefills the target. Its gamma is the look-ahead, its draft_s what scoring the prompt took, and
        its verify_s holds the target's prefill.
    keep_rate : float
        Share of the prompt that the target prefilled.
    gamma : int
        Proposed tokens, at most what the policy chose.
    num_accepted : int
        Proposed tokens that the target agreed with.
    num_tokens : int
        Output tokens: num_accepted + 1, less what EOS, a stop string or max_tokens cut off.
    signals : DraftSignals
        One entry per token that the draft proposed; empty where they were not measured.
    draft_s : float
        Seconds of the draft's forwards, catching up included.
    verify_s : float
        Seconds of the target's forward and the acceptance test. NaN where unknown, as on a server after a
        prefill: such a record updates acceptance alone.
    policy_s : float
        Seconds in the policy.
    draft_prefilled_prompt : bool
        The draft prefilled the whole prompt in this step, as the first one that drafts after a dense prefill does; its
        draft_s says nothing of later ones.
    num_recomputed : int
        Tokens that the target recomputed in this step because a rollback had undone its recurrent state (0 for models
        without one); verify_s has their cost.
    draft_lag : int
        Tokens that the draft was fed before it could draft in this step, the last committed one included; 0 where it
        drafted nothing. draft_s has their cost.
    proposer : str
        The source: "model", "ngram", or "model+ngram", the draft first. Meaningless where gamma is 0.
    num_ngram_tokens : int
        Proposed tokens that were looked up, the last ones of the proposal.
    num_target_slots, num_draft_slots, num_prefilled : int
        As in `StepContext`, and the tokens that the target took in in a prefill step; 0 where they are not counted.
    """

    request_id: str
    step: int
    policy: str
    precision: str
    task: str
    is_prefill: bool
    keep_rate: float
    gamma: int
    num_accepted: int
    num_tokens: int
    signals: DraftSignals
    draft_s: float
    verify_s: float
    policy_s: float
    draft_prefilled_prompt: bool = False
    num_recomputed: int = 0
    draft_lag: int = 0
    proposer: str = "model"
    num_ngram_tokens: int = 0
    num_target_slots: int = 0
    num_draft_slots: int = 0
    num_prefilled: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step; NaN where they are unknown."""
        return self.draft_s + self.verify_s + self.policy_s

    @property
    def num_drafted(self) -> int:
        """Proposed tokens that the draft model made, the first ones of the proposal."""
        return self.gamma - self.num_ngram_tokens

    @property
    def num_drafted_accepted(self) -> int:
        """Accepted tokens among `num_drafted`."""
        return min(self.num_accepted, self.num_drafted)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request in a server's step. max_gamma: the most tokens of its proposal that may be accepted."""

    request_id: str
    max_gamma: int = MAX_GAMMA


@dataclass(frozen=True, slots=True)
class StepContext:
    """Everything known before a step. A policy never sees the signals of the step it is choosing.

    Parameters
    ----------
    step : int
        The number of the step that begins.
    max_gamma : int
        Most tokens that can still be used: one less than the request has left, since the target adds one of its own.
        A policy may exceed it: the caller cuts its choice.
    last : StepRecord or None
        What the step before did; on a server, a step of any request of the batch.
    precision, task : str
        The target's precision, and the request's label.
    batch_size : int
        Requests that take the step together, or the size of the captured graph that they run in; 1 outside a server.
    draft_lag : int
        Committed tokens that the draft has not been fed, and has to be before it can draft: 1 in the usual step, the
        whole prompt after a dense prefill. 0 where they are not counted.
    num_target_slots, num_draft_slots : int
        Tokens that the target attends to in this step, and that the draft attends to after catching up; 0 where
        they are not counted. On a server the first is the mean of its requests'.
    members : tuple of BatchRequest
        The requests of a server's step, at most batch_size of them; empty where they are not known.
    """

    step: int
    max_gamma: int
    last: StepRecord | None
    precision: str
    task: str = ""
    batch_size: int = 1
    draft_lag: int = 0
    members: tuple[BatchRequest, ...] = ()
    num_target_slots: int = 0
    num_draft_slots: int = 0


class Policy(ABC):
    """Decides how many tokens are drafted per step. A subclass writes `choose`; the rest is optional.

    Called once per step and once per drafted token, by one request at a time; learned state carries over to the next
    request. The caller cuts its choice to `StepContext.max_gamma`. Make it a dataclass whose fields are its options,
    checked in `__post_init__`; docs/add-a-policy.md has an example.

    Attributes
    ----------
    name : str
        Written to every record, so policies with different options need different names to be distinguished in one
        file. Defaults to the class's name.
    """

    name: str

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    # Any: `StepTimes` reads this module's records.
    def use(self, times: Any) -> None:  # noqa: B027
        """Take the pair's `StepTimes`, which n-gram lookup reads too; called before every request, optional."""

    @abstractmethod
    def choose(self, context: StepContext) -> int:
        """The most tokens to propose now.

        Parameters
        ----------
        context : StepContext
            What is known before the step.

        Returns
        -------
        int
            0 is plain decoding; values over `context.max_gamma` are cut to it.
        """

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        """Return whether to draft one token more; called after every drafted token but the last.

        Parameters
        ----------
        context : StepContext
            What `choose` was shown.
        signals : DraftSignals
            Of the tokens drafted so far in this step.
        """
        return True

    def observe(self, record: StepRecord) -> None:  # noqa: B027
        """Learn from a step's record, the prefill step (`record.is_prefill`) included; optional."""


def chosen_gamma(policy: Policy, context: StepContext) -> int:
    """The policy's gamma, cut to the request's and the library's bounds. Raises TypeError where it is no number."""
    gamma = policy.choose(context)
    if not isinstance(gamma, Integral):
        kind = type(policy).__name__
        raise TypeError(f"choose() of the policy {policy.name!r} ({kind}) must give a whole number, got {gamma!r}")
    return max(0, min(int(gamma), context.max_gamma, MAX_GAMMA))


def check_gamma(name: str, gamma: object, least: int = 0) -> None:
    """Raise ValueError unless gamma is a whole number from `least` to MAX_GAMMA."""
    if not isinstance(gamma, int) or isinstance(gamma, bool) or not least <= gamma <= MAX_GAMMA:
        raise ValueError(f"{name} must be a whole number, {least} to {MAX_GAMMA}, got {gamma!r}")


def check_gammas(name: str, gammas: Sequence[int], least: int = 0) -> None:
    """Raise ValueError unless gammas holds one valid gamma or more."""
    if not gammas or any(not least <= gamma <= MAX_GAMMA for gamma in gammas):
        raise ValueError(f"{name} must be one or more of {least} to {MAX_GAMMA}, got {gammas}")
