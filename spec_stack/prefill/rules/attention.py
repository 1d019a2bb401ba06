"""Selection by the draft's attention, and by rare words in common with the question."""

from __future__ import annotations

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.question import raise_named
from spec_stack.prefill.rule import ScoringInputs, SelectionRule
from spec_stack.prefill.segments import Segments


class ByAttention(SelectionRule):
    """The mean importance of a segment, raised where it shares rare words with the question.

    SpecPrefill (https://arxiv.org/abs/2502.02789, section 3.2.3) scores by importance alone, as do its queries here.
    """

    def score(self, inputs: ScoringInputs, segments: Segments, config: PrefillConfig) -> torch.Tensor:
        scores = segments.mean_importance(inputs.token_importance(config), config)
        inputs.note_part("attention", scores)
        return raise_named(scores, inputs, segments) if config.queries_from_prompt else scores
