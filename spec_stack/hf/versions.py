"""Everything in which the supported transformers versions differ for this package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_NAMES = ("cache", "past_key_values")
"""What a forward calls its cache: transformers from 5.24 on, and before it."""


@cache
def cache_parameter(kind: type[PreTrainedModel]) -> str:
    """What the forward of this class calls its cache."""
    # Loading a model imports it; importing this package does not.
    from transformers import GenerationMixin

    newer, older = CACHE_NAMES
    has_newer = newer in signature(GenerationMixin.prepare_inputs_for_generation).parameters
    # Checkpoint code may use the older name under a newer transformers.
    return older if older in signature(kind.forward).parameters or not has_newer else newer


def is_given(cache: Any, variables: Mapping[str, Any]) -> bool:
    """Whether `model.generate` was given this cache and did not create it. variables: its local ones."""
    if getattr(cache, "_is_user_defined", False):
        return True
    # Before 5.24 transformers does not mark a given cache.
    options = variables.get("kwargs")
    return isinstance(options, dict) and any(cache is options.get(name) for name in CACHE_NAMES)


def state_refusal() -> str:
    """The reason why this transformers cannot roll back a recurrent state; empty if it can."""
    from transformers.cache_utils import LinearAttentionLayer

    if "state_idx" in signature(LinearAttentionLayer.lazy_initialization).parameters:
        return ""
    return f"transformers {version('transformers')} keeps the state of its layers in an older way; install 5.24"


def gguf_options(config: Any) -> dict[str, Any]:
    """Options of `from_pretrained` that unpack a GGUF file with this config; an older transformers always unpacks."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    # The config is already loaded; reading it again takes seconds.
    return {"quantization_config": GgufConfig(dequantize=True), "config": config}
