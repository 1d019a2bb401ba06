"""Finds the cheapest settings of a pair's sparse prefill that keep what a question is about.

Needles of many kinds are hidden in long texts, in the user's own tokenizer. The draft scores them in every way there
is (windows, first layers, heads, neighbours, anchors), which tells how small a share of the prompt still holds the
evidence; the parts of the time to first token are measured on this machine. Of all settings whose recall is within a
margin of the best, and that keep neither the evidence that shares its question's words nor the one in other words less
well than the paper's rule does, the cheapest is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

from spec_stack.calibrate.documents import default_documents
from spec_stack.calibrate.needles import IN_OTHER_WORDS, WORDINGS, Haystack, Span, make_haystacks
from spec_stack.config import PrefillConfig
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.architectures import text_config
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.alignment import map_importance
from spec_stack.prefill.calibration import CHOSEN, HEAD_RATE, MARGIN, Calibration, Point, describe_setting, fingerprint
from spec_stack.prefill.importance import attention_to_prompt, pool
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.rules.anchors import ByAnchors
from spec_stack.prefill.rules.attention import with_neighbours
from spec_stack.prefill.rules.fused import fuse
from spec_stack.prefill.scoring import look_at
from spec_stack.prefill.units import Chunks
from spec_stack.types import DraftTokenization

LENGTHS = (2048, 4096, 8192, 16384)
# Shares that are tried; the largest is the default, which sets the recall to be reached.
RATES = (0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.085, 0.1, 0.125, 0.15, 0.2)
WINDOWS = (None, 64, 256)
_LOOK_AHEADS = (8, 2)
_SHARES = (0.0, 0.5)
_WEIGHTS = (1.0, 2.0, 4.0)
# What fits models that are made for less than the longest length, needle and template included.
_SHARE_OF_LIMIT = 0.9
# A needle in other words than its question's is what anchors cannot find: a quarter of the prompts, a kind among eight.
_SHARE_IN_OTHER_WORDS = 0.25
# Recall that a pool of kinds may lose against the paper's rule, at the rates that are chosen.
_GUARD = 0.05
# Recall over chance, and over what so few prompts may show, under which a draft is said to find nothing.
_TELLS_APART = 0.1
_PAPER = PrefillConfig.full_look_ahead()

Head = tuple[int, int]
# By kind and prompt: the smallest keep_rate that keeps each line of the prompt's evidence.
Needed = dict[str, list[list[float]]]
Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, what: str) -> None:
    """No progress."""


@dataclass(frozen=True)
class Prompt:
    """A haystack in tokens. spans: half-open, of the evidence."""

    token_ids: list[int]
    spans: tuple[Span, ...]
    tokenization: DraftTokenization | None
    kind: str = ""


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a first token, as functions of the number of tokens.

    Attributes
    ----------
    target
        Prefill of so many tokens in a row.
    draft
        Prefill of so many, by (window, number of layers).
    step_s
        One look-ahead token.
    """

    target: Callable[[float], float]
    draft: Mapping[tuple[int | None, int | None], Callable[[float], float]]
    step_s: float

    def ttft(self, config: PrefillConfig, num_tokens: int, keep_rate: float) -> float:
        """Seconds to the first token of a prompt."""
        kept = keep_rate * num_tokens
        look_ahead = self.step_s * (config.look_ahead + 1)
        if config.scorer == "anchors":
            return self.draft[None, None](kept) + look_ahead + self.target(kept)
        scoring = self.draft[config.draft_window, config.scoring_layers](num_tokens)
        if config.scoring_layers is not None:
            scoring += self.draft[None, None](kept)
        return scoring + look_ahead + self.target(kept)


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
    lengths = _fitting(pair, lengths)
    texts = list(documents) or default_documents()
    ways = _ways(pair)
    plan = _Plan(len(lengths) * prompts_per_length + prompts_per_length + len(ways) + 3, progress)

    alone: dict[Head, Needed] = {}
    for prompt in _make_prompts(pair, texts, lengths[0], prompts_per_length, seed):
        plan.step("asking every head alone")
        for head, vote in _votes(pair, prompt, ways[0]).items():
            means = Chunks(len(prompt.token_ids), ways[0].chunk_size).means(_joined([vote], prompt))
            _add(alone.setdefault(head, {}), prompt, _needed(prompt, ways[0], means))
    head_recall = {head: _recall(alone[head], HEAD_RATE) for head in sorted(alone)}
    head_sets = _head_sets(head_recall)
    ways = [way for way in ways if way.scoring_layers is None or _finds(way.scoring_layers, head_recall)]

    needed: dict[int, dict[PrefillConfig, Needed]] = {length: {} for length in lengths}
    chance: Needed = {}
    for length in lengths:
        for prompt in _make_prompts(pair, texts, length, prompts_per_length, seed + length):
            plan.step(f"scoring prompts of about {length} tokens")
            _add(chance, prompt, _needed(prompt, ways[0], _random_scores(prompt, ways[0])))
            for config, scores in _settings(pair, prompt, ways, head_sets):
                _add(needed[length].setdefault(config, {}), prompt, _needed(prompt, config, scores))
        if not needed[length]:
            raise ValueError(f"no prompt of about {length} tokens fits the models; give shorter lengths")
    costs = _measure(pair, ways, lengths[-1], plan)
    choice = _choose(needed, costs, _recall(chance, RATES[-1]), margin)
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


class _Plan:
    """How far a calibration is."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def step(self, what: str) -> None:
        self._progress(min(self._done, self._total), self._total, what)
        self._done += 1


def _fitting(pair: ModelPair, lengths: Sequence[int]) -> list[int]:
    """The lengths that the pair can score, the longer ones cut to what fits. Raises ValueError where none is left."""
    limit = min(pair.max_positions) - 2 * max(_LOOK_AHEADS)
    longest = min(limit, pair.scoring_limit or limit)
    fitting = {length for length in lengths if length <= _SHARE_OF_LIMIT * longest}
    cut = round(_SHARE_OF_LIMIT * longest)
    # A cut length that is hardly more than the one before it says nothing new.
    if len(fitting) < len(set(lengths)) and cut >= 1.5 * max(fitting, default=min(lengths) / 4):
        fitting.add(cut)
    if not fitting:
        raise ValueError(f"no length fits models of {limit} positions and what the draft sees whole; give shorter ones")
    return sorted(fitting)


def _add(needed: Needed, prompt: Prompt, rates: list[float]) -> None:
    needed.setdefault(prompt.kind, []).append(rates)


def _ways(pair: ModelPair) -> list[PrefillConfig]:
    """How the draft may go through a prompt. The first one is the paper's."""
    num_layers = int(text_config(pair.draft.config).num_hidden_layers)
    exits = sorted({max(1, num_layers // 4), max(1, num_layers // 2)} - {num_layers})
    return [
        *(replace(_PAPER, draft_window=window) for window in WINDOWS),
        *(replace(_PAPER, draft_window=WINDOWS[-1], scoring_layers=num) for num in exits),
    ]


def _make_prompts(pair: ModelPair, texts: Sequence[str], num_tokens: int, count: int, seed: int) -> Iterator[Prompt]:
    """Needles hidden in so many tokens of text, through the chat template where there is one."""
    sample = "\n".join(text[:4000] for text in texts)
    per_token = len(sample) / max(1, len(pair.tokenizer(sample, add_special_tokens=False, verbose=False).input_ids))
    same_words = {kind: wordings for kind, wordings in WORDINGS.items() if kind not in IN_OTHER_WORDS}
    other_words = {kind: WORDINGS[kind] for kind in IN_OTHER_WORDS}
    num_characters, num_other = round(num_tokens * per_token), max(1, round(_SHARE_IN_OTHER_WORDS * count))
    haystacks = make_haystacks(texts, num_characters, count - num_other, seed, same_words)
    haystacks += make_haystacks(texts, num_characters, num_other, seed + 1, other_words)
    for haystack in haystacks:
        prompt = encode_haystack(pair.tokenizer, haystack)
        prompt_ids = prompt.token_ids
        tokenization, problem = pair.tokenize_for_draft(prompt_ids)
        if problem:
            raise ValueError(f"the draft cannot score prompts: {problem}")
        longest = max(len(prompt_ids), 0 if tokenization is None else len(tokenization.token_ids))
        if longest + max(_LOOK_AHEADS) < min(pair.max_positions):
            yield replace(prompt, tokenization=tokenization)


def encode_haystack(tokenizer: Any, haystack: Haystack) -> Prompt:
    """A haystack as the model is asked it: its tokens, and where the evidence is among them."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": haystack.content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    else:
        text = haystack.content
        encoded = tokenizer(text, return_offsets_mapping=True)
    # A template may trim the ends of what it is given, never the middle.
    base = text.find(haystack.document.strip()) - (len(haystack.document) - len(haystack.document.lstrip()))
    offsets = encoded["offset_mapping"]
    spans = []
    for start, stop in haystack.spans:
        inside = [at for at, (low, high) in enumerate(offsets) if low < stop + base and high > start + base]
        spans.append((inside[0], inside[-1] + 1))
    return Prompt(list(encoded["input_ids"]), tuple(spans), None, haystack.kind)


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
    chunks, evidence = Chunks(len(prompt.token_ids), _PAPER.chunk_size), Evidence(prompt.token_ids)
    anchors = {share: ByAnchors().score(evidence, chunks, replace(_PAPER, neighbour_share=share)) for share in _SHARES}
    for share, scores in anchors.items():
        yield replace(_PAPER, scorer="anchors", neighbour_share=share), scores
    for way in ways:
        votes = _votes(pair, prompt, way)
        for heads, look_ahead in product(head_sets, _LOOK_AHEADS):
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


def _recall(needed: Needed, keep_rate: float) -> float:
    """Mean over the kinds, and in them over the prompts, of the share of a prompt's lines that are kept."""
    return fmean(_recall_by_kind(needed, keep_rate).values())


def _recall_by_kind(needed: Needed, keep_rate: float) -> dict[str, float]:
    return {
        kind: fmean(fmean(float(rate <= keep_rate) for rate in rates) for rates in prompts)
        for kind, prompts in needed.items()
    }


def _measure(pair: ModelPair, ways: Sequence[PrefillConfig], longest: int, plan: _Plan) -> Costs:
    """Time the parts of a first token, on random ids, and fit them by length."""
    lengths = sorted({256, min(1024, longest), min(4096, longest)})
    num_ids = min(text_config(model.config).vocab_size for model in (pair.target, pair.draft))
    ids = torch.randint(0, num_ids, (lengths[-1],), generator=torch.Generator().manual_seed(0)).tolist()
    chunk = PrefillConfig.prefill_chunk

    def fit(prefill: Callable[[int], Any]) -> Callable[[float], float]:
        return fit_quadratic(lengths, [_seconds(partial(prefill, length)) for length in lengths])

    plan.step("timing the target")
    target = fit(lambda length: pair.open_target(chunk).forward(ids[:length], range(length), 1))

    def draft_pass(way: PrefillConfig, length: int) -> None:
        model = CachedModel(pair.draft, chunk)
        model.prefill(ids[:length], range(length), way.draft_window, way.draft_sinks, way.scoring_layers)

    draft = {}
    for way in ways:
        plan.step(f"timing the draft, {describe_setting(way)}")
        draft[way.draft_window, way.scoring_layers] = fit(partial(draft_pass, way))
    plan.step("timing the look-ahead")
    model = CachedModel(pair.draft, chunk)
    model.prefill(ids[: lengths[-1]], range(lengths[-1]))
    steps = []
    for position in range(lengths[-1], lengths[-1] + 12):
        steps.append(_once(partial(model.forward, ids[:1], [position], 1)))
    return Costs(target, draft, median(steps))


def _once(run: Callable[[], Any]) -> float:
    started = perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - started


def _seconds(run: Callable[[], Any]) -> float:
    _once(run)
    return median(_once(run) for _ in range(3))


def fit_quadratic(lengths: Sequence[int], seconds: Sequence[float]) -> Callable[[float], float]:
    """Seconds as a + b·n + c·n², none of them negative, by least squares of the relative error."""
    powers = torch.tensor([[1.0, n, n * n] for n in lengths], dtype=torch.float64)
    rows = powers / torch.tensor(seconds, dtype=torch.float64)[:, None]
    wanted = torch.ones(len(lengths), 1, dtype=torch.float64)
    best, best_error = torch.zeros(3, dtype=torch.float64), math.inf
    # Few enough to try which of the three there are.
    for chosen in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        scale = rows[:, chosen].amax(dim=0)
        solution = torch.linalg.lstsq(rows[:, chosen] / scale, wanted).solution[:, 0] / scale
        error = float((rows[:, chosen] @ solution - 1).square().sum())
        if bool((solution >= 0).all()) and error < best_error:
            best, best_error = torch.zeros(3, dtype=torch.float64), error
            best[chosen] = solution
    a, b, c = best.tolist()
    return lambda n: float(a + b * n + c * n * n)


@dataclass(frozen=True)
class _Choice:
    """The chosen setting; recall by kind, its own and that of the paper's rule; what was measured; what to know."""

    config: PrefillConfig
    kinds: Mapping[str, tuple[float, float]]
    points: Sequence[Point]
    notes: Sequence[str]


def _choose(
    needed: Mapping[int, Mapping[PrefillConfig, Needed]], costs: Costs, chance: float, margin: float
) -> _Choice:
    """The cheapest setting that is within the margin of the best recall at the default's share, at every length.

    Over all lengths, no pool of kinds may be kept less well than by the paper's rule, but for `_GUARD`.
    """
    lengths = sorted(needed)
    usual = RATES[-1]
    notes = []
    settings = list(needed[lengths[0]])
    # Few enough that the best of them is not the best by luck; their heads were found on other prompts.
    plain = [config for config in settings if replace(config, scoring_heads=None) == _PAPER]
    num_prompts = sum(len(prompts) for by_setting in needed.values() for prompts in by_setting[plain[0]].values())
    best_attention = max(_over_lengths(needed, config, usual) for config in plain)
    if best_attention < chance + _TELLS_APART + 1 / math.sqrt(num_prompts):
        settings = [config for config in settings if config.scorer == "anchors"]
        notes.append(
            f"The draft cannot retrieve: its best heads keep {best_attention:.0%} of the evidence at keep_rate "
            f"{usual}, and chance {chance:.0%}. Anchors alone score the prompt, and paraphrases will not be found."
        )
    best = {length: max(_recall(needed[length][config], usual) for config in settings) for length in lengths}
    by_paper = {length: _recall_by_kind(needed[length][_PAPER], usual) for length in lengths}
    pools = {name: _pool_recall(by_paper, kinds) for name, kinds in _pools(by_paper[lengths[0]]).items()}
    chosen: tuple[float, PrefillConfig, dict[int, float]] | None = None
    for config in settings:
        rates = _rates_of(needed, config, {length: best[length] - margin for length in lengths}, pools)
        if rates is None:
            continue
        cost = sum(math.log(costs.ttft(config, n, rates[n]) / costs.target(n)) for n in lengths) / len(lengths)
        if chosen is None or cost < chosen[0]:
            chosen = cost, config, rates
    if chosen is None:
        raise ValueError(
            f"no setting is within {margin} of the best recall and within {_GUARD} of the paper's rule for every pool "
            "of kinds; more prompts per length, or a larger margin, leave more to choose from"
        )
    _, config, rates = chosen
    found = config
    config = replace(config, keep_rate=tuple((length, rates[length]) for length in lengths))
    even = _break_even(config, costs, lengths[-1], notes)
    if even < lengths[0]:
        notes.append(f"Time is gained from about {even} tokens on; what is kept was not tried under {lengths[0]}.")
    config = replace(config, min_prompt_tokens=max(even, lengths[0]))
    by_choice = {length: _recall_by_kind(needed[length][found], rates[length]) for length in lengths}
    kinds = {kind: (_pool_recall(by_choice, [kind]), _pool_recall(by_paper, [kind])) for kind in by_paper[lengths[0]]}
    ours, papers = (fmean(values) for values in zip(*kinds.values(), strict=True))
    notes.append(
        f"Evidence kept: {ours:.0%} by the chosen setting, {papers:.0%} by the paper's rule at keep_rate {usual}, "
        f"{chance:.0%} by chance at that rate."
    )
    always = (_PAPER, found)
    points = [point for n in lengths for point in _points(needed[n], costs, n, always)]
    return _Choice(config, kinds, points, notes)


def _points(
    needed: Mapping[PrefillConfig, Needed], costs: Costs, num_tokens: int, always: Sequence[PrefillConfig]
) -> list[Point]:
    """Every rate of some settings; of the others those that no point of the same scorer beats in recall and in time."""
    points = []
    for scorer in ("attention", "anchors", "fused"):
        made = [
            (config, Point(describe_setting(config), num_tokens, rate, _recall(rates, rate), ttft))
            for config, rates in needed.items()
            if config.scorer == scorer
            for rate in RATES
            for ttft in [costs.ttft(config, num_tokens, rate)]
        ]
        best = -1.0
        for config, point in sorted(made, key=lambda each: (each[1].ttft_s, -each[1].recall)):
            if point.recall > best or config in always:
                points.append(point)
            best = max(best, point.recall)
    return points


def _over_lengths(
    needed: Mapping[int, Mapping[PrefillConfig, Needed]], config: PrefillConfig, keep_rate: float
) -> float:
    return fmean(_recall(by_setting[config], keep_rate) for by_setting in needed.values())


def _pools(kinds: Collection[str]) -> dict[str, list[str]]:
    """Kinds that are judged together, since few prompts are of one kind."""
    pools = {
        "the question's words": [kind for kind in kinds if kind not in IN_OTHER_WORDS],
        "other words": [kind for kind in kinds if kind in IN_OTHER_WORDS],
    }
    return {name: members for name, members in pools.items() if members}


def _pool_recall(by_length: Mapping[int, Mapping[str, float]], kinds: Sequence[str]) -> float:
    return fmean(recalls[kind] for recalls in by_length.values() for kind in kinds if kind in recalls)


def _rates_of(
    needed: Mapping[int, Mapping[PrefillConfig, Needed]],
    config: PrefillConfig,
    wanted: Mapping[int, float],
    pools: Mapping[str, float],
) -> dict[int, float] | None:
    """By length the smallest shares that keep enough in all, and as much of every pool as the paper's rule does."""
    for least in RATES:
        rates = _least_rates(needed, config, wanted, least)
        if rates is None:
            return None
        recalls = {length: _recall_by_kind(needed[length][config], rate) for length, rate in rates.items()}
        by_pool = _pools(recalls[min(recalls)])
        if all(_pool_recall(recalls, by_pool[name]) >= paper - _GUARD for name, paper in pools.items()):
            return rates
    return None


def _least_rates(
    needed: Mapping[int, Mapping[PrefillConfig, Needed]],
    config: PrefillConfig,
    wanted: Mapping[int, float],
    least: float,
) -> dict[int, float] | None:
    """By length the smallest share, `least` or more, whose recall is as wanted; a longer prompt needs no larger one."""
    rates: dict[int, float] = {}
    for length in sorted(needed, reverse=True):
        enough = [rate for rate in RATES if rate >= least and _recall(needed[length][config], rate) >= wanted[length]]
        if not enough:
            return None
        least = rates[length] = enough[0]
    return rates


def _break_even(config: PrefillConfig, costs: Costs, longest: int, notes: list[str]) -> int:
    """The shortest prompt whose first token comes at least a tenth sooner."""
    lengths = [round(256 * 2 ** (step / 2)) for step in range(40)]
    for length in lengths:
        rate = max(config.rate_for(length), (config.keep_first + config.keep_last) * config.chunk_size / length)
        if costs.ttft(config, length, min(1.0, rate)) < 0.9 * costs.target(length):
            return length
        if length > longest:
            break
    notes.append("Sparse prefill gains nothing at the lengths that were tried; no prompt is pruned unless asked to.")
    return 1 << 30
