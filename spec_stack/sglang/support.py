"""The algorithm's name, the versions of SGLang it was made for, and what a server's models and modes allow.

Drafting works wherever SGLang's STANDALONE does; pruning needs more.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

NAME = "SPEC_STACK"
OLDEST, NEWEST = (0, 5, 20), (0, 5, 23)

# Rotary, full attention in every layer, one key per head and token in the KV pool.
_ARCHITECTURES = (
    "Glm4ForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
# Draft backends that take their KV lengths from seq_lens, or are made to (see positions.protect_kv_lengths).
_MAPPED_DRAFT_BACKENDS = ("torch_native", "triton", "flashinfer", "fa3")


def check_version() -> None:
    """Raise RuntimeError unless SGLang is one of the versions the hooks were made for."""
    installed = version("sglang")
    numbers = tuple(int(part) for part in installed.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers <= NEWEST:
        supported = " to ".join(".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
        raise RuntimeError(f"{NAME} was made for SGLang {supported}, and this is {installed}; install one of those")


def num_matched(found: Any) -> int:
    """Tokens on the device that SGLang's cache has found; it says so by their number since 0.5.22, by their slots
    before."""
    if hasattr(found, "device_prefix_len"):
        return int(found.device_prefix_len)
    return len(found.device_indices)


def pruning_refusal(args: Any, target: Any, draft: Any) -> str | None:
    """Why no prompt of a server may be pruned, or None. Unpruned prompts are drafted for all the same.

    args: SGLang's resolved arguments; target, draft: its configurations of the models.
    """
    for role, config in (("target", target), ("draft", draft)):
        reason = _model_refusal(config)
        if reason is not None:
            return f"the {role} {reason}"
    if str(getattr(args, "disaggregation_mode", None) or "null") != "null":
        return "prefill and decode run on different servers"
    if (getattr(args, "dcp_size", None) or getattr(args, "decode_context_parallel_size", None) or 1) > 1:
        return "decode context parallelism splits the KV cache by position"
    if str(getattr(args, "kv_cache_dtype", None) or "auto").startswith("fp4"):
        return "pruning has not been tried with an FP4 KV cache"
    for flag in ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "kv_events_config"):
        if getattr(args, flag, None):
            return f"--{flag.replace('_', '-')} hashes radix keys in 32 bits, which have no room for a position"
    return None


def _model_refusal(config: Any) -> str | None:
    architecture = config.hf_config.architectures[0]
    if architecture not in _ARCHITECTURES:
        return f"is a {architecture}; prompts are pruned for {', '.join(_ARCHITECTURES)}"
    hf = config.hf_text_config
    layer_types = getattr(hf, "layer_types", None) or []
    slides = getattr(hf, "sliding_window", None) if getattr(hf, "use_sliding_window", True) else None
    if "sliding_attention" in layer_types or slides:
        return "has sliding-window layers, whose window would slide over kept tokens instead of positions"
    rope = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("dynamic", "longrope") or "mrope_section" in rope:
        return f"uses {kind!r} rotary angles, which do not depend on the position alone"
    return None


def draft_positions_are_mapped(runner: Any) -> bool:
    """Return whether the draft may run at original positions. On another backend it stays at its slots: replies are
    the same, and fewer of its tokens are accepted."""
    args = runner.server_args
    backend = getattr(args, "speculative_draft_attention_backend", None) or runner.decode_attention_backend_str
    return backend_maps_positions(backend)


def backend_maps_positions(backend: str) -> bool:
    return backend in _MAPPED_DRAFT_BACKENDS
