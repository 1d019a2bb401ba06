"""Chooses heads and shares from judged prompts, without models: `choose(cases, margin)`. Heads are ranked on other
families than the judged one; held-out prompts tell what is gained over the default."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

import torch

from spec_stack.calibrate.judged import ScoredPrompt, needed
from spec_stack.calibrate.prompts import Task
from spec_stack.config import PrefillConfig

RATES = (0.04, 0.05, 0.06, 0.07, 0.085, 0.1, 0.125, 0.15, 0.2)
"""Shares that may be kept; the largest is the default, by which recall is judged."""
_USUAL = RATES[-1]
_NUM_HEADS = (2, 4, 8, 16)
# Shares of the layers whose heads may score: fewer layers run sooner.
_DEPTHS = (1.0, 0.67)
# A setting is judged at rates between these, small ones included.
_JUDGED_FROM, _JUDGED_TO = 0.06, 0.25
# Recall that a setting with fewer layers may lose against the best or the default.
_TIE = 0.02
# Fewest prompts for a choice, and for a length.
_FEWEST = 8
_FEWEST_OF_LENGTH = 4
Head = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A judged prompt with its task."""

    task: Task
    judged: ScoredPrompt


@dataclass(frozen=True)
class Setting:
    """A scoring setting: this many heads of the first `depth` layers."""

    num_heads: int
    depth: int = 1 << 30


def fields_of(heads: Sequence[Head]) -> dict[str, Any]:
    """The fields of PrefillConfig under which these heads score."""
    return {
        "granularity": "lines",
        "scoring_queries": "prompt",
        "scoring_heads": tuple(sorted(heads)),
        "draft_window": None,
        "head_reduction": "mean",
        "scorer": "attention",
    }


def settings_of(heads: Sequence[Head]) -> list[Setting]:
    """The candidate settings of a draft with these heads."""
    depths = dict.fromkeys(math.ceil(share * _num_layers(heads)) for share in _DEPTHS)
    numbers = [number for number in _NUM_HEADS if number < len(heads)] or [len(heads)]
    return [Setting(number, depth) for depth, number in product(depths, numbers)]


def _num_layers(heads: Sequence[Head]) -> int:
    return 1 + max(layer for layer, _ in heads)


class HeadRanking:
    """Ranks heads by the share of the prompts that each needs alone. cases: the selecting prompts. heads: (layer, head)
    of each row."""

    def __init__(self, cases: Sequence[Case], heads: Sequence[Head]) -> None:
        self._layers = torch.tensor([layer for layer, _ in heads])
        self.heads = heads
        self._by_kind: dict[str, torch.Tensor] = {}
        for kind in dict.fromkeys(case.task.kind for case in cases):
            # On a log scale; beyond 0.5 all are equal.
            own = [-case.judged.alone.clamp(0.02, 0.5).log() for case in cases if case.task.kind == kind]
            self._by_kind[kind] = torch.stack(own).mean(dim=0)

    def best(self, setting: Setting, without: Collection[str] = ()) -> list[int]:
        """Rows of the scoring heads, chosen without these families."""
        scores = torch.stack([own for kind, own in self._by_kind.items() if kind not in without]).mean(dim=0)
        scores = torch.where(self._layers < setting.depth, scores, -torch.inf)
        return scores.argsort(descending=True, stable=True)[: setting.num_heads].tolist()

    def needs(self, setting: Setting, case: Case) -> float:
        """A prompt's needed share, with heads chosen on other families."""
        without = () if case.task.is_guard else (case.task.kind,)
        return float(needed(case.judged, case.judged.score(self.best(setting, without))))

    def cost(self, setting: Setting) -> int:
        """Number of layers that a setting runs."""
        return _num_layers([self.heads[row] for row in self.best(setting)])


class TooFewPromptsError(ValueError):
    """Too few prompts were judged for a choice."""


@dataclass(frozen=True)
class Choice:
    """The chosen fields of PrefillConfig, and the reasons in sentences."""

    settings: Mapping[str, Any]
    notes: Sequence[str]


def choose(cases: Sequence[Case], margin: float, chooses_rates: bool = True) -> Choice:
    """The heads and shares with the best recall, or the default. margin: recall that a length's share may lose against
    share 0.2. chooses_rates: False leaves shares alone. The last note says what is gained over the default. Raises
    TooFewPromptsError."""
    first = min((case.task.num_tokens for case in cases), default=0)
    choosing = [case for case in cases if not case.task.is_guard and case.task.num_tokens == first]
    if len(choosing) < _FEWEST or len({case.task.kind for case in choosing}) < 2:
        few = f"{len(choosing)} prompts are too few to choose by, so nothing is saved"
        raise TooFewPromptsError(
            f"{few}; give more time (--budget), or more prompts of the shortest length (--prompts)"
        )
    heads = [(int(layer), int(head)) for layer, head in choosing[0].judged.heads]
    ranks = HeadRanking(choosing, heads)
    found = _best_setting(choosing, ranks)
    chosen = [ranks.needs(found, case) for case in cases]
    default = [float(needed(case.judged, case.judged.default)) for case in cases]
    curve = _keep_curve(cases, chosen, default, margin) if chooses_rates else ()
    settings = fields_of([heads[row] for row in ranks.best(found)])
    if curve:
        settings["keep_rate"] = curve if len(curve) > 1 else curve[0][1]
    gain = _gain(cases, chosen, default, curve, (ranks.cost(found), _num_layers(heads)))
    if not gain:
        settings, chosen, gain = {}, default, "It gains nothing over the default, which stays."
    return Choice(settings, [*_by_length(cases, chosen, default, settings.get("keep_rate", _USUAL)), gain])


def _best_setting(cases: Sequence[Case], ranks: HeadRanking) -> Setting:
    """The setting with the fewest layers among those near the best recall."""
    scores = {
        setting: _balanced(cases, [_mean_recall(ranks.needs(setting, case)) for case in cases])
        for setting in settings_of(ranks.heads)
    }
    best = max(scores.values())
    good = [setting for setting, value in scores.items() if value >= best - _TIE]
    return min(good, key=lambda setting: (ranks.cost(setting), -scores[setting]))


def _gain(
    cases: Sequence[Case],
    chosen: Sequence[float],
    default: Sequence[float],
    curve: Sequence[tuple[int, float]],
    layers: tuple[int, int],
) -> str:
    """What is gained over the default, by prompts that chose nothing; empty for nothing. layers: that run, of all."""
    held_out = [at for at, case in enumerate(cases) if case.task.is_guard]
    # Those that choose are judged by heads of other families.
    for own in (held_out, [at for at in range(len(cases)) if at not in held_out]):
        recalls = ([_mean_recall(needs[at]) for at in own] for needs in (chosen, default))
        mine, usual = (_balanced([cases[at] for at in own], each) if own else 0.0 for each in recalls)
        if mine < usual - _TIE:
            return ""
    ours, theirs = ([needs[at] for at in held_out] for needs in (chosen, default))
    kept, kept_by_default = recall(ours, _USUAL), recall(theirs, _USUAL)
    smaller = [f"{100 * rate:.3g}% of {length} tokens" for length, rate in curve if rate < _USUAL]
    gains = [f"it keeps {' and '.join(smaller)} in place of {_USUAL:.0%}"] if smaller else []
    if layers[0] < layers[1]:
        gains.append(f"{layers[0]} of the draft's {layers[1]} layers run")
    if not gains and kept <= kept_by_default:
        return ""
    gains.append(
        f"{kept:.0%} of {len(held_out)} held-out prompts keep their evidence at {_USUAL:.0%}, by default "
        f"{kept_by_default:.0%}"
    )
    return f"Gained over the default: {'; '.join(gains)}."


def _mean_recall(need: float) -> float:
    """A prompt's mean recall over the judged shares, log-spaced."""
    return min(1.0, max(0.0, math.log(_JUDGED_TO / need) / math.log(_JUDGED_TO / _JUDGED_FROM)))


def _balanced(cases: Sequence[Case], values: Sequence[float]) -> float:
    """Mean over families of the mean over their prompts."""
    by_kind: dict[str, list[float]] = {}
    for case, value in zip(cases, values, strict=True):
        by_kind.setdefault(case.task.kind, []).append(value)
    return fmean(fmean(own) for own in by_kind.values())


def recall(needs: Sequence[float], keep_rate: float) -> float:
    """The share of prompts whose evidence this keep rate keeps."""
    return fmean(need <= keep_rate for need in needs) if needs else 0.0


def _keep_curve(
    cases: Sequence[Case], chosen: Sequence[float], default: Sequence[float], margin: float
) -> tuple[tuple[int, float], ...]:
    """By length, the smallest share with recall within the margin of share 0.2 and no worse than the default. The share
    never grows with the length, and the number of kept tokens never falls."""
    curve: list[tuple[int, float]] = []
    least = RATES[0]
    for length in sorted({case.task.num_tokens for case in cases}, reverse=True):
        own = [at for at, case in enumerate(cases) if case.task.num_tokens == length]
        if len(own) < _FEWEST_OF_LENGTH:
            continue
        ours, theirs = ([values[at] for at in own] for values in (chosen, default))
        best = recall(ours, _USUAL)
        wanted = max(best - margin, min(best, recall(theirs, _USUAL))) - 1e-9
        least = next(rate for rate in RATES if rate >= least and recall(ours, rate) >= wanted)
        curve.insert(0, (length, least))
    for at in range(1, len(curve)):
        (before, rate), (length, own_rate) = curve[at - 1], curve[at]
        fewest = next(each for each in RATES if each >= min(rate, rate * before / length))
        curve[at] = length, max(own_rate, fewest)
    return tuple(curve)


def _by_length(cases: Sequence[Case], chosen: Sequence[float], default: Sequence[float], keep_rate: Any) -> list[str]:
    """Recall at each length: of the choice at its share, and of the default at the usual one."""
    notes, config = [], PrefillConfig(keep_rate=keep_rate)
    for length in sorted({case.task.num_tokens for case in cases}):
        own = [at for at, case in enumerate(cases) if case.task.num_tokens == length]
        ours, theirs = ([needs[at] for at in own] for needs in (chosen, default))
        rate = config.rate_for(length)
        notes.append(
            f"Of {len(own)} prompts of {length} tokens, {recall(ours, rate):.0%} keep all evidence at {rate:.3g}; "
            f"{recall(theirs, _USUAL):.0%} under the default at {_USUAL}."
        )
    return notes
