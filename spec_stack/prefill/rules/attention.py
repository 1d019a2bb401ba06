"""Selection by the draft's attention alone."""

from __future__ import annotations

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.rule import Evidence, SelectionRule
from spec_stack.prefill.units import Units


class ByAttention(SelectionRule):
    """The mean importance of a unit. SpecPrefill, https://arxiv.org/abs/2502.02789, section 3.2.3."""

    def score(self, evidence: Evidence, units: Units, config: PrefillConfig) -> torch.Tensor:
        return units.worth(evidence.token_importance(config), config)
