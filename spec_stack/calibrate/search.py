"""Finds the cheapest settings of a pair's sparse prefill that keep what a question is about.

Needles of many kinds are hidden in long texts, in the user's own tokenizer. The draft scores them in every way there
is (windows, first layers, heads, neighbours, anchors), which tells how small a share of the prompt still holds the
evidence; the parts of the time to first token are measured on this machine. Of all settings whose recall is within a
margin of the best, and that keep neither the evidence that shares its question's words nor the one in other words less
well than the paper's rule does, the cheapest is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from time import perf_counter

import torch

from spec_stack.calibrate.choice import PAPER, RATES, Needed, choose, recall_at
from spec_stack.calibrate.costs import Plan, Progress, measure, silent
from spec_stack.calibrate.documents import default_documents
from spec_stack.calibrate.prompts import LOOK_AHEADS, Prompt, fitting, make_prompts
from spec_stack.config import PrefillConfig
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.architectures import text_config
from spec_stack.prefill.alignment import map_importance
from spec_stack.prefill.calibration import CHOSEN, HEAD_RATE, MARGIN, Calibration, fingerprint
from spec_stack.prefill.importance import attention_to_prompt, pool
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.rules.anchors import ByAnchors
from spec_stack.prefill.rules.attention import with_neighbours
from spec_stack.prefill.rules.fused import fuse
from spec_stack.prefill.scoring import look_at
from spec_stack.prefill.units import Chunks

LENGTHS = (2048, 4096, 8192, 16384)
WINDOWS = (None, 64, 256)
_SHARES = (0.0, 0.5)
_WEIGHTS = (1.0, 2.0, 4.0)

Head = tuple[int, int]


def calibrate(
    pair: ModelPair,
    *,
    documents: Sequence[str] = (),
    lengths: Sequence[int] = LENGTHS,
    prompts_per_length: int = 32,
    margin: float = MARGIN,
    seed: int = 0,
    progress: Progress = silent,
) -> Calibration:
    """Choose how this pair prefills sparsely, on this machine.

    Parameters
    ----------
    pair
        With a tokenizer.
    documents
        Texts to hide needles in, the user's own at best; none is source code and manuals of the standard library.
    lengths
        Of the prompts, in tokens. Those that the models are not made for become one that just fits them.
    prompts_per_length
        More make the choice surer, and take longer.
    margin
        Recall that may be given up against the best found at keep_rate 0.2. Against the paper's rule at that rate no
        pool of kinds (evidence in the question's words, and in others) may lose more than 0.05.
    seed
        Draws the needles.
    progress
        Told what is done, of how much, and what comes next.

    Returns
    -------
    Calibration
        To be saved beside the draft, or applied to a PrefillConfig.

    Raises
    ------
    ValueError
        Without a tokenizer, or where no length fits the models.
    """
    started = perf_counter()
    if pair.tokenizer is None:
        raise ValueError("calibration writes its prompts in words; give the pair a tokenizer")
    lengths = fitting(pair, lengths)
    texts = list(documents) or default_documents()
    ways = _ways(pair)
    plan = Plan(len(lengths) * prompts_per_length + prompts_per_length + len(ways) + 3, progress)

    alone: dict[Head, Needed] = {}
    for prompt in make_prompts(pair, texts, lengths[0], prompts_per_length, seed):
        plan.step("asking every head alone")
        for head, vote in _votes(pair, prompt, ways[0]).items():
            means = Chunks(len(prompt.token_ids), ways[0].chunk_size).means(_joined([vote], prompt))
            _add(alone.setdefault(head, {}), prompt, _needed(prompt, ways[0], means))
    head_recall = {head: recall_at(alone[head], HEAD_RATE) for head in sorted(alone)}
    head_sets = _head_sets(head_recall)
    ways = [way for way in ways if way.scoring_layers is None or _finds(way.scoring_layers, head_recall)]

    needed: dict[int, dict[PrefillConfig, Needed]] = {length: {} for length in lengths}
    chance: Needed = {}
    for length in lengths:
        for prompt in make_prompts(pair, texts, length, prompts_per_length, seed + length):
            plan.step(f"scoring prompts of about {length} tokens")
            _add(chance, prompt, _needed(prompt, ways[0], _random_scores(prompt, ways[0])))
            for config, scores in _settings(pair, prompt, ways, head_sets):
                _add(needed[length].setdefault(config, {}), prompt, _needed(prompt, config, scores))
        if not needed[length]:
            raise ValueError(f"no prompt of about {length} tokens fits the models; give shorter lengths")
    costs = measure(pair, ways, lengths[-1], plan)
    choice = choose(needed, costs, recall_at(chance, RATES[-1]), margin)
    plan.step("done")
    return Calibration(
        settings={name: getattr(choice.config, name) for name in CHOSEN},
        target=fingerprint(text_config(pair.target.config)),
        draft=fingerprint(text_config(pair.draft.config)),
        margin=margin,
        dense_s={length: costs.target(length) for length in lengths},
        head_recall={f"{layer}.{head}": recall for (layer, head), recall in head_recall.items()},
        kinds=choice.kinds,
        points=choice.points,
        notes=choice.notes,
        seconds=perf_counter() - started,
    )


def _add(needed: Needed, prompt: Prompt, rates: list[float]) -> None:
    needed.setdefault(prompt.kind, []).append(rates)


def _ways(pair: ModelPair) -> list[PrefillConfig]:
    """How the draft may go through a prompt. The first one is the paper's."""
    num_layers = int(text_config(pair.draft.config).num_hidden_layers)
    exits = sorted({max(1, num_layers // 4), max(1, num_layers // 2)} - {num_layers})
    return [
        *(replace(PAPER, draft_window=window) for window in WINDOWS),
        *(replace(PAPER, draft_window=WINDOWS[-1], scoring_layers=num) for num in exits),
    ]


def _votes(pair: ModelPair, prompt: Prompt, way: PrefillConfig) -> dict[Head, torch.Tensor]:
    """Pooled attention (num_queries, num_tokens) to the prompt of every head of the draft, in the draft's tokens."""
    draft = pair.open_draft(way.prefill_chunk, prompt.tokenization)
    ids, end_ids = prompt.token_ids, pair.end_ids
    look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=end_ids)
    seen, _ = look_at(draft, ids, look_ahead, way, prompt.tokenization, way.scoring_layers)
    votes = {}
    for layer, (queries, keys, scaling, *rest) in seen.layers.items():
        attention = attention_to_prompt(queries, keys, scaling, rest[0] if rest else None, seen.num_asking)
        pooled = pool(attention, way.pool_kernel).cpu()
        votes.update({(layer, head): pooled[head] for head in range(len(pooled))})
    return votes


def _joined(votes: Sequence[torch.Tensor], prompt: Prompt) -> torch.Tensor:
    """Importance (num_prompt_tokens,) from the votes of some heads, each (num_queries, num_draft_tokens)."""
    best = votes[0]
    for vote in votes[1:]:
        best = torch.maximum(best, vote)
    importance = best.mean(dim=0)
    return importance if prompt.tokenization is None else map_importance(importance, prompt.tokenization.ranges)


def _head_sets(recall: Mapping[Head, float]) -> list[tuple[Head, ...] | None]:
    """Who might vote: all, and the few best."""
    ranked = sorted(recall, key=lambda head: (-recall[head], head))
    sets: list[tuple[Head, ...] | None] = [None]
    for count in (1, 2, 4, 8):
        chosen = tuple(sorted(ranked[:count]))
        if count < len(ranked) and chosen not in sets:
            sets.append(chosen)
    return sets


def _finds(num_layers: int, recall: Mapping[Head, float]) -> bool:
    """Return whether some head of the first layers retrieves at all; else they would only stir the other votes."""
    early = [value for (layer, _), value in recall.items() if layer < num_layers]
    return bool(early) and max(early) >= max(recall.values()) / 2


def _settings(
    pair: ModelPair, prompt: Prompt, ways: Sequence[PrefillConfig], head_sets: Sequence[tuple[Head, ...] | None]
) -> Iterator[tuple[PrefillConfig, torch.Tensor]]:
    """Every setting that is tried, and what it makes of this prompt: scores (num_chunks,)."""
    chunks, evidence = Chunks(len(prompt.token_ids), PAPER.chunk_size), Evidence(prompt.token_ids)
    anchors = {share: ByAnchors().score(evidence, chunks, replace(PAPER, neighbour_share=share)) for share in _SHARES}
    for share, scores in anchors.items():
        yield replace(PAPER, scorer="anchors", neighbour_share=share), scores
    for way in ways:
        votes = _votes(pair, prompt, way)
        for heads, look_ahead in product(head_sets, LOOK_AHEADS):
            voters = [head for head in votes if heads is None or head in heads]
            if not voters or (heads is not None and len(voters) < len(heads)):
                continue
            # A look-ahead asks from the prompt's last token on, the first layers up to it.
            asking = slice(look_ahead + 1) if way.scoring_layers is None else slice(-look_ahead - 1, None)
            importance = _joined([votes[head][asking] for head in voters], prompt)
            means = chunks.means(importance)
            for share in _SHARES:
                config = replace(way, scoring_heads=heads, look_ahead=look_ahead, neighbour_share=share)
                attention = with_neighbours(means, share)
                yield config, attention
                for weight in _WEIGHTS:
                    fused = fuse(anchors[share], attention, weight)
                    yield replace(config, scorer="fused", anchor_weight=weight), fused


def _needed(prompt: Prompt, config: PrefillConfig, scores: torch.Tensor) -> list[float]:
    """For every line of evidence the smallest keep_rate that keeps all of its tokens."""
    num_chunks, size = len(scores), config.chunk_size
    forced = {*range(config.keep_first), *range(num_chunks - config.keep_last, num_chunks)}
    order = [chunk for chunk in torch.argsort(scores, descending=True, stable=True).tolist() if chunk not in forced]
    budget = dict.fromkeys(forced, 0) | {chunk: len(forced) + rank for rank, chunk in enumerate(order, start=1)}
    return [
        max(budget[chunk] for chunk in range(start // size, (stop - 1) // size + 1)) / num_chunks
        for start, stop in prompt.spans
    ]


def _random_scores(prompt: Prompt, config: PrefillConfig) -> torch.Tensor:
    """Return what a vote by chance looks like."""
    num_chunks = math.ceil(len(prompt.token_ids) / config.chunk_size)
    return torch.rand(num_chunks, generator=torch.Generator().manual_seed(len(prompt.token_ids)))
