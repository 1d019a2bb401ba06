"""Slow oracles by another route. Imports nothing from spec_stack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel


class Hides(Protocol):
    """Which keys the first num_tokens tokens do not see besides those after them."""

    num_tokens: int

    def hides(self, query: int, key: int, window: int | None) -> bool: ...


def _mask(ids: torch.Tensor, prefill: Hides | None) -> torch.Tensor:
    """What the tokens (1, n) see: all before them, less what `prefill` hides."""
    if prefill is None:
        return torch.ones_like(ids)
    hidden = torch.ones(ids.shape[1], ids.shape[1]).triu(1)
    for query in range(prefill.num_tokens):
        for key in range(query):
            hidden[query, key] = float(prefill.hides(query, key, None))
    return (hidden * torch.finfo(torch.float32).min)[None, None]


def importance(
    eager_model: PreTrainedModel,
    prompt: Sequence[int],
    look_ahead: Sequence[int],
    pool_kernel: int,
    layers: Sequence[int] | None = None,
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    num_tail: int = 1,
    prefill: Hides | None = None,
) -> np.ndarray:
    """SpecPrefill's token importance by loops over the attention matrices of one eager forward.

    The softmax over all keys, restricted to the prompt and renormalised, is the softmax over the prompt alone. What
    a row lacks of one is the sink's share, which stays. layers: which attention layers count; all of them by default.
    heads: which (layer, head) pairs. num_tail: how many of the last prompt tokens ask. prefill: what the prompt's
    tokens do not see, for a model without windows of its own.
    """
    ids = torch.tensor([[*prompt, *look_ahead]])
    mask = _mask(ids, prefill)
    with torch.no_grad():
        attentions = eager_model(ids, attention_mask=mask, output_attentions=True).attentions
    size, half = len(prompt), pool_kernel // 2
    total = np.zeros(size)
    for query in range(size - num_tail, size + len(look_ahead)):
        best = np.zeros(size)
        for index, layer in enumerate(attentions):
            for number, head in enumerate(layer[0]):
                if (layers is not None and index not in layers) or (heads is not None and (index, number) not in heads):
                    continue
                whole = head[query].double().numpy()
                row = whole[:size] / (whole[:size].sum() + 1 - whole.sum())
                for token in range(size):
                    window = row[max(0, token - half) : token + half + 1]
                    best[token] = max(best[token], window.mean())
        total += best
    return total / (num_tail + len(look_ahead))


def question_importance(
    eager_model: PreTrainedModel,
    prompt: Sequence[int],
    repeated: Sequence[tuple[int, int]],
    in_place: Sequence[tuple[int, int]],
    marked: Sequence[bool],
    opening: int,
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    mean: bool = False,
    pool_kernel: int = 1,
    skipped: int = 0,
    prefill: Hides | None = None,
) -> np.ndarray:
    """Importance by the queries of segments, by loops over the attention matrices of one eager forward over the prompt
    with the repeated segments behind it.

    Every query's row is the softmax over the prompt alone. heads: which (layer, head) pairs count; all behind the
    skipped layers by default. mean: the mean over them, in place of the largest pooled attention.
    """
    size = len(prompt)
    ids = torch.tensor([[*prompt, *(token for start, stop in repeated for token in prompt[start:stop])]])
    mask = _mask(ids, prefill)
    with torch.no_grad():
        attentions = eager_model(ids, attention_mask=mask, output_attentions=True).attentions
    every = [(layer, head) for layer in range(len(attentions)) for head in range(attentions[0].shape[1])]
    behind = [(layer, head) for layer, head in every if layer >= skipped]

    def row(layer: int, head: int, query: int) -> np.ndarray:
        whole = attentions[layer][0, head, query].double().numpy()
        return np.asarray(whole[:size] / (whole[:size].sum() + 1 - whole.sum()))

    finding = behind
    if heads is not None:
        # The last quarter of the layers up to the last chosen head.
        depth = 1 + max(layer for layer, _ in heads)
        finding = [(layer, head) for layer, head in every if depth - max(1, depth // 4) <= layer < depth]
    looks = np.mean([row(*each, query) for each in finding for query in range(size - opening, size)], axis=0)
    spans = [*repeated, *in_place]
    others = [[looks[at] for at in range(start, min(stop, size - opening))] for start, stop in spans]
    means = [float(np.mean(each)) if each else None for each in others]
    seen = [None if each is None else each * (5 if mark else 1) for each, mark in zip(means, marked, strict=True)]
    largest = max(each for each in seen if each is not None)
    asked = [(seen[at] or 0.0, -at) for at, mark in enumerate(marked) if mark]
    if asked:
        value, place = max(asked)
        first, last = spans[-place]
        for at, (start, stop) in enumerate(spans):
            if marked[at] and seen[at] is not None and start - last <= 64 and first - stop <= 64:
                seen[at] = value
    weights = [1.0 if each is None else each / largest for each in seen]
    queries, at = [], size
    for start, stop in repeated:
        queries.append(range(at, at + stop - start))
        at += stop - start
    queries += [range(start, stop) for start, stop in in_place]

    def pooled(values: np.ndarray) -> np.ndarray:
        half = pool_kernel // 2
        return np.array([values[max(0, token - half) : token + half + 1].mean() for token in range(size)])

    full = [at for at, weight in enumerate(weights) if weight >= 1 and marked[at]]
    alone = [
        [0.0 if at in full and at != question else weight for at, weight in enumerate(weights)] for question in full
    ]

    def by_question(rows: Callable[[int], np.ndarray], weights: Sequence[float]) -> np.ndarray:
        best, others, num_others = np.zeros(size), np.zeros(size), 0.0
        for span, own, weight in zip(spans, queries, weights, strict=True):
            for query in own:
                seen = rows(query)
                others += (1 - weight) * seen
                num_others += 1 - weight
                outside = seen.copy()
                outside[slice(*span)] = 0
                best = np.maximum(best, weight * outside)
        return np.maximum(best - 4 * others / max(num_others, 1), 0)

    def of(rows: Callable[[int], np.ndarray]) -> np.ndarray:
        every = []
        for each in alone if len(alone) > 1 else [weights]:
            found = by_question(rows, each)
            kept = found.copy()
            for (start, stop), weight in zip(spans, weights, strict=True):
                if weight >= 1:
                    kept[start:stop] = np.sort(found)[size - (stop - start) :].mean()
            every.append(kept)
        return np.array(every)

    voting = behind if heads is None else list(heads)
    if mean:
        found = np.mean([of(partial(row, *each)) for each in voting], axis=0)
    else:
        found = of(lambda query: np.max([pooled(row(*each, query)) for each in voting], axis=0))
    if len(found) > 1:
        found = np.array([each / np.sort(each)[-32:].mean() for each in found])
    return np.asarray(found.max(axis=0))


def importance_by_characters(
    scores: Sequence[float], target_spans: Sequence[tuple[int, int]], draft_spans: Sequence[tuple[int, int]]
) -> list[float]:
    """Each target token's largest draft importance, looked up character by character."""
    owners: dict[int, list[int]] = {}
    for index, (start, stop) in enumerate(draft_spans):
        for character in range(start, stop):
            owners.setdefault(character, []).append(index)
    mapped = []
    for start, stop in target_spans:
        found = [owner for character in range(start, stop) for owner in owners.get(character, [])]
        mapped.append(max((scores[owner] for owner in found), default=0.0))
    return mapped


def selected_positions(
    scores: Sequence[float], keep_rate: float, chunk_size: int, keep_first: int, keep_last: int
) -> list[int]:
    """Chunk selection by sorting (mean, index) pairs."""
    chunks = [range(at, min(at + chunk_size, len(scores))) for at in range(0, len(scores), chunk_size)]
    kept = [index < keep_first or index >= len(chunks) - keep_last for index in range(len(chunks))]
    budget = math.ceil(round(keep_rate * len(chunks), 9))
    order = sorted(range(len(chunks)), key=lambda i: (-np.mean([scores[t] for t in chunks[i]]), i))
    for index in order:
        if sum(kept) < budget:
            kept[index] = True
    return [token for chunk, keep in zip(chunks, kept, strict=True) if keep for token in chunk]


def logits(model: PreTrainedModel, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """One forward without a cache, at explicit positions. The mask of ones keeps transformers from reading gaps as
    borders between packed sequences."""
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        output = model(
            ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.tensor([list(positions)]),
            use_cache=False,
        )
    return output.logits[0]


def greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int, **options: Any) -> list[int]:
    """transformers' own greedy generation, past any end-of-sequence token. options: more for its `generate`."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return output[0, len(prompt) :].tolist()


def sparse_greedy(
    model: PreTrainedModel,
    kept: Sequence[int],
    positions: Sequence[int],
    start: int,
    num_tokens: int,
    forward: Callable[[PreTrainedModel, Sequence[int], Sequence[int]], torch.Tensor] = logits,
) -> list[int]:
    """Greedy tokens after a pruned prompt, each by a full uncached forward; decoding starts at position start."""
    ids, places = list(kept), list(positions)
    for step in range(num_tokens):
        ids.append(int(forward(model, ids, places)[-1].argmax()))
        places.append(start + step)
    return ids[len(kept) :]


def shaped_greedy(
    model: PreTrainedModel,
    prompt: Sequence[int],
    kept: Sequence[int],
    positions: Sequence[int],
    num_tokens: int,
    shape: Callable[[list[int], np.ndarray], np.ndarray],
) -> list[int]:
    """Greedy tokens after a (pruned) prompt, of rows that `shape` changes by the whole text before them."""
    new: list[int] = []
    for _ in range(num_tokens):
        places = [*positions, *range(len(prompt), len(prompt) + len(new))]
        row = logits(model, [*kept, *new], places)[-1].double().numpy()
        new.append(int(shape([*prompt, *new], row).argmax()))
    return new


def shaped_law(
    model: PreTrainedModel,
    prompt: Sequence[int],
    kept: Sequence[int],
    positions: Sequence[int],
    shape: Callable[[list[int], np.ndarray], np.ndarray],
    num_tokens: int,
) -> dict[tuple[int, ...], float]:
    """Exact law of the first tokens sampled after a (pruned) prompt, of rows that `shape` changes likewise."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for new, weight in law.items():
            places = [*positions, *range(len(prompt), len(prompt) + len(new))]
            row = shape([*prompt, *new], logits(model, [*kept, *new], places)[-1].double().numpy())
            probs = np.exp(row - row.max())
            for token, prob in enumerate(probs / probs.sum()):
                if prob > 0:
                    longer[(*new, token)] = weight * prob
        law = longer
    return law


def speculative_law(target: np.ndarray, draft: np.ndarray) -> dict[tuple[int, ...], float]:
    """Exact law of one speculative step's tokens, by enumeration of drafts, acceptances and corrections.

    target (gamma + 1, vocab) and draft (gamma, vocab) are rows that do not depend on earlier tokens.
    """
    gamma, vocab = draft.shape
    law: dict[tuple[int, ...], float] = {}
    for drafted in itertools.product(range(vocab), repeat=gamma):
        weight = math.prod(draft[i, token] for i, token in enumerate(drafted))
        for index, token in enumerate(drafted):
            accept = min(1.0, target[index, token] / draft[index, token])
            residual = np.maximum(target[index] - draft[index], 0)
            for other in range(vocab):
                if residual[other] > 0:
                    outcome = (*drafted[:index], other)
                    law[outcome] = law.get(outcome, 0.0) + weight * (1 - accept) * residual[other] / residual.sum()
            weight *= accept
        for bonus in range(vocab):
            law[(*drafted, bonus)] = law.get((*drafted, bonus), 0.0) + weight * target[gamma, bonus]
    return law
