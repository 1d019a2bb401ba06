"""The supported versions of SGLang, and the limits of a server's models and modes.

Everywhere args are SGLang's resolved arguments, and target, draft, scoring its configurations of the models.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from spec_stack.config import Positions
from spec_stack.sglang.server_args import NAME, ServerConfig

# Tested by `tests/serving` (docs/operations.md), up to the newest that pip installs; others are refused.
VERSIONS = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")

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
# Beside those, `tests/serving` prunes these at contiguous positions. What cannot be tested without an accelerator (MLA,
# recurrent states, other stores of KV) is left to an explicit setting.
_TESTED_CONTIGUOUS = ("Gemma3ForCausalLM", "GPT2LMHeadModel")
# SGLang's own algorithms beside which a model may score: their verifications derive positions from slots, for all
# requests alike, and that is where those are mapped.
BESIDE = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "DFLASH")
# Draft backends that take their KV lengths from seq_lens, or are made to (see positions.protect_kv_lengths).
BUILT_FROM_POSITIONS = ("triton", "flashinfer")
MAPPED_DRAFT_BACKENDS = ("torch_native", "triton", "flashinfer", "fa3", "trtllm_mha")
# Fields of configurations with linear attention or Mamba layers.
_OF_STATES = ("linear_num_key_heads", "mamba_d_state", "ssm_state_size")
# Arguments of SGLang's. attn_dp_size is there since 0.5.22.
_GROUPS = ("pp_size", "enable_dp_attention", "attn_dp_size")
_STORES = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv")
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
    if args.speculative_num_steps not in (None, largest):
        raise ValueError(f"{NAME} takes its steps from --spec-stack-gammas; leave --speculative-num-steps out")
    if args.speculative_eagle_topk not in (None, 1):
        raise ValueError(f"{NAME} drafts one chain; leave --speculative-eagle-topk out")
    if args.speculative_num_draft_tokens not in (None, largest + 1):
        raise ValueError(f"{NAME} takes its widths from --spec-stack-gammas; leave --speculative-num-draft-tokens out")
    # Gamma 0 has no draft probabilities for rejection sampling, and SGLang's worker ends the server without them.
    flags = "speculative_adaptive", "speculative_use_rejection_sampling"
    if flag := _first_set(args, *flags, *_GROUPS):
        raise ValueError(f"{NAME} does not work with {flag}; leave it out")
    if os.environ.get(_SKIP_DRAFT_EXTEND, "0").lower() in ("1", "true") and 0 in config.gammas:
        raise ValueError(
            f"{_SKIP_DRAFT_EXTEND} leaves holes in the draft's KV after every step of gamma 0; unset it, or leave 0 "
            "out of --spec-stack-gammas"
        )


@dataclass(frozen=True)
class Pruning:
    """How a server may prune.

    original, contiguous: why not at these positions, or None. untested: what pruning has not been tested with, or None.
    """

    original: str | None
    contiguous: str | None
    default: Positions
    untested: str | None

    def positions(self, asked: str | None) -> Positions:
        return "original" if asked == "original" else "contiguous" if asked == "contiguous" else self.default

    def refusal(self, positions: Positions) -> str | None:
        return self.original if positions == "original" else self.contiguous

    @property
    def note(self) -> str:
        """The positions of pruned prompts in words; "" where nothing is to say."""
        if self.default == "original" or self.contiguous is not None:
            return ""
        why = "" if self.original is None else f", since {self.original}"
        untested = "" if self.untested is None else "; nothing tests pruning there"
        return f"pruned prompts stand at contiguous positions{why}{untested}"


def pruning_of(asked: str, args: Any, target: Any, draft: Any | None, algorithm: str = NAME) -> Pruning:
    """How a server's prompts may be pruned. asked: its positions. draft: SPEC_STACK's; None for a scoring model."""
    common = None if draft is None else _architecture_reason(draft, "draft")
    if common is None and _is_disaggregated(args):
        common = "prefill and decode run on different servers"
    untested = _untested(args, target, algorithm)
    original = common or _architecture_reason(target, "target") or untested
    contiguous = common
    if contiguous is None and asked != "contiguous" and untested is not None:
        contiguous = f"{untested}, where pruning has not been tested; --spec-stack-positions contiguous tries it"
    default: Positions = "contiguous" if asked == "contiguous" or (asked == "auto" and original) else "original"
    return Pruning(original, contiguous, default, untested)


def _architecture_reason(model: Any, role: str) -> str | None:
    reason = architecture_refusal(model)
    return None if reason is None else f"the {role} {reason}"


def _untested(args: Any, target: Any, algorithm: str) -> str | None:
    architecture = target.hf_config.architectures[0]
    if architecture not in (*_ARCHITECTURES, *_TESTED_CONTIGUOUS):
        return f"the target is a {architecture}"
    if algorithm and algorithm not in (NAME, *BESIDE):
        return f"{algorithm} decodes"
    if (getattr(args, "dcp_size", None) or getattr(args, "decode_context_parallel_size", None) or 1) > 1:
        return "decode context parallelism splits the KV cache by position"
    if str(getattr(args, "kv_cache_dtype", None) or "auto").startswith("fp4"):
        return "pruning has not been tried with an FP4 KV cache"
    if flag := _first_set(args, *_STORES, "kv_events_config"):
        return f"{flag} hashes radix keys in 32 bits, which have no room for a position"
    return None


def scoring_refusal(args: Any, algorithm: str, target: Any, scoring: Any, asked: str = "auto") -> str | None:
    """Why a scoring model cannot run beside SGLang's own algorithm, "" for none; or None. asked: the positions."""
    if algorithm and algorithm not in BESIDE and asked != "contiguous":
        return (
            f"--speculative-algorithm {algorithm} is not one of {', '.join(BESIDE)}, nor left out; "
            "--spec-stack-positions contiguous tries it"
        )
    if flag := _first_set(args, *_GROUPS, "dllm_algorithm"):
        return f"{flag} is set; leave it out"
    if not target.is_generation:
        return "the target does not generate text"
    if scoring.context_len < target.context_len:
        return (
            f"it reads {scoring.context_len} tokens and the target {target.context_len}; "
            f"add --context-length {scoring.context_len}"
        )
    pruning = pruning_of(asked, args, target, None, algorithm)
    return pruning.refusal(pruning.default)


def require_no_state(hf: Any) -> None:
    """Raise ValueError for a draft with a recurrent state, by its text configuration."""
    if any(hasattr(hf, name) for name in _OF_STATES):
        raise ValueError(
            f"{NAME} cannot draft with a {hf.model_type} model, which has a recurrent state; it can score alone, as "
            "--spec-stack-scoring-model, beside another --speculative-algorithm or none"
        )


def require_slots(args: Any, draft: Any) -> None:
    refusal = _slots_refusal(args, draft)
    if refusal is not None:
        raise ValueError(
            f"--spec-stack-sparse-prefill draft_only gives the draft its own slots, and {refusal}; leave it out"
        )


def _slots_refusal(args: Any, draft: Any) -> str | None:
    if reason := _architecture_reason(draft, "draft"):
        return reason
    if (getattr(args, "page_size", None) or 1) > 1:
        return "a page of several slots cannot hold chosen tokens; --page-size 1 can"
    if _is_disaggregated(args):
        return "prefill and decode run on different servers"
    if flag := _first_set(args, *_STORES):
        return f"{flag} stores the draft's KV with the target's"
    return None


def _is_disaggregated(args: Any) -> bool:
    return str(getattr(args, "disaggregation_mode", None) or "null") != "null"


def architecture_refusal(config: Any) -> str | None:
    """Why a model's prompts may not be pruned at original positions, or None."""
    architecture = config.hf_config.architectures[0]
    if architecture not in _ARCHITECTURES:
        return f"is a {architecture}, not one of {', '.join(_ARCHITECTURES)}"
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
    """Return whether the draft may run at original positions; else at its slots, with fewer accepted tokens."""
    args = runner.server_args
    if str(args.speculative_algorithm).upper() != NAME:
        return False
    backend = getattr(args, "speculative_draft_attention_backend", None) or runner.decode_attention_backend_str
    return backend in MAPPED_DRAFT_BACKENDS
