"""Slow, plain versions of a look-up and of a chain's law, by another route. Imports nothing from the package."""

from __future__ import annotations

from collections.abc import Sequence


def longest_followed(texts: Sequence[Sequence[int]], whole: Sequence[int]) -> tuple[int, int, int, int] | None:
    """(length, token, times it followed, times another did) for the longest end of `whole` after which anything stands
    in one of the texts, by comparing every place; of the most frequent tokens the one that followed last."""
    for length in range(len(whole), 0, -1):
        end = list(whole[len(whole) - length :])
        after = [
            text[place]
            for text in texts
            for place in range(length, len(text))
            if list(text[place - length : place]) == end
        ]
        if after:
            best = max(range(len(after)), key=lambda at: (after.count(after[at]), at))
            times = after.count(after[best])
            return length, after[best], times, len(after) - times
    return None


def chain_law(table: Sequence[Sequence[float]], last: int, num_tokens: int) -> dict[tuple[int, ...], float]:
    """Probabilities of the next tokens of a Markov chain, table[token] being the distribution after it."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in law.items():
            for token, share in enumerate(table[tokens[-1] if tokens else last]):
                if share > 0:
                    longer[(*tokens, token)] = chance * share
        law = longer
    return law
