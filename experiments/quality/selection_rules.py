"""Rules that say which chunks of a prompt to keep, of several papers and projects, behind one interface.

A rule takes `Seen`, what there is to go by, and gives votes, one per chunk. All share one pass of the draft, which
captures the queries of the last 64 prompt tokens and of the look-ahead. What the library has by name is asked of its
registry. Nothing is copied; sources are named at each
rule, and where a rule could not be followed (a draft of two layers has no "layers from the eighth on"), it says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from spec_stack import PrefillConfig
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.importance import ScoredLayer, token_importance
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.units import Chunks

WINDOW = 64
_LOOK_AHEAD = PrefillConfig.look_ahead
# Of the anchors: n-gram, tail, most occurrences in the body, neighbours on each side (PFlash, under 32K tokens).
_ANCHOR_ORDER, _ANCHOR_TAIL, _ANCHOR_MOST, _ANCHOR_RADIUS = 4, 96, 8, 2
# Of the cascade: occurrences that make a token rare, hops, and what a hop is worth.
_RARE, _HOPS, _HOP_WORTH = range(2, 5), 5, 0.8


@dataclass
class Seen:
    """The evidence to choose by.

    Attributes
    ----------
    prompt_ids
        N tokens.
    offsets
        Characters (start, stop) of each token in `text`.
    text, question
        The prompt as text, and what it asks.
    layers
        Per layer: queries (heads, WINDOW + look-ahead, head_dim) of the last prompt tokens and the look-ahead, keys of
        the prompt, scaling, sinks. Empty for rules without a draft.
    unrotated
        The same with rotary positions taken off.
    seed
        Of rules that draw.
    """

    prompt_ids: list[int]
    offsets: list[tuple[int, int]]
    text: str
    question: str
    layers: list[ScoredLayer] = field(default_factory=list)
    unrotated: list[ScoredLayer] = field(default_factory=list)
    seed: int = 0

    def num_chunks(self, config: PrefillConfig) -> int:
        return math.ceil(len(self.prompt_ids) / config.chunk_size)


Votes = Callable[[Seen, PrefillConfig], torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """A way of choosing. votes: (num_chunks,) from what was seen; config: chunks, ends, pooling; needs_draft: whether
    the draft has to go over the prompt for it; source: where it is from."""

    votes: Votes
    config: PrefillConfig
    needs_draft: bool
    source: str


def look_at(pair: ModelPair, prompt_ids: list[int], config: PrefillConfig) -> tuple[list[ScoredLayer], list[Any]]:
    """One pass of the draft: layers with rotary positions, and the same without."""
    draft = pair.open_draft(config.prefill_chunk)
    num_tokens = len(prompt_ids)
    start = max(0, num_tokens - WINDOW)
    if start:
        draft.prefill(prompt_ids[:start], range(start), config.draft_window, config.draft_sinks)
    with draft.capture() as captured:
        draft.forward(prompt_ids[start:-1], range(start, num_tokens - 1), 1)
        proposal = propose(draft, prompt_ids, _LOOK_AHEAD, Sampler(), pair.end_ids)
        draft.forward(proposal.token_ids[-1:], [draft.next_position], 1)
    layers: list[ScoredLayer] = []
    plain: list[Any] = []
    for layer in captured.values():
        if layer.keys is None:
            continue
        queries, keys = torch.cat(layer.queries, dim=1), layer.keys[:, :num_tokens]
        layers.append((queries, keys, layer.scaling, layer.sinks))
        query_at = torch.arange(start, start + queries.shape[1])
        unrotated = (_unrotate(pair, queries, query_at), _unrotate(pair, keys, torch.arange(num_tokens)))
        plain.append((*unrotated, layer.scaling, layer.sinks))
    return layers, plain


def _unrotate(pair: ModelPair, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Queries or keys (heads, n, head_dim) as they were before the rotary embedding: turned back by its own angles."""
    cos, sin = pair.draft.get_decoder().rotary_emb(states[None], positions[None].to(states.device))
    half = states.shape[-1] // 2
    turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
    return states * cos - turned * sin


def last_queries(layers: Sequence[ScoredLayer], look_ahead: bool) -> list[ScoredLayer]:
    """The layers with the queries of the paper: the last prompt token's, and the look-ahead's where that is asked."""
    chosen: list[ScoredLayer] = []
    for queries, keys, *rest in layers:
        at = slice(-_LOOK_AHEAD - 1, None) if look_ahead else slice(-_LOOK_AHEAD - 1, -_LOOK_AHEAD)
        chosen.append((queries[:, at], keys, *rest))
    return chosen


def by_name(seen: Seen, config: PrefillConfig) -> torch.Tensor:
    """Ask the library's rule of this name (config.scorer)."""
    attention = None
    if seen.layers:
        attention = CapturedAttention(dict(enumerate(last_queries(seen.layers, config.look_ahead > 0))))
    return _ask(seen, Evidence(seen.prompt_ids, attention), config)


def _ask(seen: Seen, evidence: Evidence, config: PrefillConfig) -> torch.Tensor:
    return make_rule(config.scorer).score(evidence, Chunks(len(seen.prompt_ids), config.chunk_size), config)


def by_query_window(seen: Seen, config: PrefillConfig) -> torch.Tensor:
    """SpecPC, https://arxiv.org/abs/2506.08373: the last 64 queries with linear weights and the look-ahead, the maximum
    over heads and layers, a max-pool of 64. Its "layers from the eighth on" has no meaning for a draft of few layers.
    """
    num_tokens = len(seen.prompt_ids)
    best: torch.Tensor | None = None
    for queries, keys, scaling, *_ in seen.layers:
        heads, count, size = queries.shape
        grouped = queries.reshape(keys.shape[0], -1, size).float() * scaling
        scores = torch.matmul(grouped, keys.float().transpose(-1, -2)).reshape(heads, count, num_tokens)
        # A query of the prompt sees what is before it.
        window = min(WINDOW, num_tokens)
        hidden = torch.arange(num_tokens)[None] > (num_tokens - window + torch.arange(count))[:, None]
        attention = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(dim=-1)
        weights = torch.ones(count, device=scores.device)
        weights[:window] = torch.arange(1, window + 1, device=scores.device) / window
        found = (attention * weights[None, :, None]).sum(dim=1).amax(dim=0) / weights.sum()
        best = found if best is None else torch.maximum(best, found)
    if best is None:
        raise ValueError("the draft was not asked")
    pooled = F.max_pool1d(best[None, None], 2 * (WINDOW // 2) + 1, stride=1, padding=WINDOW // 2)[0, 0]
    return Chunks(num_tokens, config.chunk_size).means(pooled.cpu())


def by_unrotated(seen: Seen, config: PrefillConfig) -> torch.Tensor:
    """The paper's rule on queries and keys without rotary positions (PFlash's "NoPE tail")."""
    importance = token_importance(last_queries(seen.unrotated, True), config.pool_kernel)
    return _ask(seen, Evidence(seen.prompt_ids, importance=importance), config)


def by_pflash_anchors(seen: Seen, config: PrefillConfig) -> torch.Tensor:
    """PFlash's anchors: chunks of any 4-gram of the last 96 tokens that is rare before, and two neighbours on each
    side, go first; the paper's rule fills the rest."""
    anchored = _anchors(seen.prompt_ids, config.chunk_size)
    return anchored + _scaled(by_name(seen, replace(config, scorer="attention")))


def by_cascade(seen: Seen, config: PrefillConfig) -> torch.Tensor:
    """PFlash's cascade over rare tokens: what the question names is looked up, and the rare tokens of the chunks found
    are looked up in turn. Draft-free; the most recent chunks fill the rest."""
    ids, size = seen.prompt_ids, config.chunk_size
    start = max(0, len(ids) - _ANCHOR_TAIL)
    places: dict[int, list[int]] = {}
    for at, token in enumerate(ids[:start]):
        places.setdefault(token, []).append(at)
    votes = torch.zeros(seen.num_chunks(config))
    frontier = {token for token in ids[start:] if 1 <= len(places.get(token, ())) <= _RARE[-1]}
    met, worth = set(frontier), 2.0
    for _ in range(_HOPS):
        chunks = {at // size for token in frontier for at in places.get(token, ())}
        for chunk in chunks:
            votes[chunk] = max(float(votes[chunk]), worth)
        near = {token for chunk in chunks for token in ids[chunk * size : (chunk + 1) * size]}
        frontier = {token for token in near - met if len(places.get(token, ())) in _RARE}
        met |= frontier
        worth *= _HOP_WORTH
    return votes + _scaled(torch.arange(len(votes)).float()) * 0.1


def by_bm25(seen: Seen, config: PrefillConfig) -> torch.Tensor:
    """The library's BM25, which is told where the question is."""
    begin = max(seen.text.rfind(seen.question), 0)
    end = begin + len(seen.question)
    inside = [at for at, (low, high) in enumerate(seen.offsets) if low < end and high > begin]
    pieces = [seen.text[low:high] for low, high in seen.offsets]
    question = (inside[0], inside[-1] + 1) if inside else None
    evidence = Evidence(seen.prompt_ids, question=question, pieces=pieces)
    return _ask(seen, evidence, replace(config, scorer="bm25"))


def by_recency(seen: Seen, config: PrefillConfig) -> torch.Tensor:
    """The later, the better."""
    return torch.arange(seen.num_chunks(config)).float()


def by_chance(seen: Seen, config: PrefillConfig) -> torch.Tensor:
    """Any."""
    rng = random.Random(seen.seed)
    return torch.tensor([rng.random() for _ in range(seen.num_chunks(config))])


def rules(calibrated: PrefillConfig | None = None) -> Mapping[str, Rule]:
    """All rules by name. calibrated: of the pair's calibration, whose heads are those that find needles; without one
    there is no rule of that name, and the fusion goes by all heads."""
    paper = PrefillConfig.full_look_ahead()
    neighbours = replace(paper, neighbour_share=0.5)
    heads = replace(neighbours, scoring_heads=calibrated.scoring_heads) if calibrated else neighbours
    own = "this package"
    known = {
        "paper, raw": Rule(by_name, PrefillConfig.raw(paper.keep_rate), True, "SpecPrefill"),
        "paper, full": Rule(by_name, PrefillConfig.full(paper.keep_rate), True, "SpecPrefill"),
        "paper, full + look-ahead": Rule(by_name, paper, True, "SpecPrefill"),
        "neighbours": Rule(by_name, neighbours, True, own),
        "calibrated heads": Rule(by_name, heads, True, own),
        "anchors": Rule(by_name, replace(paper, scorer="anchors"), False, own),
        "anchors, neighbours": Rule(by_name, replace(neighbours, scorer="anchors"), False, own),
        "fused": Rule(by_name, replace(heads, scorer="fused"), True, own),
        "query window": Rule(by_query_window, paper, True, "SpecPC"),
        "pre-RoPE": Rule(by_unrotated, paper, True, "PFlash"),
        "4-gram anchors": Rule(by_pflash_anchors, paper, True, "PFlash"),
        "rare-token cascade": Rule(by_cascade, paper, False, "PFlash"),
        "BM25": Rule(by_bm25, paper, False, "retrieval"),
        "most recent": Rule(by_recency, paper, False, "control"),
        "random": Rule(by_chance, paper, False, "control"),
    }
    if calibrated is None:
        del known["calibrated heads"]
    return known


def _anchors(ids: Sequence[int], size: int) -> torch.Tensor:
    """(num_chunks,): 3, 2 and 1 for an anchored chunk and its neighbours, by distance."""
    votes = torch.zeros(math.ceil(len(ids) / size))
    start = max(0, len(ids) - _ANCHOR_TAIL)
    order = _ANCHOR_ORDER
    asked = {tuple(ids[at : at + order]) for at in range(start, len(ids) - order + 1)}
    found: dict[tuple[int, ...], list[int]] = {}
    for at in range(max(0, start - order + 1)):
        gram = tuple(ids[at : at + order])
        if gram in asked:
            found.setdefault(gram, []).append(at)
    for places in found.values():
        if len(places) > _ANCHOR_MOST:
            continue
        for at in places:
            for away in range(-_ANCHOR_RADIUS, _ANCHOR_RADIUS + 1):
                chunk = at // size + away
                if 0 <= chunk < len(votes):
                    votes[chunk] = max(float(votes[chunk]), float(_ANCHOR_RADIUS + 1 - abs(away)))
    return votes


def _scaled(votes: torch.Tensor) -> torch.Tensor:
    """To 0 … under 1, so that they order what is otherwise equal."""
    top = float(votes.max()) if len(votes) else 0.0
    return votes.float() / (top * 1.001) if top > 0 else votes.float()
