"""BM25 by the book, one word of one document after the other. Nothing of the package."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def scores(documents: Sequence[Sequence[str]], query: Collection[str]) -> list[float]:
    """Sum over the query's words; k1 = 1.5, b = 0.75; empty documents are none."""
    filled = [document for document in documents if document]
    average = sum(len(document) for document in filled) / len(filled) if filled else 1.0
    found = []
    for document in documents:
        total = 0.0
        for word in query:
            times = list(document).count(word)
            if times:
                have = sum(word in other for other in filled)
                rarity = math.log(1 + (len(filled) - have + 0.5) / (have + 0.5))
                total += rarity * times * 2.5 / (times + 1.5 * (1 - 0.75 + 0.75 * len(document) / average))
        found.append(total)
    return found
