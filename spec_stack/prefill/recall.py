"""From importance over a whole conversation to the target's prefill in a turn. Pure.

`recall_dropped` picks dropped old segments that the new text refers to; `select_turn` puts them before the kept new
text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import torch

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.question import score_for_recall
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments, make_segments
from spec_stack.prefill.selection import select
from spec_stack.types import Selection

RecallPlace = Literal["last", "in_text"]
"""Slots of recalled tokens. "last": behind all others, of which later text is hidden from them. "in_text": in text
order."""


def recall_dropped(
    inputs: ScoringInputs, held: Sequence[int], num_old: int, prefill: PrefillConfig, config: SessionConfig
) -> list[int]:
    """Recalled positions of a conversation, increasing; by words alone where the rule had no attention.

    held: old positions that the target has. num_old: length of the old text.
    """
    if not config.recall or len(held) == num_old:
        return []
    segments = make_segments(num_old, inputs.pieces and inputs.pieces[:num_old], prefill)
    words = None if config.recall_word_threshold is None else score_for_recall(inputs, segments)
    return recall(inputs.importance, held, segments, prefill, config, words)


def recall(
    importance: torch.Tensor | None,
    held: Sequence[int],
    segments: Segments,
    prefill: PrefillConfig,
    config: SessionConfig,
    words: torch.Tensor | None = None,
) -> list[int]:
    """Recalled positions, increasing: dropped segments with high attention, or words in common with the new text.

    importance: (num_prompt_tokens,), of the whole conversation. held: old positions that the target has. segments: of
    the old text. words: (num_segments,), of `score_for_recall`.
    """
    most_tokens = config.max_recalled_chunks * prefill.chunk_size
    wanted: list[int] = []
    if importance is not None:
        wanted += _by_attention(importance, segments, config.recall_threshold, most_tokens)
    if words is not None and config.recall_word_threshold is not None:
        wanted += _best(words, config.recall_word_threshold, segments, most_tokens)
    return sorted(segments.with_heads(wanted).difference(held))


def _by_attention(importance: torch.Tensor, segments: Segments, threshold: float, most_tokens: int) -> list[int]:
    """Segments whose mean importance is at least `threshold` times that of the old text, best first."""
    old, owner = importance[: segments.num_tokens].float(), segments.owner.to(importance.device)
    sums = torch.zeros(len(segments), device=old.device).index_add_(0, owner, old)
    worth = sums / torch.bincount(owner, minlength=len(segments))
    # Rounding decides no tie: a text of one segment has the mean of the text.
    least = threshold * float(old.mean()) * (1 - 1e-6)
    # Without any attention to the old text, every segment would reach a threshold of 0.
    return _best(worth, least, segments, most_tokens) if least or not threshold else []


def _best(votes: torch.Tensor, least: float, segments: Segments, most_tokens: int) -> list[int]:
    """Segments with at least `least` votes, until they hold most_tokens; ties go to the earlier segment."""
    ranked = torch.argsort(votes, descending=True, stable=True).cpu()
    sizes = torch.tensor(segments.borders).diff()[ranked]
    ranked = ranked[sizes.cumsum(0) - sizes < most_tokens]
    values = votes[ranked.to(votes.device)].tolist()
    return [segment for segment, value in zip(ranked.tolist(), values, strict=True) if value >= least]


def select_turn(
    inputs: ScoringInputs,
    held: Sequence[int],
    num_cached: int,
    recalled: Sequence[int] = (),
    config: PrefillConfig | None = None,
    place: RecallPlace = "last",
) -> Selection:
    """Select the target's prefill in a turn: recalled old text, then the kept new text.

    held: positions in the cache, in write order. recalled: increasing. config: None keeps all of the new text. The
    selection's num_held says how many held slots stay; the others are rolled back, and are part of it.
    """
    num_unchanged = bisect_left(held, recalled[0]) if recalled and place == "in_text" else len(held)
    back = sorted([*held[num_unchanged:], *recalled])
    prompt_ids = inputs.prompt_ids
    kept: Sequence[int] = range(num_cached, len(prompt_ids))
    if config is not None:
        part = select(inputs.starting_at(num_cached), config)
        kept = [num_cached + position for position in part.positions]
    positions = [*back, *kept]
    return Selection(
        token_ids=[prompt_ids[position] for position in positions],
        positions=positions,
        num_prompt_tokens=len(prompt_ids),
        num_recalled=len(recalled),
        num_held=num_unchanged,
        num_recomputed=len(back) - len(recalled),
    )
