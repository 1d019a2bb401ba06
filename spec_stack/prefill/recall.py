"""From importance over a whole conversation to what the target prefills in a turn. Pure.

New text is selected as a prompt is, by itself. Of the text before it, units (whole lines, or chunks) that were dropped
and that this turn's queries want come back: the draft has kept its keys of everything, so it can tell.

How it is used: `recall(importance, dropped, units, ...)` with the units of the old text says which positions come back,
`select_turn` puts them before what is kept of the new text. Sessions and the server ask the same functions.
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

# Where no segment has a question mark: tokens at the end of the new text that are its question, those over which a
# word's weight halves, and those whose pairs count.
_MOST_WORDS, _HALF_LIFE, _MOST_PAIRED = 96, 12, 32
# Words of a question that stand so near to each other belong together; a word that occurs more than once in so many
# units tells too little.
_NEAR = 8
_COMMON_SHARE = 4


def clip_spans(spans: Sequence[Span], start: int) -> list[Span]:
    """Return what half-open spans cover from `start` on, counted from there."""
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
    """Say which dropped positions come back: of units that attention wants, or that share words with the new text.

    Parameters
    ----------
    importance : torch.Tensor
        (num_prompt_tokens,), of the whole conversation.
    dropped : sequence of int
        Positions of the old text that the target lacks.
    units : Units
        Of the old text, which the conversation begins with.
    prefill, config : PrefillConfig, SessionConfig
        How much a unit must be worth, and how many are looked at.
    words : torch.Tensor, optional
        (num_units,): what every unit shares with the new text, by `shared_words`.
    room : float
        Most positions that may come back; units that both sides rank lower give way.

    Returns
    -------
    list of int
        Increasing.
    """
    num_cached, num_units = units.num_tokens, len(units)
    old, owner = importance[:num_cached].float(), units.owner.to(importance.device)
    sums = torch.zeros(num_units, device=old.device).index_add_(0, owner, old)
    worth = sums / torch.bincount(owner, minlength=num_units)
    least = config.restore_threshold * float(old.mean())
    most = config.max_restored_chunks, prefill.chunk_size
    wanted = _best(worth, least, units, *most)
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
    """The units with the most votes, as many as such chunks, as far as they have `least`, best first; ties go to the
    earlier one."""
    ranked = units.leading(torch.argsort(votes, descending=True, stable=True).cpu(), num_chunks, chunk_size)
    values = votes[ranked.to(votes.device)].tolist()
    return [unit for unit, value in zip(ranked.tolist(), values, strict=True) if value >= least]


def shared_words(prompt_ids: Sequence[int], units: Units, found: Candidates) -> torch.Tensor:
    """Scores (num_units,): what every unit of the old text shares with the question of the new text.

    Rare words in a row, or common ones side by side, whichever says more.

    Parameters
    ----------
    prompt_ids
        The whole conversation.
    units
        Of the old text, which it begins with.
    found
        Where the question may stand. Where no segment of the new text has a question mark, it is the end of that text.
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
    """How much each unit of a text has of a question's words side by side, in any order. No model.

    Two different tokens of the question that stand within 8 tokens of each other at most 4 times in the text give 1,
    divided by the number of times, to each unit that such a place touches. So a line is found that shares several
    words with the question, each of which is common by itself. A token that occurs more than 4 times, and more than
    once in four units, does not count.

    Parameters
    ----------
    prompt_ids
        The text, and the question somewhere behind it.
    question
        Half-open span of the question, which is short: every two of its tokens make a pair.
    units
        Of the text.

    Returns
    -------
    torch.Tensor
        (num_units,), 0 where no two tokens meet.
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
    """Say where what comes back is written.

    Text that comes back is of little use behind the question and the answers that were written without it. To go back
    to the first slot behind it is dear where it stands early; to go back to the first one behind all that was dropped
    is answered as well (experiments/LOG.md, Sessions).

    Parameters
    ----------
    held : sequence of int
        Positions in the cache, in the order in which they were written.
    restored : sequence of int
        Positions that come back, increasing; none of them is held.
    num_cached : int
        Tokens of earlier turns.
    lost : sequence of int
        Positions that were held, and have to be again.
    in_place : bool
        Whether what comes back is written at its place in order, whatever stands behind it (contiguous positions).

    Returns
    -------
    tuple
        How many of the held slots stay (up to the first one behind all that was dropped, or MOST_REWRITTEN ahead of the
        end where that is nearer to it), and the positions that are written behind them, increasing.
    """
    num_staying = len(held)
    if restored and in_place:
        num_staying = bisect_left(held, restored[0])
    elif restored:
        last_dropped = dropped_positions([*held, *lost], num_cached)[-1]
        num_staying = next((slot for slot, position in enumerate(held) if position > last_dropped), num_staying)
        # After many turns of which nothing was dropped, all of them would stand behind it.
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
    """Select what the target prefills in a turn: what comes back of the old text, then what is kept of the new.

    Parameters
    ----------
    evidence : Evidence
        The whole conversation, and what is known of it.
    held : sequence of int
        Positions that the target's cache holds, all under num_cached, in the order in which they were written.
    num_cached : int
        Tokens of earlier turns.
    restored : sequence of int
        Positions among them that come back, increasing.
    config : PrefillConfig, optional
        How the new text is pruned; None keeps all of it.
    protected : sequence of (int, int)
        Half-open spans of the conversation that are never dropped.
    lost : sequence of int
        Positions that an earlier turn held, and that a turn which was cancelled has left out.
    in_place : bool
        As in `order_slots`.

    Returns
    -------
    Selection
        num_held of it says how many of the held slots stay; the rest of them is rolled back, and is part of it.
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
