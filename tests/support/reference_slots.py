"""Slots of a draft by words, in plain loops. Imports nothing from the package."""

from __future__ import annotations

import math
from collections.abc import Sequence


def chosen_slots(text: Sequence[int], num_slots: int, size: int, num_sinks: int) -> list[int]:
    """Positions: the first, the newest half of the slots, and the chunks worth most by the words of the last 96 tokens,
    each word weighed by its rarity squared and halved with every 32 tokens of distance from the end."""
    if len(text) <= num_slots:
        return list(range(len(text)))
    newest = len(text) - max(1, round(num_slots / 2))
    num_sinks = min(num_sinks, newest, num_slots // 4)
    num_chunks = newest // size
    chunks = [set(text[chunk * size : (chunk + 1) * size]) for chunk in range(num_chunks)]
    weights: dict[int, float] = {}
    for distance in range(min(96, len(text))):
        word = text[len(text) - 1 - distance]
        times = sum(word in chunk for chunk in chunks)
        rarity = math.log(1 + (num_chunks - times + 0.5) / (times + 0.5)) ** 2
        weights.setdefault(word, rarity * 0.5 ** (distance / 32))
    scores = [sum(weight for word, weight in weights.items() if word in chunk) for chunk in chunks]
    first = math.ceil(num_sinks / size)
    num_chosen = (num_slots - num_sinks - (len(text) - newest)) // size
    ranked = sorted(range(first, num_chunks), key=lambda chunk: (-round(scores[chunk], 9), chunk))[:num_chosen]
    kept = set(range(num_sinks)) | set(range(newest, len(text)))
    for chunk in ranked:
        if scores[chunk] > 0:
            kept.update(range(chunk * size, (chunk + 1) * size))
    return sorted(kept)
