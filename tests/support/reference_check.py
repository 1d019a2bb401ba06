"""The draft's check by whole forwards and loops over the vocabulary. Imports nothing from spec_stack."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel


def _logprobs(model: PreTrainedModel, ids: Sequence[int], positions: Sequence[int]) -> list[float]:
    """Log-probabilities after the last of these tokens, without a cache, in float64."""
    given, at = torch.tensor([list(ids)]), torch.tensor([list(positions)])
    with torch.no_grad():
        # Without a mask transformers takes gaps of the positions for borders of packed texts.
        logits = model(given, attention_mask=torch.ones_like(given), position_ids=at, use_cache=False).logits
    row = logits[0, -1].double().tolist()
    most = max(row)
    total = most + math.log(sum(math.exp(value - most) for value in row))
    return [value - total for value in row]


def logprobs_divergence(whole: Sequence[float], part: Sequence[float]) -> float:
    """The Kullback-Leibler divergence of two lists of log-probabilities, in nats."""
    return sum(math.exp(one) * (one - other) for one, other in zip(whole, part, strict=True))


def divergence(
    model: PreTrainedModel,
    prompt: Sequence[int],
    kept: Sequence[int],
    num_tokens: int,
    *,
    contiguous: bool = False,
    end_ids: Collection[int] = (),
) -> float:
    """Mean Kullback-Leibler divergence, in nats, of the greedy answer to a prompt from that under its kept positions.

    contiguous: the kept tokens and the answer are numbered from 0.
    """
    part = [prompt[at] for at in kept]
    positions = range(len(part)) if contiguous else kept
    end = len(part) if contiguous else len(prompt)
    return _mean(model, prompt, part, positions, end, num_tokens, end_ids)


def divergence_of_texts(
    model: PreTrainedModel, whole: Sequence[int], part: Sequence[int], num_tokens: int, end_ids: Collection[int] = ()
) -> float:
    """The same of two texts, each numbered from 0."""
    return _mean(model, whole, part, range(len(part)), len(part), num_tokens, end_ids)


def _mean(
    model: PreTrainedModel,
    whole: Sequence[int],
    part: Sequence[int],
    positions: Sequence[int],
    end: int,
    num_tokens: int,
    end_ids: Collection[int],
) -> float:
    answer: list[int] = []
    total = 0.0
    while len(answer) < num_tokens and not (answer and answer[-1] in end_ids):
        at = [*positions, *range(end, end + len(answer))]
        seen = _logprobs(model, [*whole, *answer], range(len(whole) + len(answer)))
        left = _logprobs(model, [*part, *answer], at)
        total += logprobs_divergence(seen, left)
        answer.append(max(range(len(seen)), key=seen.__getitem__))
    return total / len(answer)
