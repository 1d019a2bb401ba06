"""Slots of a draft by words, in plain loops. Imports nothing from the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def chosen_slots(text: Sequence[int], num_slots: int, size: int, num_sinks: int) -> list[int]:
    """Positions: the first, the newest text in a quarter of the slots, and the chunks worth most by the words of the
    last 96 tokens, each word weighed by its rarity squared and halved with every 32 tokens of distance from the end;
    the two chunks behind one are worth 0.8 and 0.64 of it at least."""
    if len(text) <= num_slots:
        return list(range(len(text)))
    newest = len(text) - max(1, round(num_slots / 4))
    num_sinks = min(num_sinks, newest, num_slots // 4)
    num_chunks = newest // size
    chunks = [set(text[chunk * size : (chunk + 1) * size]) for chunk in range(num_chunks)]
    weights: dict[int, float] = {}
    for distance in range(min(96, len(text))):
        word = text[len(text) - 1 - distance]
        times = sum(word in chunk for chunk in chunks)
        rarity = math.log(1 + (num_chunks - times + 0.5) / (times + 0.5)) ** 2
        weights.setdefault(word, rarity * 0.5 ** (distance / 32))
    found = [sum(weight for word, weight in weights.items() if word in chunk) for chunk in chunks]
    shares = {0: 1.0, 1: 0.8, 2: 0.64}
    scores = [max(share * found[at - back] for back, share in shares.items() if at >= back) for at in range(num_chunks)]
    first = math.ceil(num_sinks / size)
    num_chosen = (num_slots - num_sinks - (len(text) - newest)) // size
    ranked = sorted(range(first, num_chunks), key=lambda chunk: (-round(scores[chunk], 9), chunk))[:num_chosen]
    kept = set(range(num_sinks)) | set(range(newest, len(text)))
    for chunk in ranked:
        if scores[chunk] > 0:
            kept.update(range(chunk * size, (chunk + 1) * size))
    return sorted(kept)


def logits_in_order_of_writing(
    model: PreTrainedModel, writes: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
) -> torch.Tensor:
    """The last logits of every write (positions cached before it, its tokens, their positions), by one plain forward
    over all of them: a token sees earlier positions among those cached when it was written, and those written
    with it."""
    token_ids = [token for _, tokens, _ in writes for token in tokens]
    positions = [position for *_, own in writes for position in own]
    mask = torch.full((len(token_ids), len(token_ids)), torch.finfo(model.dtype).min)
    written: dict[int, int] = {}
    ends = []
    row = 0
    for cached, _, own in writes:
        seen = list(cached)
        for position in own:
            written[position] = row
            seen.append(position)
            mask[row, [written[other] for other in seen if other <= position]] = 0
            row += 1
        ends.append(row - 1)
    with torch.no_grad():
        output = model(
            torch.tensor([token_ids]),
            attention_mask=mask[None, None],
            position_ids=torch.tensor([positions]),
            use_cache=False,
        )
    logits: torch.Tensor = output.logits[0, ends]
    return logits
