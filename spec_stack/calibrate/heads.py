"""Which heads of a draft find the evidence, and the settings that are tried with them. Pure.

How it is used: `Ranks(cases, heads).needs(setting, case)` is the share of a prompt that a setting needs, with heads
that were ranked on the other families of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch

from spec_stack.calibrate.judged import Judged, needed
from spec_stack.calibrate.prompts import Task
from spec_stack.config import PrefillConfig
from spec_stack.prefill.rules.fused import fuse

_NUM_HEADS = (2, 4, 8, 16)
_WEIGHTS = (0.0, 0.25, 0.5)
# Of the layers, for those whose heads may vote: fewer run sooner.
_DEPTHS = (1.0, 0.67)
Head = tuple[int, int]
Queries = Literal["prompt", "look_ahead"]


@dataclass(frozen=True)
class Case:
    """A judged prompt and which one it is."""

    task: Task
    judged: Judged


@dataclass(frozen=True)
class Setting:
    """A way to score. num_heads 0: words alone; bm25_weight 0: attention alone; depth: layers whose heads may vote."""

    num_heads: int
    queries: Queries = "prompt"
    bm25_weight: float = 0.0
    depth: int = 1 << 30

    def scores(self, judged: Judged, heads: Sequence[int]) -> torch.Tensor:
        """Scores (num_units,) as the selection rule gives them, of the heads in these rows."""
        if not self.num_heads:
            return judged.words
        attention = getattr(judged, self.queries)[list(heads)].mean(dim=0)
        return fuse(judged.standard_words, attention, self.bm25_weight) if self.bm25_weight else attention

    def fields(self, heads: Sequence[Head]) -> dict[str, Any]:
        """The fields of PrefillConfig that it sets."""
        if not self.num_heads:
            return {"unit": "lines", "scorer": "bm25", "neighbour_share": 0.0}
        chosen = {
            "unit": "lines",
            "scoring_queries": self.queries,
            "look_ahead": PrefillConfig.look_ahead,
            "scoring_heads": tuple(sorted(heads)),
            "scoring_layers": None,
            "draft_window": None,
            "head_vote": "share",
            "neighbour_share": 0.0,
            "scorer": "attention_bm25" if self.bm25_weight else "attention",
        }
        return chosen | ({"bm25_weight": self.bm25_weight} if self.bm25_weight else {})


WORDS = Setting(0)


def settings_of(heads: Sequence[Head]) -> list[Setting]:
    """The settings that are tried for a draft with these heads, at most 24."""
    num_layers = 1 + max(layer for layer, _ in heads)
    depths = dict.fromkeys(math.ceil(share * num_layers) for share in _DEPTHS)
    numbers = [number for number in _NUM_HEADS if number < len(heads)] or [len(heads)]
    numbers = numbers[-3:]
    own = [Setting(number, "prompt", weight, depth) for depth, number, weight in product(depths, numbers, _WEIGHTS)]
    ahead = [Setting(numbers[-2:][0], "look_ahead", weight, num_layers) for weight in _WEIGHTS[:2]]
    return [*own, *ahead, WORDS]


class Ranks:
    """Ranks the draft's heads by how small a share of the prompts they need, each by itself.

    Parameters
    ----------
    cases
        Those that choose.
    heads
        The (layer, head) of every row.
    """

    def __init__(self, cases: Sequence[Case], heads: Sequence[Head]) -> None:
        self._layers = torch.tensor([layer for layer, _ in heads])
        self.heads = heads
        self._by_kind: dict[tuple[str, str], torch.Tensor] = {}
        for kind in dict.fromkeys(case.task.kind for case in cases):
            own = [case.judged.alone for case in cases if case.task.kind == kind]
            for queries in ("prompt", "look_ahead"):
                worth = torch.stack([_log_worth(alone[queries]) for alone in own]).mean(dim=0)
                self._by_kind[queries, kind] = worth

    def best(self, setting: Setting, without: Collection[str] = ()) -> list[int]:
        """Rows of the heads that vote, chosen on all families but some."""
        if not setting.num_heads:
            return []
        kinds = [
            worth
            for (queries, kind), worth in self._by_kind.items()
            if queries == setting.queries and kind not in without
        ]
        worth = torch.stack(kinds).mean(dim=0)
        worth = torch.where(self._layers < setting.depth, worth, -torch.inf)
        return worth.argsort(descending=True, stable=True)[: setting.num_heads].tolist()

    def needs(self, setting: Setting, case: Case) -> float:
        """The share that a prompt needs, by heads that its own family has not chosen."""
        without = () if case.task.is_guard else (case.task.kind,)
        return need(case, setting.scores(case.judged, self.best(setting, without)))

    def cost(self, setting: Setting) -> float:
        """Count what a setting takes: layers that run, with about what a look-ahead takes on top."""
        if not setting.num_heads:
            return 0
        last = 1 + max(self.heads[row][0] for row in self.best(setting))
        return last if setting.queries == "prompt" else 1.2 * float(self._layers.max() + 1)


def need(case: Case, scores: torch.Tensor) -> float:
    """The share of a prompt that scores (num_units,) need."""
    return float(needed(case.judged, scores))


def _log_worth(need: torch.Tensor) -> torch.Tensor:
    """How good it is to need so much: the logarithm counts halves alike, and lost is lost."""
    return -need.clamp(0.02, 0.5).log()
