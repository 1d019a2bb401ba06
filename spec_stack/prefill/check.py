"""The check of a pruned prompt: not too much of the prompt's importance may stand in what is dropped.

It costs no forward. What else the draft can tell, its own answer to the kept tokens among it, tells less
(experiments/LOG.md, "The draft's check, again").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from spec_stack.config import PrefillConfig
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import forced_ends
from spec_stack.types import Selection, TriedRate


def dropped_importance(
    inputs: ScoringInputs, seen: Iterable[int], config: PrefillConfig, first_query: int = 0
) -> float:
    """Share, 0 to 1, of the importance of a prompt's tokens that the target does not see.

    Left aside is what is kept without being evidence: the template and protected spans, the question, and both ends,
    where attention sinks are. Without any importance elsewhere the draft has found nothing, and all of it counts as
    dropped.

    seen: tokens that the target prefills or has. first_query: the first token whose segment may hold the question.
    """
    importance = inputs.token_importance(config).double().clone()
    num_tokens = len(importance)
    aside = {*forced_ends(num_tokens, config), *inputs.asked(first_query).tokens}
    aside.update(at for start, stop in inputs.text.kept for at in range(start, stop))
    importance[[at for at in aside if at < num_tokens]] = 0
    total = float(importance.sum())
    importance[list(seen)] = 0
    return float(importance.sum()) / total if total else 1.0


def checked_selection(
    config: PrefillConfig,
    num_new_tokens: int,
    select: Callable[[PrefillConfig], Selection],
    everything: Callable[[], Selection],
    dropped: Callable[[Selection], float],
    prunes: bool = True,
) -> Selection:
    """The first selection that drops no more than `max_dropped_importance`: at the keep rate, at the higher
    `check_rates`, at last everything. Its `tried` has what each of them drops.

    num_new_tokens: the length that the keep rate is for. select: by a configuration. dropped: the importance that a
    selection drops. prunes: whether a keep rate applies; else one selection is tried.
    """
    most = config.max_dropped_importance
    if most is None:
        return select(config)
    tried: list[TriedRate] = []
    for rate in rates_to_try(config, num_new_tokens)[: None if prunes else 1]:
        selection = select(replace(config, keep_rate=rate) if tried else config)
        if selection.keep_rate == 1:
            return replace(selection, tried=tuple(tried))
        tried.append(TriedRate(rate if prunes else selection.keep_rate, dropped(selection)))
        if tried[-1].dropped_importance <= most:
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
        return f"{reason}; {tried[-1].dropped_importance:.2g} of the importance is dropped"
    at = ", ".join(f"{each.dropped_importance:.2g} at {each.keep_rate:.2g}" for each in failed)
    kept = f"{reason}; {tried[-1].keep_rate:.2g} kept" if is_pruned else "off"
    return f"{kept}: too much of the importance would be dropped, {at}"
