"""From importance over a whole conversation to the target's prefill in a turn. Pure.

`recall_dropped` picks dropped old units that the new text refers to; `select_turn` puts them before the kept new text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import zip_longest

import torch

from spec_stack.config import MOST_REWRITTEN, PrefillConfig, SessionConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.selection import select
from spec_stack.prefill.units import Units, make_units
from spec_stack.prefill.words import shared_words
from spec_stack.types import Selection


def clip_spans(spans: Sequence[Span], start: int) -> list[Span]:
    """Half-open spans from `start` on, counted from there."""
    return [(max(first, start) - start, stop - start) for first, stop in spans if stop > start]


def dropped_positions(held: Collection[int], num_cached: int) -> list[int]:
    """The positions under num_cached that are not held, in order."""
    is_dropped = bytearray(b"\x01") * num_cached
    for position in held:
        if position < num_cached:
            is_dropped[position] = 0
    return [position for position, dropped in enumerate(is_dropped) if dropped]


def recall_dropped(
    evidence: Evidence,
    dropped: Sequence[int],
    num_old: int,
    prefill: PrefillConfig,
    config: SessionConfig,
    room: float = math.inf,
) -> list[int]:
    """Recalled positions of a conversation, increasing; by words alone where the rule had no attention.

    dropped: old positions that the target lacks. num_old: length of the old text. room: most recalled positions.
    """
    if not (dropped and config.restore and config.max_restored_chunks):
        return []
    units = make_units(num_old, evidence.pieces and evidence.pieces[:num_old], prefill)
    words = None
    if config.anchor_threshold is not None:
        words = shared_words(evidence.prompt_ids, units, evidence.candidates)
    importance = evidence.importance
    if importance is None and evidence.attention is not None:
        importance = evidence.attention.importance(prefill)
    return recall(importance, dropped, units, prefill, config, words, room)


def recall(
    importance: torch.Tensor | None,
    dropped: Sequence[int],
    units: Units,
    prefill: PrefillConfig,
    config: SessionConfig,
    words: torch.Tensor | None = None,
    room: float = math.inf,
) -> list[int]:
    """Recalled positions, increasing: dropped units with high attention, or words in common with the new text.

    importance: (num_prompt_tokens,), of the whole conversation. dropped: old positions that the target lacks. units: of
    the old text. words: (num_units,), of `shared_words`. room: most recalled positions.
    """
    most = config.max_restored_chunks, prefill.chunk_size
    wanted = [] if importance is None else _by_attention(importance, units, config.restore_threshold, *most)
    shared: list[int] = []
    if words is not None and config.anchor_threshold is not None:
        shared = _best(words, config.anchor_threshold, units, *most)
    is_dropped = bytearray(units.num_tokens)
    for position in dropped:
        is_dropped[position] = 1
    restored: set[int] = set()
    for unit in (unit for both in zip_longest(shared, wanted) for unit in both if unit is not None):
        start, stop = units.around(unit, config.restore_margin)
        more = restored.union(position for position in range(start, stop) if is_dropped[position])
        if len(more) <= room:
            restored = more
    return sorted(restored)


def _by_attention(
    importance: torch.Tensor, units: Units, threshold: float, num_chunks: int, chunk_size: int
) -> list[int]:
    """Units whose mean importance is at least `threshold` times that of the old text, best first."""
    old, owner = importance[: units.num_tokens].float(), units.owner.to(importance.device)
    sums = torch.zeros(len(units), device=old.device).index_add_(0, owner, old)
    worth = sums / torch.bincount(owner, minlength=len(units))
    least = threshold * float(old.mean())
    # Without any attention to the old text, every unit would reach a threshold of 0.
    return _best(worth, least, units, num_chunks, chunk_size) if least or not threshold else []


def _best(votes: torch.Tensor, least: float, units: Units, num_chunks: int, chunk_size: int) -> list[int]:
    """Units with at least `least` votes, up to num_chunks chunks of tokens, best first; ties go to the earlier unit."""
    ranked = units.leading(torch.argsort(votes, descending=True, stable=True).cpu(), num_chunks, chunk_size)
    values = votes[ranked.to(votes.device)].tolist()
    return [unit for unit, value in zip(ranked.tolist(), values, strict=True) if value >= least]


def order_slots(
    held: Sequence[int],
    restored: Sequence[int],
    num_cached: int,
    lost: Sequence[int] = (),
    in_place: bool = False,
) -> tuple[int, list[int]]:
    """How many held slots stay, and the positions written behind them, increasing.

    Recalled text is written behind everything that was dropped, or before the last MOST_REWRITTEN slots; with in_place
    (contiguous positions) in text order. held: positions in the cache, in write order. restored: recalled positions.
    lost: positions to be prefilled again.
    """
    num_staying = len(held)
    if restored and in_place:
        num_staying = bisect_left(held, restored[0])
    elif restored:
        last_dropped = dropped_positions([*held, *lost], num_cached)[-1]
        num_staying = next((slot for slot, position in enumerate(held) if position > last_dropped), num_staying)
        # After many turns without a drop, all of them would be behind it.
        num_staying = max(num_staying, len(held) - MOST_REWRITTEN)
    return num_staying, sorted([*held[num_staying:], *restored, *lost])


def select_turn(
    evidence: Evidence,
    held: Sequence[int],
    num_cached: int,
    restored: Sequence[int] = (),
    config: PrefillConfig | None = None,
    protected: Sequence[Span] = (),
    lost: Sequence[int] = (),
    in_place: bool = False,
) -> Selection:
    """Select the target's prefill in a turn: recalled old text, then the kept new text.

    config: None keeps all of the new text. The other arguments are those of `order_slots`. The selection's num_held
    says how many held slots stay; the others are rolled back, and are part of it.
    """
    num_staying, back = order_slots(held, restored, num_cached, lost, in_place)
    prompt_ids = evidence.prompt_ids
    kept: Sequence[int] = range(num_cached, len(prompt_ids))
    if config is not None:
        part = select(evidence.starting_at(num_cached), config, clip_spans(protected, num_cached))
        kept = [num_cached + position for position in part.positions]
    positions = [*back, *kept]
    return Selection(
        token_ids=[prompt_ids[position] for position in positions],
        positions=positions,
        num_prompt_tokens=len(prompt_ids),
        num_restored=len(restored),
        num_held=num_staying,
        num_rewritten=len(back) - len(restored),
    )
