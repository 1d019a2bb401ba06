"""The draft's attention and the question's words together."""

from __future__ import annotations

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.rule import Evidence, SelectionRule
from spec_stack.prefill.rules.anchors import ByAnchors
from spec_stack.prefill.rules.attention import ByAttention
from spec_stack.prefill.rules.bm25 import ByBM25
from spec_stack.prefill.units import Units

# Under the attention of any unit that is seen at all, so that its logarithm stays finite.
_LEAST_ATTENTION = 1e-12


class AttentionAndAnchors(SelectionRule):
    """The logarithm of the attention, and config.anchor_weight times the anchors on top of it."""

    def score(self, evidence: Evidence, units: Units, config: PrefillConfig) -> torch.Tensor:
        anchors = ByAnchors().score(evidence, units, config)
        return fuse(anchors, ByAttention().score(evidence, units, config), config.anchor_weight)


class AttentionAndBM25(SelectionRule):
    """The logarithm of the attention, and config.bm25_weight times BM25 on top of it, in its standard deviations."""

    def score(self, evidence: Evidence, units: Units, config: PrefillConfig) -> torch.Tensor:
        words = ByBM25().score(evidence, units, config)
        spread = words.std(unbiased=False)
        standard = (words - words.mean()) / spread if spread > 0 else torch.zeros_like(words)
        return fuse(standard, ByAttention().score(evidence, units, config), config.bm25_weight)


def fuse(words: torch.Tensor, attention: torch.Tensor, weight: float) -> torch.Tensor:
    """The logarithm of the attention (num_units,), and `weight` times what the words say on top of it.

    So they multiply a unit's attention, as independent evidence multiplies odds: a rare word decides, and where the
    question shares nothing that is rare, the order is the attention's own.
    """
    return attention.clamp(min=_LEAST_ATTENTION).log() + weight * words
