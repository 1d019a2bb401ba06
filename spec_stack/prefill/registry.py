"""The selection rules by name; loads none of them, and no torch.

`SCORERS["mine"] = Mine` adds one (docs/add-a-selection-rule.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_stack.config import KNOWN_SCORERS
from spec_stack.settings.registry import Registry

if TYPE_CHECKING:
    from spec_stack.config import PrefillConfig
    from spec_stack.prefill.rule import SelectionRule

SCORERS: Registry[type[SelectionRule]] = Registry(
    "scorer",
    KNOWN_SCORERS,
    {
        "attention": "spec_stack.prefill.rules.attention:ByAttention",
        "bm25": "spec_stack.prefill.rules.bm25:ByBM25",
    },
)
"""name -> "module:Class" or the class itself. An entry more is a rule more."""


def make_rule(name: str) -> SelectionRule:
    """Build a selection rule by name. Raises ValueError for an unknown one, naming the nearest."""
    found = SCORERS.find(name)
    if not (isinstance(found, type) and callable(getattr(found, "score", None))):
        raise ValueError(f"the registry holds {found!r}, which is no rule; write `class Mine(SelectionRule)`")
    return found()


def needs_attention(name: str) -> bool:
    """Return whether a rule needs the draft's attention over the prompt. Raises ValueError for an unknown name."""
    return make_rule(name).needs_attention


def needs_draft(config: PrefillConfig) -> bool:
    """Return whether the draft reads a prompt: for the rule, or for its check."""
    return config.max_dropped_attention is not None or needs_attention(config.scorer)
