"""The draft's check of a pruned prompt: its own answer must not change when it reads the kept tokens alone.

The draft has read the whole prompt, the target never will: the target's confidence hardly tells what it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.attention import Parts
from spec_stack.types import Selection, SteppableModel, TriedRate

Check = Callable[[Selection], Parts[float]]
"""Gives, in parts, the divergence in nats a token under what a selection leaves."""
# Steps of the draft in one part: on a scheduler, without graphs, they may take as long as a chunk of a prompt.
_STEPS_PER_PART = 4


class Reader(Protocol):
    """An empty view of the draft."""

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class DraftAnswer:
    """The draft's greedy answer to a whole prompt, which it is compared with under a part of the prompt.

    Attributes
    ----------
    token_ids : list of int
        The answer, n tokens.
    logprobs : torch.Tensor
        Log-probabilities (n, vocab) under the whole prompt.
    """

    token_ids: list[int]
    logprobs: torch.Tensor

    @classmethod
    def drafted(
        cls, draft: SteppableModel, prompt_ids: Sequence[int], max_tokens: int, end_ids: Collection[int]
    ) -> Parts[DraftAnswer]:
        """Draft the answer, in parts.

        draft: it holds the prompt or a prefix of it, and afterwards the prompt and the answer less its last token.
        prompt_ids: N tokens. max_tokens: most tokens of the answer, 1 or more. end_ids: tokens that end it.
        """
        draft.rollback(max(0, draft.next_position - (len(prompt_ids) - 1)))
        answer: list[int] = []
        unseen, rows = list(prompt_ids[draft.next_position :]), []
        while len(answer) < max_tokens and not (answer and answer[-1] in end_ids):
            start = draft.next_position
            rows.append(draft.forward(unseen, range(start, start + len(unseen)), 1)[0].float().log_softmax(-1))
            if len(answer) % _STEPS_PER_PART == 0:
                yield
            unseen = [int(rows[-1].argmax())]
            answer += unseen
        return cls(answer, torch.stack(rows))

    def under(
        self,
        reader: Reader,
        token_ids: Sequence[int],
        positions: Sequence[int],
        end: int,
        most_of_a_part: Callable[[], int] | None = None,
    ) -> Parts[torch.Tensor]:
        """Log-probabilities (n, vocab) of the same answer under a part of the prompt, in parts.

        reader: an empty view of the draft. token_ids, positions: what is left of the prompt, with its last token.
        end: the position of the answer's first token. most_of_a_part: None leaves the parts to the reader.
        """
        num_tokens, first = len(self.token_ids), 0
        forced, at = [*token_ids, *self.token_ids[:-1]], [*positions, *range(end, end + num_tokens - 1)]
        while most_of_a_part is not None and (stop := first + most_of_a_part()) < len(token_ids):
            reader.forward(forced[first:stop], at[first:stop], 1)
            yield
            first = stop
        part = reader.forward(forced[first:], at[first:], num_tokens)
        yield
        return part.float().log_softmax(-1)

    def divergence(self, part: torch.Tensor) -> float:
        """Mean divergence of the answer's tokens from `under` (n, vocab), in nats; NaN where logits are."""
        return mean_divergence(self.logprobs, part)


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
) -> Parts[Selection]:
    """The first selection under which the draft's answer holds: at the keep rate, at the higher `check_rates`, at last
    everything. Its `tried` has the divergence of each. In the check's parts.

    num_new_tokens: the length that the keep rate is for. select: by a configuration. prunes: whether a keep rate
    applies; else one selection is tried.
    """
    tried: list[TriedRate] = []
    for rate in rates_to_try(config, num_new_tokens)[: None if prunes else 1]:
        selection = select(replace(config, keep_rate=rate) if tried else config)
        if selection.keep_rate == 1:
            return replace(selection, tried=tuple(tried))
        divergence = yield from check(selection)
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
