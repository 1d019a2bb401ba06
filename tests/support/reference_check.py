"""The check of a pruned prompt by loops and whole forwards. Imports nothing from spec_stack."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.support import reference


def answer_attention(
    eager_model: PreTrainedModel,
    prompt: Sequence[int],
    num_tokens: int,
    heads: Sequence[tuple[int, int]],
    *,
    end_ids: Collection[int] = (),
) -> list[float]:
    """Mean attention of a model's greedy answer to every token of a prompt, over (layer, head) pairs."""
    answer: list[int] = []
    while len(answer) < num_tokens and not (answer and answer[-1] in end_ids):
        with torch.no_grad():
            answer.append(int(eager_model(torch.tensor([[*prompt, *answer]])).logits[0, -1].argmax()))
    found = [reference.importance(eager_model, prompt, answer, 1, heads=[head]) for head in heads]
    return [float(value) for value in np.mean(found, axis=0)]


def dropped_attention(
    attention: Sequence[float], seen: Collection[int], aside: Collection[int] = (), *, first: int = 0, last: int = 0
) -> float:
    """The share of the attention to a prompt's tokens that falls on those that are not seen.

    aside: tokens that do not count. first, last: neither do so many at the ends.
    """
    found = total = 0.0
    for at, value in enumerate(attention):
        if at < first or at >= len(attention) - last or at in aside:
            continue
        total += value
        if at not in seen:
            found += value
    return found / total if total else 1.0
