"""Which part of a long text a draft decodes over: chosen by words, without a forward of any model. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RENEW_EVERY = 64
"""Tokens written until the slots are chosen anew while proposals hold."""
RENEW_WHERE_WRONG = 8
"""The same where half of the last proposal was wrong."""
MOST_RESTORED = 64
"""Most tokens that come back then."""
# Tokens at the text's end whose words are looked for, and the distance over which a word's weight halves.
_ASKED = 96
_HALF_LIFE = 32
# What is copied goes on behind the words found: the worth of the next chunk and of the one after it, over its own.
_FOLLOWING = (0.8, 0.64)
# Share of the slots that the newest text has; the chosen chunks have the rest.
_NEWEST_SHARE = 0.25


def choose_slots(text_ids: Sequence[int] | np.ndarray, num_slots: int, chunk_size: int, num_sinks: int) -> list[int]:
    """The positions of a text that a draft is to see: the first, the newest, and chunks that share words with its end.

    A chunk is worth the sum over the words (tokens) of the text's end that it has, each by its inverse document
    frequency over the chunks (Robertson and Spärck Jones, https://doi.org/10.1002/asi.4630270302) squared, so that rare
    words lead, and by how near to the end it stands; or a part of what the one or two before it are worth.

    Parameters
    ----------
    text_ids
        The whole text, n tokens.
    num_slots
        Most positions to give; everything where the text is no longer.
    chunk_size
        Tokens per chunk.
    num_sinks
        Positions at the beginning that are always seen.

    Returns
    -------
    list of int
        Strictly increasing; the text's last positions are among them.
    """
    num_tokens = len(text_ids)
    if num_tokens <= num_slots:
        return list(range(num_tokens))
    newest = num_tokens - max(1, round(_NEWEST_SHARE * num_slots))
    num_sinks = min(num_sinks, newest, num_slots // 4)
    num_chosen = (num_slots - num_sinks - (num_tokens - newest)) // chunk_size
    first = -(-num_sinks // chunk_size)
    scores = _chunk_scores(np.asarray(text_ids), newest // chunk_size, chunk_size)[first:]
    best = np.argsort(-scores, kind="stable")[:num_chosen]
    chosen = sorted(first + int(chunk) for chunk in best if scores[chunk] > 0)
    positions = {*range(num_sinks), *range(newest, num_tokens)}
    for chunk in chosen:
        positions.update(range(chunk * chunk_size, (chunk + 1) * chunk_size))
    return sorted(positions)


def _chunk_scores(ids: np.ndarray, num_chunks: int, chunk_size: int) -> np.ndarray:
    """Return what the first whole chunks of a text share with its end, (num_chunks,)."""
    asked = ids[-_ASKED:][::-1]
    words, nearest = np.unique(asked, return_index=True)
    body = ids[: num_chunks * chunk_size]
    at = np.searchsorted(words, body).clip(max=len(words) - 1)
    places = np.nonzero(words[at] == body)[0]
    # A word counts once in a chunk.
    pairs = np.unique(places // chunk_size * len(words) + at[places])
    chunks, word = pairs // len(words), pairs % len(words)
    times = np.bincount(word, minlength=len(words))
    rarity = np.log1p((num_chunks - times + 0.5) / (times + 0.5)) ** 2 * 0.5 ** (nearest / _HALF_LIFE)
    found: np.ndarray = np.bincount(chunks, weights=rarity[word], minlength=num_chunks)
    scores = found.copy()
    for after, share in enumerate(_FOLLOWING, 1):
        scores[after:] = np.maximum(scores[after:], share * found[:-after])
    return scores
