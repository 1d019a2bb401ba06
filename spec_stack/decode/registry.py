"""The proposers by name; loads none of them, and no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spec_stack.config import KNOWN_PROPOSERS
from spec_stack.settings.registry import Registry

if TYPE_CHECKING:
    from spec_stack.decode.proposer import Means, Proposer

PROPOSERS: Registry[Callable[[Means], Proposer]] = Registry(
    "proposer",
    KNOWN_PROPOSERS,
    {
        "model": "spec_stack.decode.propose:ModelProposer",
        "lookup": "spec_stack.decode.ngram:NgramProposer",
        "both": "spec_stack.decode.ngram:NgramThenDraft",
    },
)
"""name -> "module:Class" or what makes one of `Means`. An entry more is a proposer more."""


def make_proposer(name: str, means: Means) -> Proposer:
    """Make a request's proposer by name. Raises ValueError for an unknown one."""
    return PROPOSERS.find(name)(means)
