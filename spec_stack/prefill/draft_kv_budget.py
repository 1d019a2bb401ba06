"""The part of a long text that a draft decodes over: chosen by words, without a forward of any model. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from spec_stack.config import PrefillConfig

Ints = npt.NDArray[np.int64]
Text = Sequence[int] | Ints
RENEW_EVERY = 64
"""Tokens written until the slots are chosen anew while proposals hold."""
RENEW_WHERE_WRONG = 8
"""The same where half of the last proposal was wrong."""
MOST_RESTORED = 64
"""Most tokens that come back then."""
# Tokens at the text's end whose words are looked for, and the distance over which a word's weight halves.
_NUM_QUERY_TOKENS = 96
_HALF_LIFE = 32
# Copied text continues behind the matching words: the next two chunks get these shares of a chunk's score.
_FOLLOWING = (0.8, 0.64)
# Share of the slots for the newest text; the chosen chunks have the rest.
_NEWEST_SHARE = 0.25


class DraftKVBudget:
    """The positions of one growing text that a draft's KV cache may hold, and when they are chosen anew.

    num_slots: most chosen positions. choose: the rule. num_known: length of the text when slots were chosen last.
    """

    def __init__(self, num_slots: int, choose: Callable[[Text, int], Sequence[int]]) -> None:
        self.num_slots, self._choose = num_slots, choose
        self.num_known = 0

    @classmethod
    def of(cls, config: PrefillConfig) -> DraftKVBudget:
        """draft_kv_budget positions, by the words in common with the text's end."""
        num_sinks = config.keep_first * config.chunk_size
        return cls(config.draft_kv_budget, partial(choose_slots, chunk_size=config.chunk_size, num_sinks=num_sinks))

    def is_due(self, num_tokens: int, is_wrong: bool) -> bool:
        """Return whether slots are to be chosen anew at this text length; sooner after wrong proposals."""
        pace = RENEW_WHERE_WRONG if is_wrong else RENEW_EVERY
        return num_tokens >= max(self.num_known + pace, self.num_slots)

    def choose(self, text_ids: Text) -> Ints:
        """The chosen positions of a text of which the cache holds nothing."""
        self.num_known = len(text_ids)
        return np.array(self._choose(text_ids, self.num_slots), dtype=np.int64)

    def renew(self, text_ids: Text, cached: Ints, num_read: int) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Which of the cached positions stay, and those to prefill behind them: recalled ones, then unread ones.

        cached: the cache's positions, in its order. num_read: tokens that the draft has read.
        """
        chosen = self.choose(text_ids)
        missing = np.setdiff1d(chosen, cached)
        is_old = missing < num_read
        return np.isin(cached, chosen), np.append(missing[is_old][:MOST_RESTORED], missing[~is_old])


def choose_slots(text_ids: Text, num_slots: int, chunk_size: int, num_sinks: int) -> list[int]:
    """At most num_slots increasing positions of a text: sinks, newest text, and chunks similar to its end.

    A chunk's score sums the tokens in common with the text's end, by squared inverse document frequency (Robertson and
    Spärck Jones, https://doi.org/10.1002/asi.4630270302) and distance to the end; or it is a share of the score of the
    one or two chunks before it.
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
    """Scores (num_chunks,) of the first whole chunks: their words in common with the text's end."""
    query = ids[-_NUM_QUERY_TOKENS:][::-1]
    words, nearest = np.unique(query, return_index=True)
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
