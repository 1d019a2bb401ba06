"""BM25 by the book, one word of one body after the other. Nothing of the package."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def scores(bodies: Sequence[Sequence[str]], asked: Collection[str]) -> list[float]:
    """Sum over the words asked for; k1 = 1.5, b = 0.75; empty bodies are none."""
    filled = [body for body in bodies if body]
    average = sum(len(body) for body in filled) / len(filled) if filled else 1.0
    found = []
    for body in bodies:
        total = 0.0
        for word in asked:
            times = list(body).count(word)
            if times:
                have = sum(word in other for other in filled)
                rarity = math.log(1 + (len(filled) - have + 0.5) / (have + 0.5))
                total += rarity * times * 2.5 / (times + 1.5 * (1 - 0.75 + 0.75 * len(body) / average))
        found.append(total)
    return found
