"""One draft model for both phases of LLM inference: sparse prefill and speculative decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# These imports register the valid names of `config`; they load nothing else.
import spec_stack.controller.registry
import spec_stack.prefill.registry  # noqa: F401

if TYPE_CHECKING:
    from spec_stack.api.custom_generate import with_draft
    from spec_stack.api.generator import SpecStackGenerator
    from spec_stack.api.pruner import Pruner, PrunerConversation, PruneResult
    from spec_stack.api.session import Session
    from spec_stack.bench.fidelity import FidelityReport, measure_fidelity
    from spec_stack.config import DecodeConfig, PrefillConfig, SamplingParams, SessionConfig, SpecStackConfig
    from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord
    from spec_stack.types import GenerationResult, Metrics, Selection, StepOutput, TokenLogprobs

__version__ = "0.2.0"

# Loaded on first use, so that importing only the controller does not import torch.
_HOMES = {
    "api.custom_generate": ("with_draft",),
    "bench.fidelity": ("FidelityReport", "measure_fidelity"),
    "api.generator": ("SpecStackGenerator",),
    "api.pruner": ("PruneResult", "Pruner", "PrunerConversation"),
    "api.session": ("Session",),
    "config": ("DecodeConfig", "PrefillConfig", "SamplingParams", "SessionConfig", "SpecStackConfig"),
    "controller.base": ("DraftSignals", "Policy", "StepContext", "StepRecord"),
    "types": ("GenerationResult", "Metrics", "Selection", "StepOutput", "TokenLogprobs"),
}
__all__ = [
    "DecodeConfig",
    "DraftSignals",
    "FidelityReport",
    "GenerationResult",
    "Metrics",
    "Policy",
    "PrefillConfig",
    "PruneResult",
    "Pruner",
    "PrunerConversation",
    "SamplingParams",
    "Selection",
    "Session",
    "SessionConfig",
    "SpecStackConfig",
    "SpecStackGenerator",
    "StepContext",
    "StepOutput",
    "StepRecord",
    "TokenLogprobs",
    "measure_fidelity",
    "with_draft",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"spec_stack.{home}"), name)
    raise AttributeError(f"module 'spec_stack' has no attribute {name!r}")
