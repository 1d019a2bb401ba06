"""Chooses heads and a setting from judged prompts, without models: `choose(cases, margin)`. Heads are ranked on other
families than the judged one; a guard compares the choice with the default on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, stdev
from typing import Any

import torch

from spec_stack.calibrate.judged import ScoredPrompt, needed
from spec_stack.calibrate.prompts import Task
from spec_stack.config import PrefillConfig

RATES = (0.04, 0.05, 0.06, 0.07, 0.085, 0.1, 0.125, 0.15, 0.2)
"""Shares that may be kept; the largest is the default, by which recall is judged."""
_USUAL = RATES[-1]
_NUM_HEADS = (2, 4, 8, 16)
# Shares of the layers whose heads may vote: fewer layers run sooner.
_DEPTHS = (1.0, 0.67)
# A setting is judged at rates between these, small ones included.
_JUDGED_FROM, _JUDGED_TO = 0.06, 0.25
# Recall that a setting with fewer layers may lose against the best or the default, and recall that a draft's pass must
# gain over BM25 alone.
_TIE = 0.02
_EARNED = 0.05
# Fewest prompts for a choice, and for a length.
_FEWEST = 8
_FEWEST_OF_LENGTH = 4
Head = tuple[int, int]
# Per rule, the needed share of each prompt.
Needs = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """A judged prompt with its task."""

    task: Task
    judged: ScoredPrompt


@dataclass(frozen=True)
class Setting:
    """A scoring setting: this many heads of the first `depth` layers; BM25 alone without heads."""

    num_heads: int
    depth: int = 1 << 30

    def scores(self, judged: ScoredPrompt, heads: Sequence[int]) -> torch.Tensor:
        """Scores (num_segments,) of the heads in these rows, as in the selection rule."""
        return judged.by_head[list(heads)].mean(dim=0) if self.num_heads else judged.words

    def fields(self, heads: Sequence[Head]) -> dict[str, Any]:
        """The setting's fields of PrefillConfig."""
        if not self.num_heads:
            return {"granularity": "lines", "scorer": "bm25"}
        return {
            "granularity": "lines",
            "scoring_queries": "prompt",
            "scoring_heads": tuple(sorted(heads)),
            "draft_window": None,
            "head_reduction": "mean",
            "scorer": "attention",
        }


WORDS = Setting(0)


def settings_of(heads: Sequence[Head]) -> list[Setting]:
    """The candidate settings of a draft with these heads."""
    num_layers = 1 + max(layer for layer, _ in heads)
    depths = dict.fromkeys(math.ceil(share * num_layers) for share in _DEPTHS)
    numbers = [number for number in _NUM_HEADS if number < len(heads)] or [len(heads)]
    return [*(Setting(number, depth) for depth, number in product(depths, numbers)), WORDS]


class HeadRanking:
    """Ranks heads by the share of the prompts that each needs alone. cases: the selecting prompts. heads: (layer, head)
    of each row."""

    def __init__(self, cases: Sequence[Case], heads: Sequence[Head]) -> None:
        self._layers = torch.tensor([layer for layer, _ in heads])
        self.heads = heads
        self._by_kind: dict[str, torch.Tensor] = {}
        for kind in dict.fromkeys(case.task.kind for case in cases):
            own = [_log_worth(case.judged.alone) for case in cases if case.task.kind == kind]
            self._by_kind[kind] = torch.stack(own).mean(dim=0)

    def best(self, setting: Setting, without: Collection[str] = ()) -> list[int]:
        """Rows of the voting heads, chosen without these families."""
        if not setting.num_heads:
            return []
        worth = torch.stack([own for kind, own in self._by_kind.items() if kind not in without]).mean(dim=0)
        worth = torch.where(self._layers < setting.depth, worth, -torch.inf)
        return worth.argsort(descending=True, stable=True)[: setting.num_heads].tolist()

    def needs(self, setting: Setting, case: Case) -> float:
        """A prompt's needed share, with heads chosen on other families."""
        without = () if case.task.is_guard else (case.task.kind,)
        return need(case, setting.scores(case.judged, self.best(setting, without)))

    def cost(self, setting: Setting) -> int:
        """Number of layers that a setting runs."""
        return 1 + max((self.heads[row][0] for row in self.best(setting)), default=-1)


def need(case: Case, scores: torch.Tensor) -> float:
    """The prompt's share needed under scores (num_segments,)."""
    return float(needed(case.judged, scores))


def _log_worth(need: torch.Tensor) -> torch.Tensor:
    """Value of needing this share, on a log scale; beyond 0.5 all are equal."""
    return -need.clamp(0.02, 0.5).log()


@dataclass(frozen=True)
class Choice:
    """The chosen fields of PrefillConfig, and the reasons in sentences."""

    settings: Mapping[str, Any]
    notes: Sequence[str]


def choose(cases: Sequence[Case], margin: float) -> Choice:
    """The setting with the best recall, BM25 alone, or the default. margin: recall that a length's share may lose
    against share 0.2."""
    first = min((case.task.num_tokens for case in cases), default=0)
    choosing = [case for case in cases if not case.task.is_guard and case.task.num_tokens == first]
    if len(choosing) < _FEWEST or len({case.task.kind for case in choosing}) < 2:
        few = f"{len(choosing)} prompts are too few to choose by, so the default stays; more time gives more of them."
        return Choice({}, [few])
    heads = [(int(layer), int(head)) for layer, head in choosing[0].judged.heads]
    ranks = HeadRanking(choosing, heads)
    found = _best_setting(choosing, ranks)
    needs = {
        "chosen": [ranks.needs(found, case) for case in cases],
        "default": [need(case, case.judged.default) for case in cases],
        "BM25": [need(case, case.judged.words) for case in cases],
    }
    notes: list[str] = []
    found = _if_earned(found, needs, notes)
    settings = _if_guarded(found.fields([heads[row] for row in ranks.best(found)]), cases, needs, notes)
    curve = _keep_curve(cases, needs["chosen"], needs["default"], margin)
    if settings and curve:
        settings["keep_rate"] = curve if len(curve) > 1 else curve[0][1]
    return Choice(settings, notes + _by_length(cases, needs, settings.get("keep_rate", _USUAL)))


def _best_setting(cases: Sequence[Case], ranks: HeadRanking) -> Setting:
    """The setting with the fewest layers among those near the best recall."""
    worth = {
        setting: _balanced(cases, [_worth(ranks.needs(setting, case)) for case in cases])
        for setting in settings_of(ranks.heads)
    }
    best = max(worth.values())
    good = [setting for setting, value in worth.items() if value >= best - _TIE]
    return min(good, key=lambda setting: (ranks.cost(setting), -worth[setting]))


def _if_earned(found: Setting, needs: Needs, notes: list[str]) -> Setting:
    """The setting, or BM25 alone if the draft's pass does not beat it significantly and by enough; updates `needs`."""
    gains = [_worth(ours) - _worth(words) for ours, words in zip(needs["chosen"], needs["BM25"], strict=True)]
    gain, enough = fmean(gains), max(_EARNED, stdev(gains) / math.sqrt(len(gains)))
    if found != WORDS and gain >= enough:
        ours, words = (f"{recall(needs[name], _USUAL):.0%}" for name in ("chosen", "BM25"))
        notes.append(f"The draft earns its pass: it keeps {ours} of the evidence at {_USUAL}, BM25 {words}.")
        return found
    notes.append(
        f"The draft does not earn its pass: its heads keep {max(gain, 0.0):.3f} more than BM25 at best, as "
        f"a mean over shares from {_JUDGED_FROM} to {_JUDGED_TO}, and {enough:.3f} would pay. BM25 alone does."
    )
    needs["chosen"] = needs["BM25"]
    return WORDS


def _if_guarded(settings: dict[str, Any], cases: Sequence[Case], needs: Needs, notes: list[str]) -> dict[str, Any]:
    """The choice, or nothing if it keeps less than the default on held-out prompts, beyond ties; updates `needs`."""
    guard = [at for at, case in enumerate(cases) if case.task.is_guard]
    own = {name: [needs[name][at] for at in guard] for name in ("chosen", "default")}
    kept, usual = (f"{recall(own[name], _USUAL):.0%}" for name in own)
    shown = f"on {len(guard)} prompts that chose nothing, it keeps {kept} at {_USUAL}, the default {usual}"
    # It runs fewer layers, or none after its last head.
    allowed = _TIE * len(guard) if settings.get("scoring_heads") else 0.0
    if sum(map(_worth, own["chosen"])) >= sum(map(_worth, own["default"])) - allowed:
        notes.append(f"The guard: {shown}.")
        return settings
    notes.append(f"The default stays, better over all shares: {shown}.")
    needs["chosen"] = needs["default"]
    return {}


def _worth(need: float) -> float:
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


def _by_length(cases: Sequence[Case], needs: Needs, keep_rate: Any) -> list[str]:
    """Recall at each length: of the choice at its share, and of the default and BM25 at the usual one."""
    notes, config = [], PrefillConfig(keep_rate=keep_rate)
    for length in sorted({case.task.num_tokens for case in cases}):
        own = {
            name: [need for need, case in zip(needs[name], cases, strict=True) if case.task.num_tokens == length]
            for name in needs
        }
        rate = config.rate_for(length)
        notes.append(
            f"Of {len(own['chosen'])} prompts of {length} tokens, {recall(own['chosen'], rate):.0%} keep all evidence "
            f"at {rate:.3g}; at {_USUAL} {recall(own['default'], _USUAL):.0%} under the default and "
            f"{recall(own['BM25'], _USUAL):.0%} under BM25."
        )
    return notes
