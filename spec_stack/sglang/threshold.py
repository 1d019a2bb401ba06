"""The shortest prompt that a server prunes by default, by the counted cost of both models. No SGLang import."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spec_stack.prefill.cost import Shape, counted_break_even
from spec_stack.sglang.server_args import ServerConfig

# Longer than any prompt.
NEVER = 2**30


def with_threshold(config: ServerConfig, target: Any, draft: Any) -> ServerConfig:
    """Raise min_prompt_tokens to where pruning is expected to pay, unless it was given or calibrated.

    target, draft: their Transformers text configurations. The default stays for layers without a cost model.
    """
    prefill = config.prefill
    if not config.prunes or "min_prompt_tokens" in prefill.given:
        return config
    try:
        even = counted_break_even(Shape.of(target), Shape.of(draft), prefill) or NEVER
    except ValueError:
        return config
    if even <= prefill.min_prompt_tokens:
        return config
    return replace(config, prefill=replace(prefill, min_prompt_tokens=even))
