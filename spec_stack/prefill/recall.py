"""Picks dropped old segments that the new text of a turn refers to. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.question import score_for_recall
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments, make_segments


def recall_dropped(
    inputs: ScoringInputs, cached: Sequence[int], num_old: int, prefill: PrefillConfig, config: SessionConfig
) -> list[int]:
    """`recall` by a rule's inputs; by words alone where it had no attention. num_old: length of the old text."""
    segments = make_segments(num_old, inputs.pieces, prefill)
    words = None if config.recall_word_threshold is None else score_for_recall(inputs, segments)
    return recall(inputs.importance, cached, segments, prefill, config, words)


def recall(
    importance: torch.Tensor | None,
    cached: Sequence[int],
    segments: Segments,
    prefill: PrefillConfig,
    config: SessionConfig,
    words: torch.Tensor | None = None,
) -> list[int]:
    """Recalled positions, increasing: dropped segments with high attention, or words in common with the new text.

    importance: (num_prompt_tokens,), of the whole conversation. cached: old positions that the target has. segments: of
    the old text. words: (num_segments,), of `score_for_recall`.
    """
    most_tokens = config.max_recalled_chunks * prefill.chunk_size
    wanted: list[int] = []
    if importance is not None:
        wanted += _by_attention(importance, segments, config.recall_threshold, most_tokens)
    if words is not None and config.recall_word_threshold is not None:
        wanted += _best(words, config.recall_word_threshold, segments, most_tokens)
    return sorted(segments.with_heads(wanted).difference(cached))


def _by_attention(importance: torch.Tensor, segments: Segments, threshold: float, most_tokens: int) -> list[int]:
    """Segments whose mean importance is at least `threshold` times that of the old text, best first."""
    old, owner = importance[: segments.num_tokens].float(), segments.owner.to(importance.device)
    sums = torch.zeros(len(segments), device=old.device).index_add_(0, owner, old)
    means = sums / torch.bincount(owner, minlength=len(segments))
    # Rounding decides no tie: a text of one segment has the mean of the text.
    least = threshold * float(old.mean()) * (1 - 1e-6)
    # Without any attention to the old text, every segment would reach a threshold of 0.
    return _best(means, least, segments, most_tokens) if least or not threshold else []


def _best(scores: torch.Tensor, least: float, segments: Segments, most_tokens: int) -> list[int]:
    """Segments with scores of at least `least`, until they hold most_tokens; ties go to the earlier segment."""
    ranked = torch.argsort(scores, descending=True, stable=True).cpu()
    sizes = torch.tensor(segments.borders).diff()[ranked]
    ranked = ranked[sizes.cumsum(0) - sizes < most_tokens]
    values = scores[ranked.to(scores.device)].tolist()
    return [segment for segment, value in zip(ranked.tolist(), values, strict=True) if value >= least]
