"""From importance over a whole conversation to the target's prefill in a turn. Pure.

`recall` picks dropped old units that the new text refers to; `select_turn` puts them before the kept new text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import zip_longest

import torch

from spec_stack.config import MOST_REWRITTEN, PrefillConfig, SessionConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.queries import Candidates
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.selection import select
from spec_stack.prefill.units import Units
from spec_stack.prefill.words import MAX_OCCURRENCES, add_votes, rare_words
from spec_stack.types import Selection

# Where no segment has a question mark: tokens at the end of the new text that are its question, the half-life of a
# word's weight, and those whose pairs count.
_MOST_WORDS, _HALF_LIFE, _MOST_PAIRED = 96, 12, 32
# Most tokens between the words of a pair; a word that occurs more than once in so many units is too common.
_NEAR = 8
_COMMON_SHARE = 4


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


def recall(
    importance: torch.Tensor,
    dropped: Sequence[int],
    units: Units,
    prefill: PrefillConfig,
    config: SessionConfig,
    words: torch.Tensor | None = None,
    room: float = math.inf,
) -> list[int]:
    """Recalled positions, increasing: dropped units with high attention, or words in common with the new text.

    importance: (num_prompt_tokens,), of the whole conversation. dropped: old positions that the target lacks. units: of
    the old text. words: (num_units,), of `shared_words`. room: most recalled positions; lower-ranked units give way.
    """
    num_cached, num_units = units.num_tokens, len(units)
    old, owner = importance[:num_cached].float(), units.owner.to(importance.device)
    sums = torch.zeros(num_units, device=old.device).index_add_(0, owner, old)
    worth = sums / torch.bincount(owner, minlength=num_units)
    least = config.restore_threshold * float(old.mean())
    most = config.max_restored_chunks, prefill.chunk_size
    # Without any attention to the old text, every unit would reach a threshold of 0.
    wanted = _best(worth, least, units, *most) if least or not config.restore_threshold else []
    shared: list[int] = []
    if words is not None and config.anchor_threshold is not None:
        shared = _best(words, config.anchor_threshold, units, *most)
    is_dropped = bytearray(num_cached)
    for position in dropped:
        is_dropped[position] = 1
    restored: set[int] = set()
    for unit in (unit for both in zip_longest(shared, wanted) for unit in both if unit is not None):
        start, stop = units.around(unit, config.restore_margin)
        more = restored.union(position for position in range(start, stop) if is_dropped[position])
        if len(more) <= room:
            restored = more
    return sorted(restored)


def _best(votes: torch.Tensor, least: float, units: Units, num_chunks: int, chunk_size: int) -> list[int]:
    """Units with at least `least` votes, up to num_chunks chunks of tokens, best first; ties go to the earlier unit."""
    ranked = units.leading(torch.argsort(votes, descending=True, stable=True).cpu(), num_chunks, chunk_size)
    values = votes[ranked.to(votes.device)].tolist()
    return [unit for unit, value in zip(ranked.tolist(), values, strict=True) if value >= least]


def shared_words(prompt_ids: Sequence[int], units: Units, found: Candidates) -> torch.Tensor:
    """Scores (num_units,): words of every old unit in common with the new text's question.

    The larger of rare n-grams and of common words side by side. Where no segment of the new text has a question mark,
    its end is the question.
    """
    num_tokens, num_old = len(prompt_ids), units.num_tokens
    marked = [
        (max(start, num_old), stop)
        for (start, stop), mark in zip(found.segments, found.is_question, strict=True)
        if mark and stop > num_old
    ]
    if marked:
        scores = [rare_words(prompt_ids, span, units) for span in marked]
        scores += [pair_scores(prompt_ids, span, units) for span in marked]
    else:
        start = max(num_old, num_tokens - _MOST_WORDS)
        half_life = math.inf if start == num_old else _HALF_LIFE
        scores = [rare_words(prompt_ids, (start, num_tokens), units, half_life)]
        scores += [pair_scores(prompt_ids, (max(num_old, num_tokens - _MOST_PAIRED), num_tokens), units)]
    return torch.stack(scores).amax(dim=0)


def pair_scores(prompt_ids: Sequence[int], question: Span, units: Units) -> torch.Tensor:
    """Scores (num_units,): pairs of question words, in any order, that stand together in a unit. No model.

    Two different question tokens within 8 tokens of each other, at most 4 times in the text, give 1 divided by that
    count to each unit that the place touches. So a line is found that shares several common words with the question. A
    token with more than 4 occurrences, and more than one per four units, does not count. The question must be short:
    all its pairs count.
    """
    ids, num_units = torch.as_tensor(prompt_ids), len(units)
    body, words = ids[: units.num_tokens], torch.unique(ids[slice(*question)])
    scores = torch.zeros(num_units, dtype=torch.float64)
    if len(words) < 2 or not num_units:
        return scores.float()
    found = torch.searchsorted(words, body).clamp(max=len(words) - 1)
    is_word = words[found] == body
    times = torch.bincount(found[is_word], minlength=len(words))
    is_rare = times <= max(MAX_OCCURRENCES, num_units // _COMMON_SHARE)
    places = torch.nonzero(is_word & is_rare[found])[:, 0]
    named = found[places]
    firsts, lasts, pairs = [], [], []
    for step in range(1, min(_NEAR, len(places) - 1) + 1):
        meet = (places[step:] - places[:-step] <= _NEAR) & (named[step:] != named[:-step])
        one, other = named[:-step][meet], named[step:][meet]
        firsts.append(places[:-step][meet])
        lasts.append(places[step:][meet])
        pairs.append(torch.minimum(one, other) * len(words) + torch.maximum(one, other))
    if not firsts:
        return scores.float()
    first, last = torch.cat(firsts), torch.cat(lasts)
    _, which, counts = torch.unique(torch.cat(pairs), return_inverse=True, return_counts=True)
    is_told = counts[which] <= MAX_OCCURRENCES
    first, last, votes = first[is_told], last[is_told], 1.0 / counts[which][is_told].double()
    add_votes(scores, units, first, last, votes)
    return scores.float()


def order_slots(
    held: Sequence[int],
    restored: Sequence[int],
    num_cached: int,
    lost: Sequence[int] = (),
    in_place: bool = False,
) -> tuple[int, list[int]]:
    """How many held slots stay, and the positions written behind them, increasing.

    Recalled text helps little behind a question and answers that were written without it; rewriting from its own place
    is dear where that is early. Rewriting behind everything that was dropped, or the last MOST_REWRITTEN slots, answers
    as well (experiments/LOG.md, Sessions).

    held: positions in the cache, in write order. restored: recalled positions, none of them held. lost: positions to be
    prefilled again. in_place: recalled tokens are written in text order (contiguous positions).
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

    held: positions in the target's cache, all under num_cached, in write order. restored: recalled positions. config:
    None keeps all of the new text. lost: positions that a cancelled turn has left out. in_place: as in `order_slots`.
    The selection's num_held says how many held slots stay; the others are rolled back, and are part of it.
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
