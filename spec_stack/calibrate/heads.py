"""Ranking of a draft's heads, and the candidate settings, without models. `HeadRanking(cases, heads).needs(setting,
case)`: a prompt's needed share under heads ranked on other families."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from spec_stack.calibrate.judged import ScoredPrompt, needed
from spec_stack.calibrate.prompts import Task

_NUM_HEADS = (2, 4, 8, 16)
# Shares of the layers whose heads may vote: fewer layers run sooner.
_DEPTHS = (1.0, 0.67)
Head = tuple[int, int]


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
            "num_scoring_layers": None,
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
