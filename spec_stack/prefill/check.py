"""The check of a pruned prompt: the draft's own answer must not attend to what is dropped.

The draft has read the whole prompt, the target never will: the target's confidence hardly tells what it has not seen.
How the draft's distributions change under the kept tokens tells less than where it looks (experiments/LOG.md, "The
draft's check, again").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from spec_stack.config import PrefillConfig
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import forced_ends
from spec_stack.types import Selection, TriedRate


def dropped_attention(inputs: ScoringInputs, seen: Iterable[int], config: PrefillConfig) -> float:
    """Share, 0 to 1, of the attention of the draft's answer that falls on tokens which the target does not see.

    Template and protected spans, which are kept in any case, and both ends, where attention sinks are, do not count.
    Without any attention elsewhere the draft has found nothing, and all of it counts as dropped.

    seen: tokens that the target prefills or has. Raises ValueError where the draft has given no answer.
    """
    if inputs.answer_attention is None:
        raise ValueError("the attention of the draft's answer is missing")
    attention = inputs.answer_attention.double().clone()
    for start, stop in inputs.text.kept:
        attention[start:stop] = 0
    attention[sorted(forced_ends(len(attention), config))] = 0
    total = float(attention.sum())
    attention[list(seen)] = 0
    return float(attention.sum()) / total if total else 1.0


def checked_selection(
    config: PrefillConfig,
    num_new_tokens: int,
    select: Callable[[PrefillConfig], Selection],
    everything: Callable[[], Selection],
    dropped: Callable[[Selection], float],
    prunes: bool = True,
) -> Selection:
    """The first selection that drops no more than `max_dropped_attention`: at the keep rate, at the higher
    `check_rates`, at last everything. Its `tried` has what each of them drops.

    num_new_tokens: the length that the keep rate is for. select: by a configuration. dropped: the share of the
    attention that a selection drops. prunes: whether a keep rate applies; else one selection is tried.
    """
    most = config.max_dropped_attention
    if most is None:
        return select(config)
    tried: list[TriedRate] = []
    for rate in rates_to_try(config, num_new_tokens)[: None if prunes else 1]:
        selection = select(replace(config, keep_rate=rate) if tried else config)
        if selection.keep_rate == 1:
            return replace(selection, tried=tuple(tried))
        tried.append(TriedRate(rate if prunes else selection.keep_rate, dropped(selection)))
        if tried[-1].dropped_attention <= most:
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
        return f"{reason}; {tried[-1].dropped_attention:.2g} of the draft's attention is dropped"
    at = ", ".join(f"{each.dropped_attention:.2g} at {each.keep_rate:.2g}" for each in failed)
    kept = f"{reason}; {tried[-1].keep_rate:.2g} kept" if is_pruned else "off"
    return f"{kept}: too much of the draft's attention would be dropped, {at}"
