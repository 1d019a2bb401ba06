"""The draft's check of a pruned prompt: its own answer must not change when it reads the kept tokens alone.

The draft has read the whole prompt, the target never will: the target's confidence hardly tells what it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from spec_stack.config import PrefillConfig
from spec_stack.controller.base import DraftSignals
from spec_stack.types import Proposal, Selection, SteppableModel, TriedRate

Check = Callable[[Selection], float]
"""The divergence, in nats a token, under what a selection leaves."""
_BITS_PER_NAT = 1.4426950408889634


class Reader(Protocol):
    """An empty view of the draft."""

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor: ...


class DraftAnswer:
    """The draft's greedy answer to a whole prompt, which it is compared with under a part of the prompt.

    Parameters
    ----------
    draft : SteppableModel
        It holds the prompt or a prefix of it, and afterwards the prompt and the answer less its last token.
    prompt_ids : sequence of int
        N tokens.
    max_tokens : int
        Most tokens of the answer, 1 or more.
    end_ids : collection of int
        Tokens that end it.

    Attributes
    ----------
    token_ids : list of int
        The answer, n tokens.
    logprobs : torch.Tensor
        Log-probabilities (n, vocab) under the whole prompt.
    """

    def __init__(
        self, draft: SteppableModel, prompt_ids: Sequence[int], max_tokens: int, end_ids: Collection[int]
    ) -> None:
        draft.rollback(max(0, draft.next_position - (len(prompt_ids) - 1)))
        self.token_ids: list[int] = []
        unseen, rows = list(prompt_ids[draft.next_position :]), []
        while len(self.token_ids) < max_tokens and not (self.token_ids and self.token_ids[-1] in end_ids):
            start = draft.next_position
            rows.append(draft.forward(unseen, range(start, start + len(unseen)), 1)[0].float().log_softmax(-1))
            unseen = [int(rows[-1].argmax())]
            self.token_ids += unseen
        self.logprobs = torch.stack(rows)

    def under(self, reader: Reader, token_ids: Sequence[int], positions: Sequence[int], end: int) -> torch.Tensor:
        """Log-probabilities (n, vocab) of the same answer under a part of the prompt.

        reader: an empty view of the draft. token_ids, positions: what is left of the prompt, with its last token.
        end: the position of the answer's first token.
        """
        num_tokens = len(self.token_ids)
        forced = [*token_ids, *self.token_ids[:-1]]
        part = reader.forward(forced, [*positions, *range(end, end + num_tokens - 1)], num_tokens)
        return part.float().log_softmax(-1)

    def divergence(self, reader: Reader, token_ids: Sequence[int], positions: Sequence[int], end: int) -> float:
        """Mean divergence of the answer's tokens, whole from part, in nats; NaN where logits are. As `under`."""
        return mean_divergence(self.logprobs, self.under(reader, token_ids, positions, end))

    def proposal(self) -> Proposal:
        """The answer as a proposal for the target."""
        signals = DraftSignals()
        for row in self.logprobs:
            signals.append(float(torch.special.entr(row.exp()).sum()) * _BITS_PER_NAT, float(row.max().exp()))
        return Proposal(list(self.token_ids), signals=signals)


def mean_divergence(whole: torch.Tensor, part: torch.Tensor) -> float:
    """Mean over n rows of the divergence of log-probabilities (n, vocab), in nats; ids without a row's mass count 0."""
    # A vocabulary that is padded with -inf has no difference there.
    differences = torch.where(whole.isneginf(), 0.0, whole - part)
    return float((whole.exp() * differences).sum(-1).mean())


def checked_selection(
    config: PrefillConfig,
    num_new_tokens: int,
    select: Callable[[PrefillConfig], Selection],
    everything: Callable[[], Selection],
    check: Check,
    prunes: bool = True,
) -> Selection:
    """The first selection under which the draft's answer holds: at the keep rate, at the higher `check_rates`, at last
    everything. Its `tried` has the divergence of each.

    num_new_tokens: the length that the keep rate is for. select: by a configuration. prunes: whether a keep rate
    applies; else one selection is tried.
    """
    tried: list[TriedRate] = []
    for rate in rates_to_try(config, num_new_tokens)[: None if prunes else 1]:
        selection = select(replace(config, keep_rate=rate) if tried else config)
        if selection.keep_rate == 1:
            return replace(selection, tried=tuple(tried))
        divergence = check(selection)
        tried.append(TriedRate(rate if prunes else selection.keep_rate, divergence))
        # Not a number is no agreement.
        if config.max_divergence is not None and divergence <= config.max_divergence:
            return replace(selection, tried=tuple(tried))
    return replace(everything(), tried=tuple(tried))


def rates_to_try(config: PrefillConfig, num_tokens: int) -> list[float]:
    """The keep rate for so many tokens, and the higher `check_rates`."""
    first = config.rate_for(num_tokens)
    return [first, *(rate for rate in config.check_rates if rate > first)]


def told(tried: Sequence[TriedRate], is_pruned: bool, reason: str) -> str:
    """The reason of a prompt with what the check found."""
    if not tried:
        return reason
    failed = tried[:-1] if is_pruned else tried
    if not failed:
        return f"{reason}; the draft's answer changed by {tried[-1].divergence:.2g} nats a token"
    at = ", ".join(f"{each.divergence:.2g} nats a token at {each.keep_rate:.2g}" for each in failed)
    kept = f"{reason}; {tried[-1].keep_rate:.2g} kept" if is_pruned else "off"
    return f"{kept}: the draft's answer changed, {at}"
