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
    prefill: Hides | None = None,
) -> np.ndarray:
    """SpecPrefill's token importance by loops over the attention matrices of one eager forward.

    The softmax over all keys, restricted to the prompt and renormalised, is the softmax over the prompt alone. What
    a row lacks of one is the sink's share, which stays. layers: which attention layers count; all of them by default.
    heads: which (layer, head) pairs. prefill: what the prompt's tokens do not see, for a model without windows of its
    own.
    """
    ids = torch.tensor([[*prompt, *look_ahead]])
    mask = _mask(ids, prefill)
    with torch.no_grad():
        attentions = eager_model(ids, attention_mask=mask, output_attentions=True).attentions
    size, half = len(prompt), pool_kernel // 2
    total = np.zeros(size)
    for query in range(size - 1, size + len(look_ahead)):
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
    return total / (1 + len(look_ahead))


def question_importance(
    eager_model: PreTrainedModel,
    prompt: Sequence[int],
    repeated: Sequence[tuple[int, int]],
    in_place: Sequence[tuple[int, int]],
    asks: Sequence[bool],
    is_question: Sequence[bool] = (),
    is_marked: Sequence[bool] = (),
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    mean: bool = False,
    pool_kernel: int = 1,
    skipped: int = 0,
    prefill: Hides | None = None,
    not_asking: float = 0.5,
    question_mark: float = 5,
    background: float = 1,
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

    scoring = behind if heads is None else list(heads)
    finding = {layer for layer, _ in scoring}
    looks = np.mean([row(*each, size - 1) for each in every if each[0] in finding], axis=0)
    spans = [*repeated, *in_place]
    others = [[looks[at] for at in range(start, min(stop, size - 1))] for start, stop in spans]
    marks = [question_mark if mark else 1.0 for mark in is_marked or [False] * len(spans)]
    means = [float(np.mean(each)) * mark if each else None for each, mark in zip(others, marks, strict=True)]
    largest = max(each for each in means if each is not None)
    most = max((each for each, own in zip(means, asks, strict=True) if own and each is not None), default=0.0)
    weights = [
        1.0 if each is None else each / most if own else each / largest * (not_asking if any(asks) else 1)
        for each, own in zip(means, asks, strict=True)
    ]
    weights = [
        1.0 if mark else weight for weight, mark in zip(weights, is_question or [False] * len(spans), strict=True)
    ]
    queries, at = [], size
    for start, stop in repeated:
        queries.append(range(at, at + stop - start))
        at += stop - start
    queries += [range(start, stop) for start, stop in in_place]

    def pooled(values: np.ndarray) -> np.ndarray:
        half = pool_kernel // 2
        return np.array([values[max(0, token - half) : token + half + 1].mean() for token in range(size)])

    def of(rows: Callable[[int], np.ndarray]) -> np.ndarray:
        by_segment = []
        for span, own in zip(spans, queries, strict=True):
            outside = np.max([rows(query) for query in own], axis=0)
            outside[slice(*span)] = 0
            by_segment.append(outside)
        questions = [at for at, weight in enumerate(weights) if weight >= 1]
        shortest = min((spans[at][1] - spans[at][0] for at in questions), default=0)
        sharpest = {at: np.sort(by_segment[at])[size - shortest :].mean() for at in questions}
        for at in questions[: len(questions) * (len(questions) > 1)]:
            by_segment[at] = by_segment[at] * (max(sharpest.values()) / max(sharpest[at], 1e-30))
        best = np.max([weight * own for weight, own in zip(weights, by_segment, strict=True)], axis=0)
        shares = [(1 - weight, query) for weight, own in zip(weights, queries, strict=True) for query in own]
        rest = sum((share * rows(query) for share, query in shares), np.zeros(size))
        best = np.maximum(best - background * rest / max(sum(share for share, _ in shares), 1), 0)
        kept = best.copy()
        for (start, stop), weight in zip(spans, weights, strict=True):
            if weight >= 1:
                kept[start:stop] = np.sort(best)[size - (stop - start) :].mean()
        return kept

    if mean:
        return np.asarray(np.mean([of(partial(row, *each)) for each in scoring], axis=0))
    return of(lambda query: np.max([pooled(row(*each, query)) for each in scoring], axis=0))


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
        if not weight:
            continue
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
