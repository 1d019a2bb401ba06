"""From importance over a whole conversation to what the target prefills in a turn. Pure.

New text is selected as a prompt is, by itself. Of the text before it, chunks that were dropped and that this turn's
queries want come back: the draft has kept its keys of everything, so it can tell.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import zip_longest

import torch

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.selection import select
from spec_stack.types import Selection


def clip_spans(spans: Sequence[Span], start: int) -> list[Span]:
    """What half-open spans cover from `start` on, counted from there."""
    return [(max(first, start) - start, stop - start) for first, stop in spans if stop > start]


def dropped_positions(held: Collection[int], num_cached: int) -> list[int]:
    """The positions under num_cached that are not held, in order."""
    is_dropped = bytearray(b"\x01") * num_cached
    for position in held:
        if position < num_cached:
            is_dropped[position] = 0
    return [position for position, dropped in enumerate(is_dropped) if dropped]


def recall(
    importance: torch.Tensor,
    dropped: Sequence[int],
    num_cached: int,
    chunk_size: int,
    config: SessionConfig,
    anchors: torch.Tensor | None = None,
    room: float = math.inf,
) -> list[int]:
    """Which dropped positions come back: those of chunks that attention wants, or that share words with the new text.

    Parameters
    ----------
    importance : torch.Tensor
        (num_prompt_tokens,), of the whole conversation.
    dropped : sequence of int
        Positions under num_cached that the target lacks.
    num_cached : int
        Tokens of earlier turns.
    chunk_size : int
        Tokens per chunk.
    config : SessionConfig
        How much a chunk must be worth, and how many are looked at.
    anchors : torch.Tensor, optional
        (num_chunks or more,): what every chunk shares with the new text, by `chunks.anchor_scores`.
    room : float
        Most positions that may come back; chunks that both sides rank lower give way.

    Returns
    -------
    list of int
        Increasing.
    """
    num_chunks = math.ceil(num_cached / chunk_size)
    old = importance[:num_cached].float()
    sums = (
        torch.nn.functional.pad(old, (0, num_chunks * chunk_size - num_cached)).reshape(num_chunks, chunk_size).sum(1)
    )
    sizes = torch.full((num_chunks,), chunk_size)
    sizes[-1] = num_cached - (num_chunks - 1) * chunk_size
    worth = sums / sizes.to(sums.device)
    least = config.restore_threshold * float(importance.float().mean())
    wanted = _best(worth, least, config.max_restored_chunks)
    shared: list[int] = []
    if anchors is not None and config.anchor_threshold is not None:
        shared = _best(anchors[:num_chunks], config.anchor_threshold, config.max_restored_chunks)
    is_dropped = bytearray(num_cached)
    for position in dropped:
        is_dropped[position] = 1
    restored: set[int] = set()
    for chunk in (chunk for both in zip_longest(shared, wanted) for chunk in both if chunk is not None):
        start = max(0, chunk * chunk_size - config.restore_margin)
        stop = min(num_cached, (chunk + 1) * chunk_size + config.restore_margin)
        more = restored.union(position for position in range(start, stop) if is_dropped[position])
        if len(more) <= room:
            restored = more
    return sorted(restored)


def _best(votes: torch.Tensor, least: float, most: int) -> list[int]:
    """The chunks with the most votes, `most` of them, as far as they have `least`, best first; ties go to the earlier
    one."""
    ranked = torch.argsort(votes, descending=True, stable=True)[:most]
    return [chunk for chunk, value in zip(ranked.tolist(), votes[ranked].tolist(), strict=True) if value >= least]


def select_turn(
    prompt_ids: Sequence[int],
    held: Sequence[int],
    num_cached: int,
    restored: Sequence[int] = (),
    importance: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
    protected: Sequence[Span] = (),
) -> Selection:
    """What the target prefills in a turn: what comes back of the old text, then what is kept of the new.

    Parameters
    ----------
    prompt_ids : sequence of int
        The whole conversation.
    held : sequence of int
        Positions that the target's cache holds, all under num_cached.
    num_cached : int
        Tokens of earlier turns.
    restored : sequence of int
        Positions among them that come back, increasing.
    importance, config
        Of the whole conversation, and how new text is pruned; None keeps all of it.
    protected : sequence of (int, int)
        Half-open spans of the conversation that are never dropped.
    """
    new = prompt_ids[num_cached:]
    kept: Sequence[int] = range(num_cached, len(prompt_ids))
    if importance is not None and config is not None:
        part = select(new, importance[num_cached:], config, clip_spans(protected, num_cached))
        kept = [num_cached + position for position in part.positions]
    positions = [*restored, *kept]
    return Selection(
        token_ids=[prompt_ids[position] for position in positions],
        positions=positions,
        num_prompt_tokens=len(prompt_ids),
        num_restored=len(restored),
        num_held=len(held),
    )
