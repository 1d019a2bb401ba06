"""Slow, plain versions of a look-up and of a chain's law, by another route. Imports nothing from the package."""

from __future__ import annotations

from collections.abc import Sequence


def longest_match(text: Sequence[int], num_known: int, longest: int) -> tuple[int, int] | None:
    """(length, start): the place in the first num_known tokens whose text before it equals the end of the whole one.

    By comparing every place. Of several the one with most tokens in common (counted up to `longest`), of these the last
    one.
    """
    best: tuple[int, int] | None = None
    for start in range(1, num_known):
        length = 0
        while length < min(start, longest) and text[start - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length and (best is None or length >= best[0]):
            best = length, start
    return best


def unrolled(text: Sequence[int], start: int, num_tokens: int) -> list[int]:
    """The continuation from a place on, a text that ends being gone on with by its own continuation."""
    whole = list(text)
    for step in range(num_tokens):
        whole.append(whole[start + step])
    return whole[len(text) :]


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
