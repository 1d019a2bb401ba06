"""Choose, of the settings that were tried, the cheapest that keeps enough."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from spec_stack.calibrate.costs import Costs
from spec_stack.calibrate.needles import IN_OTHER_WORDS
from spec_stack.config import PrefillConfig
from spec_stack.prefill.calibration import Point, describe_setting

# Shares that are tried; the largest is the default, which sets the recall to be reached.
RATES = (0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.085, 0.1, 0.125, 0.15, 0.2)
PAPER = PrefillConfig.full_look_ahead()
# Recall that a pool of kinds may lose against the paper's rule, at the rates that are chosen.
GUARD = 0.05
# Recall over chance, and over what so few prompts may show, under which a draft is said to find nothing.
_TELLS_APART = 0.1
# By kind and prompt: the smallest keep_rate that keeps each line of the prompt's evidence.
Needed = dict[str, list[list[float]]]


def recall_at(needed: Needed, keep_rate: float) -> float:
    """Mean over the kinds, and in them over the prompts, of the share of a prompt's lines that are kept."""
    return fmean(recall_by_kind(needed, keep_rate).values())


def recall_by_kind(needed: Needed, keep_rate: float) -> dict[str, float]:
    return {
        kind: fmean(fmean(float(rate <= keep_rate) for rate in rates) for rates in prompts)
        for kind, prompts in needed.items()
    }


@dataclass(frozen=True)
class Choice:
    """The chosen setting; recall by kind, its own and that of the paper's rule; what was measured; what to know."""

    config: PrefillConfig
    kinds: Mapping[str, tuple[float, float]]
    points: Sequence[Point]
    notes: Sequence[str]


def choose(needed: Mapping[int, Mapping[PrefillConfig, Needed]], costs: Costs, chance: float, margin: float) -> Choice:
    """The cheapest setting that is within the margin of the best recall at the default's share, at every length.

    Over all lengths, no pool of kinds may be kept less well than by the paper's rule, but for `GUARD`.
    """
    lengths = sorted(needed)
    usual = RATES[-1]
    notes = []
    settings = list(needed[lengths[0]])
    # Few enough that the best of them is not the best by luck; their heads were found on other prompts.
    plain = [config for config in settings if replace(config, scoring_heads=None) == PAPER]
    num_prompts = sum(len(prompts) for by_setting in needed.values() for prompts in by_setting[plain[0]].values())
    best_attention = max(_over_lengths(needed, config, usual) for config in plain)
    if best_attention < chance + _TELLS_APART + 1 / math.sqrt(num_prompts):
        settings = [config for config in settings if config.scorer == "anchors"]
        notes.append(
            f"The draft cannot retrieve: its best heads keep {best_attention:.0%} of the evidence at keep_rate "
            f"{usual}, and chance {chance:.0%}. Anchors alone score the prompt, and paraphrases will not be found."
        )
    best = {length: max(recall_at(needed[length][config], usual) for config in settings) for length in lengths}
    by_paper = {length: recall_by_kind(needed[length][PAPER], usual) for length in lengths}
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
            f"no setting is within {margin} of the best recall and within {GUARD} of the paper's rule for every pool "
            "of kinds; more prompts per length, or a larger margin, leave more to choose from"
        )
    _, config, rates = chosen
    found = config
    config = replace(config, keep_rate=tuple((length, rates[length]) for length in lengths))
    even = _break_even(config, costs, lengths[-1], notes)
    if even < lengths[0]:
        notes.append(f"Time is gained from about {even} tokens on; what is kept was not tried under {lengths[0]}.")
    config = replace(config, min_prompt_tokens=max(even, lengths[0]))
    by_choice = {length: recall_by_kind(needed[length][found], rates[length]) for length in lengths}
    kinds = {kind: (_pool_recall(by_choice, [kind]), _pool_recall(by_paper, [kind])) for kind in by_paper[lengths[0]]}
    ours, papers = (fmean(values) for values in zip(*kinds.values(), strict=True))
    notes.append(
        f"Evidence kept: {ours:.0%} by the chosen setting, {papers:.0%} by the paper's rule at keep_rate {usual}, "
        f"{chance:.0%} by chance at that rate."
    )
    always = (PAPER, found)
    points = [point for n in lengths for point in _points(needed[n], costs, n, always)]
    return Choice(config, kinds, points, notes)


def _points(
    needed: Mapping[PrefillConfig, Needed], costs: Costs, num_tokens: int, always: Sequence[PrefillConfig]
) -> list[Point]:
    """Every rate of some settings; of the others those that no point of the same scorer beats in recall and in time."""
    points = []
    for scorer in ("attention", "anchors", "fused"):
        made = [
            (config, Point(describe_setting(config), num_tokens, rate, recall_at(rates, rate), ttft))
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
    return fmean(recall_at(by_setting[config], keep_rate) for by_setting in needed.values())


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
        recalls = {length: recall_by_kind(needed[length][config], rate) for length, rate in rates.items()}
        by_pool = _pools(recalls[min(recalls)])
        if all(_pool_recall(recalls, by_pool[name]) >= paper - GUARD for name, paper in pools.items()):
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
        enough = [rate for rate in RATES if rate >= least and recall_at(needed[length][config], rate) >= wanted[length]]
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
