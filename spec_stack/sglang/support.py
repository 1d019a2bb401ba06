"""The supported versions of SGLang, and the limits of a server's models and modes.

Everywhere args are SGLang's resolved arguments, and target, draft, scoring its configurations of the models.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from spec_stack.sglang.server_args import NAME, ServerConfig

# Tested by `tests/serving` (docs/operations.md), up to the newest that pip installs; others are refused.
VERSIONS = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")

# Models that score or have slots of their own: rotary, full attention in every layer, one key per head and token.
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
# Targets that tests prune beside those.
_TESTED = (*_ARCHITECTURES, "Gemma3ForCausalLM", "GPT2LMHeadModel")
# Fields of configurations with linear attention or Mamba layers.
_OF_STATES = ("linear_num_key_heads", "mamba_d_state", "ssm_state_size")
# Arguments of SGLang's. attn_dp_size is there since 0.5.22.
_GROUPS = ("pp_size", "enable_dp_attention", "attn_dp_size")
_STORES = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv")
# Stores of KV that look a waiting request's prompt up before it is pruned.
_EARLY_LOOKUPS = ("enable_lmcache", "hicache_storage_backend")
_UNTESTED_STORES = ("enable_hierarchical_cache", "enable_flexkv", "kv_events_config")
_DISAGGREGATED = "prefill and decode run on different servers"
# An environment variable of SGLang's.
_SKIP_DRAFT_EXTEND = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"


def check_version() -> None:
    """Raise RuntimeError unless SGLang has a supported version."""
    installed = version("sglang")
    # A plus sign is followed by the build of the same source.
    if installed.partition("+")[0] not in VERSIONS:
        supported = f"{VERSIONS[0]} to {VERSIONS[-1]}"
        raise RuntimeError(f"{NAME} was made for SGLang {supported}, and this is {installed}; install one of those")


def _first_set(args: Any, *names: str) -> str | None:
    """The first of these flags that is set; a size of 1 is not."""
    values = ((name, getattr(args, name, None)) for name in names)
    name = next((name for name, value in values if value is True or (value or 1) != 1), None)
    return None if name is None else f"--{name.replace('_', '-')}"


def require_drafting(args: Any, config: ServerConfig) -> None:
    """Raise ValueError, with the fix, where SPEC_STACK cannot draft on such a server."""
    if not args.speculative_draft_model_path:
        raise ValueError(f"{NAME} needs a draft model: add --speculative-draft-model-path")
    if config.scoring_model is not None:
        raise ValueError(
            f"{NAME} scores with its draft; leave --spec-stack-scoring-model out, or decode with another algorithm"
        )
    largest = config.gammas[-1]
    for name, value in (("num_steps", largest), ("eagle_topk", 1), ("num_draft_tokens", largest + 1)):
        if getattr(args, f"speculative_{name}") not in (None, value):
            given = f"--speculative-{name.replace('_', '-')}"
            raise ValueError(f"{NAME} drafts one chain of --spec-stack-gammas tokens; leave {given} out")
    # Gamma 0 has no draft probabilities for rejection sampling, and SGLang's worker ends the server without them.
    flags = "speculative_adaptive", "speculative_use_rejection_sampling"
    if flag := _first_set(args, *flags, *_GROUPS):
        raise ValueError(f"{NAME} does not work with {flag}; leave it out")
    if os.environ.get(_SKIP_DRAFT_EXTEND, "0").lower() in ("1", "true") and 0 in config.gammas:
        raise ValueError(
            f"{_SKIP_DRAFT_EXTEND} leaves holes in the draft's KV after every step of gamma 0; unset it, or leave 0 "
            "out of --spec-stack-gammas"
        )


def pruning_refusal(args: Any, draft: Any | None) -> str | None:
    """Why no prompt of a server may be pruned, or None. draft: SPEC_STACK's; None for a scoring model."""
    if draft is not None and (reason := architecture_refusal(draft)):
        return f"the draft {reason}"
    if flag := next((name for name in _EARLY_LOOKUPS if getattr(args, name, None)), None):
        return f"--{flag.replace('_', '-')} looks up the KV of a whole prompt before it is pruned"
    return _DISAGGREGATED if _is_disaggregated(args) else None


def untested_refusal(args: Any, target: Any, config: ServerConfig) -> str | None:
    """Why a server prunes no prompt unless `sparse_prefill` is "on": no test covers its target or its cache."""
    if config.prefill.sparse_prefill == "on":
        return None
    architecture = target.hf_config.architectures[0]
    if architecture not in _TESTED:
        reason = f"the target is a {architecture}"
    elif (getattr(args, "dcp_size", None) or getattr(args, "decode_context_parallel_size", None) or 1) > 1:
        reason = "decode context parallelism is set"
    elif str(getattr(args, "kv_cache_dtype", None) or "auto").startswith("fp4"):
        reason = "the KV cache is FP4"
    elif flag := _first_set(args, *_UNTESTED_STORES):
        reason = f"{flag} is set"
    else:
        return None
    return f"{reason}, where pruning has not been tested; --spec-stack-sparse-prefill on tries it"


def require_scoring(args: Any, target: Any, scoring: Any) -> None:
    """Raise ValueError where a scoring model cannot run beside SGLang's own algorithm, or none."""
    refusal: str | None
    if flag := _first_set(args, *_GROUPS, "dllm_algorithm"):
        refusal = f"{flag} is set; leave it out"
    elif not target.is_generation:
        refusal = "the target does not generate text"
    elif scoring.context_len < target.context_len:
        lengths = f"it reads {scoring.context_len} tokens and the target {target.context_len}"
        refusal = f"{lengths}; add --context-length {scoring.context_len}"
    else:
        refusal = pruning_refusal(args, None)
    if refusal is not None:
        raise ValueError(f"--spec-stack-scoring-model does not work here: {refusal}")


def require_no_state(hf: Any) -> None:
    """Raise ValueError for a draft with a recurrent state, by its text configuration."""
    if any(hasattr(hf, name) for name in _OF_STATES):
        raise ValueError(
            f"{NAME} cannot draft with a {hf.model_type} model, which has a recurrent state; it can score alone, as "
            "--spec-stack-scoring-model, beside another --speculative-algorithm or none"
        )


def require_slots(args: Any, draft: Any) -> None:
    """Raise ValueError where a draft cannot have slots of its own."""
    if reason := architecture_refusal(draft):
        refusal = f"the draft {reason}"
    elif (getattr(args, "page_size", None) or 1) > 1:
        refusal = "a page of several slots cannot hold chosen tokens; --page-size 1 can"
    elif _is_disaggregated(args):
        refusal = _DISAGGREGATED
    elif flag := _first_set(args, *_STORES):
        refusal = f"{flag} stores the draft's KV with the target's"
    else:
        return
    raise ValueError(
        f"--spec-stack-sparse-prefill draft_only gives the draft its own slots, and {refusal}; leave it out"
    )


def _is_disaggregated(args: Any) -> bool:
    return str(getattr(args, "disaggregation_mode", None) or "null") != "null"


def architecture_refusal(config: Any) -> str | None:
    """Why SGLang's runner cannot score with a model, nor a draft have slots of its own; or None."""
    architecture = config.hf_config.architectures[0]
    if architecture not in _ARCHITECTURES:
        return f"is a {architecture}, not one of {', '.join(_ARCHITECTURES)}"
    hf = config.hf_text_config
    layer_types = getattr(hf, "layer_types", None) or []
    slides = getattr(hf, "sliding_window", None) if getattr(hf, "use_sliding_window", True) else None
    if "sliding_attention" in layer_types or slides:
        return "has sliding-window layers"
    rope = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("dynamic", "longrope") or "mrope_section" in rope:
        return f"uses {kind!r} rotary angles, which do not depend on the position alone"
    return None
