"""The draft's attention alone."""

from __future__ import annotations

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.rule import Evidence, SelectionRule
from spec_stack.prefill.units import Units


class ByAttention(SelectionRule):
    """The mean importance of a unit, and no less than a share of its better neighbour's.

    SpecPrefill, https://arxiv.org/abs/2502.02789, section 3.2.3; the neighbours are ours.
    """

    def score(self, evidence: Evidence, units: Units, config: PrefillConfig) -> torch.Tensor:
        return with_neighbours(units.means(evidence.token_importance(config)), config.neighbour_share)


def with_neighbours(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Scores (num_units,), each at least `share` of its better neighbour's."""
    if not share or len(scores) < 2:
        return scores
    left, right = torch.cat([scores[:1], scores[:-1]]), torch.cat([scores[1:], scores[-1:]])
    return torch.maximum(scores, share * torch.maximum(left, right))
