"""The proposers by name; loads none of them, and no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spec_stack.config import KNOWN_PROPOSERS
from spec_stack.settings.registry import Registry

if TYPE_CHECKING:
    from spec_stack.decode.proposer import Proposer, ProposerInputs

PROPOSERS: Registry[Callable[[ProposerInputs], Proposer]] = Registry(
    "proposer",
    KNOWN_PROPOSERS,
    {
        "model": "spec_stack.decode.propose:ModelProposer",
        "ngram": "spec_stack.decode.ngram:NgramProposer",
        "both": "spec_stack.decode.ngram:NgramThenDraft",
    },
)
"""name -> "module:Class" or what makes one of `ProposerInputs`. An entry more is a proposer more."""
