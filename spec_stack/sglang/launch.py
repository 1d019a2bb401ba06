"""What a launch does with this plugin: checks of the models, what scores prompts, and what log and doctor say.

Everywhere args are SGLang's resolved arguments, and target, draft, scoring its configurations of the models.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_stack.config import how_to_install
from spec_stack.hf.loading import load_draft_tokenizer
from spec_stack.prefill.cost import NEVER
from spec_stack.prefill.registry import needs_draft
from spec_stack.prefill.turn import num_behind
from spec_stack.sglang.draft_kv_rows import num_row_slots, pool_slots
from spec_stack.sglang.server_args import MOST_POOL_TOKENS, NAME, ServerConfig, with_calibration
from spec_stack.tokenizers.chat_turns import ChatTurns
from spec_stack.tokenizers.vocabulary import compare

# Models that score or have slots of their own: rotary, full attention in every layer, one key per head and token.
_FAMILIES = ("Glm4", "Granite", "Llama", "Mistral", "Olmo2", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
_ARCHITECTURES = tuple(f"{family}ForCausalLM" for family in _FAMILIES)
# Targets that tests prune next to those.
_TESTED = (*_ARCHITECTURES, "Gemma3ForCausalLM", "GPT2LMHeadModel")
# Fields of configurations with linear attention or Mamba layers.
_OF_STATES = ("linear_num_key_heads", "mamba_d_state", "ssm_state_size")
# Arguments of SGLang's. attn_dp_size is there since 0.5.22. Ranks of a tensor-parallel group share the heads alone.
_GROUPS = ("pp_size", "enable_dp_attention", "attn_dp_size", "attn_cp_size")
_STORES = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv")
# Stores of KV that look a waiting request's prompt up before it is pruned.
_EARLY_LOOKUPS = ("enable_lmcache", "hicache_storage_backend")
_UNTESTED = ("dcp_size", "enable_hierarchical_cache", "enable_flexkv", "kv_events_config")
_NOT_SHOWN = ("arguments", "problem", "warnings")


@dataclass(frozen=True)
class Launch:
    """A launch whose prompts are pruned, by SPEC_STACK's draft or a scoring model with another algorithm.

    algorithm: what decodes, "" for none. small: what scores. config: calibrated. refusal: why no prompt may be pruned,
    or None. must_fit: the small model's embedding rows are to be fitted to the target's.
    """

    algorithm: str
    args: Any
    target: Any
    small: Any
    config: ServerConfig
    refusal: str | None
    must_fit: bool = False

    @classmethod
    def drafting(cls, args: Any, target: Any, draft: Any, tokenizer: Any, config: ServerConfig) -> Launch:
        """Of SPEC_STACK. tokenizer: the target's, or None. Raises ValueError for a pair that cannot draft."""
        require_no_state(draft.hf_text_config)
        source = args.speculative_draft_model_path
        must_fit = _rows_differ(target, draft, tokenizer, source, args)
        config = with_calibration(config, source, target.hf_text_config, draft.hf_text_config, args.device != "cpu")
        if config.prefill.sparse_prefill == "draft_only":
            require_slots(args, draft)
        refusal = pruning_refusal(args, draft) or untested_refusal(args, target, config)
        return cls(NAME, args, target, draft, config, refusal, must_fit)

    @classmethod
    def scoring(cls, algorithm: str, args: Any, target: Any, tokenizer: Any, config: ServerConfig) -> Launch:
        """Of a scoring model with algorithm. Raises ValueError where SGLang's runner cannot run it."""
        source = str(config.scoring_model)
        small, must_fit = _scoring_model(source, args, target, tokenizer)
        require_scoring(args, target, small)
        config = with_calibration(config, source, target.hf_text_config, small.hf_text_config, args.device != "cpu")
        return cls(algorithm, args, target, small, config, untested_refusal(args, target, config), must_fit)

    @property
    def is_own(self) -> bool:
        return self.algorithm == NAME

    @property
    def prunes(self) -> bool:
        return self.refusal is None and self.config.prunes

    def bytes_per_token(self, num_layers: int | None = None) -> int:
        """Bytes of a token's keys and values in the small model's first layers, None for all, on one rank."""
        small = self.small
        num_heads = (num_layers or small.num_hidden_layers) * small.get_num_kv_heads(self.args.tp_size)
        return int(num_heads * (small.head_dim + small.v_head_dim) * small.dtype.itemsize)


def _scoring_model(source: str, args: Any, target: Any, tokenizer: Any) -> tuple[Any, bool]:
    """The scoring model's configuration, and whether its rows are to be fitted. Raises ValueError where SGLang's runner
    cannot score with it."""
    try:
        if source.lower().endswith(".gguf"):
            raise ValueError("it is a GGUF file")
        from sglang.srt.configs.model_config import ModelConfig

        # Without the overrides for the target.
        scoring = ModelConfig(source, trust_remote_code=args.trust_remote_code, dtype=args.dtype)
        if refusal := architecture_refusal(scoring):
            raise ValueError(f"it {refusal}")
        return scoring, _rows_differ(target, scoring, tokenizer, source, args)
    # Whatever reading another's files raises.
    except Exception as error:
        raise ValueError(
            f"SGLang's runner cannot score with {source}: {error}; spec-stack proxy --draft prunes prompts by it in "
            "front of this server"
        ) from error


def _rows_differ(target: Any, draft: Any, tokenizer: Any, source: str, args: Any) -> bool:
    """Return whether a pair of one tokenizer pads its embeddings differently. Raises ValueError for two tokenizers."""
    options = {"trust_remote_code": args.trust_remote_code}
    own = None if tokenizer is None else load_draft_tokenizer(source, tokenizer, options)
    if compare(tokenizer, own, target.vocab_size, draft.vocab_size).relation == "other":
        raise ValueError(
            f"{source} has another tokenizer than the target ({draft.vocab_size} embedding rows, the target "
            f"{target.vocab_size}), and SGLang's runner needs the target's"
        )
    return bool(target.vocab_size != draft.vocab_size)


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
    refusal = f"{flag} is set; leave it out" if (flag := _first_set(args, *flags)) else launch_refusal(args)
    if refusal is None and args.enable_memory_saver and not args.enable_draft_weights_cpu_backup:
        refusal = "a sleep under --enable-memory-saver loses the draft's weights; add --enable-draft-weights-cpu-backup"
    if refusal is not None:
        raise ValueError(f"{NAME} does not work here: {refusal}")


def launch_refusal(args: Any) -> str | None:
    """Why no prompt of such a launch could be pruned rightly, with the remedy; or None."""
    before_it = "leave it out, and prune by `spec-stack proxy` before the server"
    if flag := _first_set(args, *_GROUPS):
        return f"{flag} is set; leave it out"
    if str(getattr(args, "disaggregation_mode", None) or "null") != "null":
        return f"--disaggregation-mode puts prefill and decode on different servers; {before_it}"
    if flag := _first_set(args, "tokenizer_worker_num"):
        return f"the workers of {flag} load no plugins of SGLang; {before_it}"
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"):
        return "SGLANG_RUST_SERVER replaces the process that reads options and writes reports; unset it"
    if flag := _first_set(args, "grpc_mode", "smg_grpc_mode"):
        return f"{flag} replaces the process that reads options and writes reports; leave it out"
    return None


def pruning_refusal(args: Any, draft: Any | None) -> str | None:
    """Why no prompt of a server may be pruned, or None. draft: SPEC_STACK's; None for a scoring model."""
    if draft is not None and (reason := architecture_refusal(draft)):
        return f"the draft {reason}"
    if flag := _first_set(args, *_EARLY_LOOKUPS):
        return f"{flag} looks up the KV of a whole prompt before it is pruned"
    return None


def untested_refusal(args: Any, target: Any, config: ServerConfig) -> str | None:
    """Why a server prunes no prompt unless `sparse_prefill` is "on": no test covers its target or its cache."""
    if config.prefill.sparse_prefill == "on":
        return None
    architecture = target.hf_config.architectures[0]
    if architecture not in _TESTED:
        reason = f"the target is a {architecture}"
    elif str(getattr(args, "kv_cache_dtype", None) or "auto").startswith("fp4"):
        reason = "the KV cache is FP4"
    elif flag := _first_set(args, *_UNTESTED):
        reason = f"{flag} is set"
    else:
        return None
    return f"{reason}, where pruning has not been tested; --spec-stack-sparse-prefill on tries it"


def require_scoring(args: Any, target: Any, scoring: Any) -> None:
    """Raise ValueError where a scoring model cannot run with SGLang's own algorithm, or none."""
    refusal = launch_refusal(args) or pruning_refusal(args, None)
    if args.dllm_algorithm is not None:
        refusal = "--dllm-algorithm is set; leave it out"
    elif not target.is_generation:
        refusal = "the target does not generate text"
    elif scoring.context_len < target.context_len:
        lengths = f"it reads {scoring.context_len} tokens and the target {target.context_len}"
        refusal = f"{lengths}; add --context-length {scoring.context_len}"
    if refusal is not None:
        raise ValueError(f"--spec-stack-scoring-model does not work here: {refusal}")


def require_no_state(hf: Any) -> None:
    """Raise ValueError for a draft with a recurrent state, by its text configuration."""
    if any(hasattr(hf, name) for name in _OF_STATES):
        raise ValueError(
            f"{NAME} cannot draft with a {hf.model_type} model, which has a recurrent state; spec-stack proxy "
            "--draft prunes prompts by it in front of this server"
        )


def require_slots(args: Any, draft: Any) -> None:
    """Raise ValueError where a draft cannot have slots of its own."""
    if _first_set(args, "page_size"):
        refusal: str | None = "a page of several slots cannot hold chosen tokens; --page-size 1 can"
    elif flag := _first_set(args, *_STORES):
        refusal = f"{flag} stores the draft's KV with the target's"
    else:
        refusal = pruning_refusal(args, draft)
    if refusal is not None:
        raise ValueError(
            f"--spec-stack-sparse-prefill draft_only gives the draft its own slots, and {refusal}; leave it out"
        )


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


def describe(
    launch: Launch,
    unrecognised: str,
    sizes: Sequence[int] | None,
    num_pool_tokens: int | None = None,
    max_positions: int = sys.maxsize,
) -> dict[str, Any]:
    """What a launch takes and does, as the doctor and a server's log say: sentences by topic, and "warnings".

    unrecognised: what the chat template leaves unprotected. sizes: batch sizes of CUDA graphs, None without.
    num_pool_tokens: of the draft's pool, None before it is allocated. max_positions: the draft's, where they are known.
    """
    config, args = launch.config, launch.args
    report: dict[str, Any] = {"vocabularies": f"{launch.target.vocab_size} embedding rows in both"}
    if launch.must_fit:
        rows = f"{launch.target.vocab_size} and {launch.small.vocab_size} embedding rows"
        report["vocabularies"] = f"one tokenizer, {rows}: the draft's are fitted to the target's"
    report["prompts"] = pruning_note(config, launch.refusal, unrecognised)
    report["attention"] = str(args.decode_attention_backend or args.attention_backend)
    warnings = []
    if args.disable_radix_cache:
        warnings.append("without the radix cache every turn of a conversation is prefilled, and pruned, anew")
    if launch.prunes:
        num_bytes = launch.bytes_per_token(config.num_draft_layers)
        size, context = config.draft_pool_tokens or MOST_POOL_TOKENS, launch.target.context_len
        note = f"{size} tokens of {num_bytes} bytes, {size * num_bytes / 1e9:.2f} GB on each rank"
        if config.draft_pool_tokens is None:
            note += (
                ", or a tenth of the memory that the weights leave, if that is less (--spec-stack-draft-pool-tokens)"
            )
        report["draft's pool"] = note
        most, prefill = num_pool_tokens or size, config.prefill
        # A request may ask for the check.
        behind = max(num_behind(prefill, prefill.look_ahead), prefill.check_tokens)
        longest = min(context + behind, max_positions)
        if most < longest and needs_draft(prefill):
            warnings.append(
                f"prompts of over {max(0, most - behind)} tokens may be prefilled densely, since the draft's pool has "
                f"no room for them; --spec-stack-draft-pool-tokens {longest} holds the longest one, in "
                f"{longest * num_bytes / 1e9:.2f} GB on each rank"
            )
    if not launch.is_own:
        report["drafting"] = f"{launch.algorithm or 'none'}, by SGLang itself"
        return {**report, "warnings": warnings}
    report["drafting"] = f"policy {config.policy}, gammas {list(config.gammas)}"
    report["CUDA graphs"] = graphs_note(config, sizes)
    if config.prefill.sparse_prefill == "draft_only":
        num_slots = num_row_slots(config.prefill, config.gammas[-1])
        num_bytes = pool_slots(args.max_running_requests, num_slots) * launch.bytes_per_token()
        slots = f"the draft has {num_slots} slots of its own for each request"
        report["draft's slots"] = f"{slots}, {num_bytes / 1e9:.2f} GB in all"
    advice = penalty_advice(launch.target.get_default_sampling_params())
    return {**report, "warnings": warnings if advice is None else [*warnings, advice]}


def pruning_note(config: ServerConfig, refusal: str | None, unrecognised: str) -> str:
    """What is pruned, from which length, and what is kept whole.

    refusal: why no prompt may be pruned, or None. unrecognised: what the chat template leaves unprotected.
    """
    prefill = config.prefill
    if prefill.sparse_prefill == "draft_only":
        slots = prefill.draft_kv_budget
        return f"the target prefills densely; of prompts of over {slots} tokens the draft has {slots} slots"
    if refusal is not None:
        return f"no prompt is pruned here, since {refusal}"
    if not config.prunes:
        why = "sparse_prefill is off" if prefill.sparse_prefill == "off" else "keep_rate is 1.0"
        return f"no prompt is pruned, since {why}"
    from_length = prefill.min_prompt_tokens
    if from_length == NEVER:
        return (
            "prompts are pruned on request alone: by the sizes of both models pruning pays at no length; "
            "--spec-stack-min-prompt-tokens sets one"
        )
    share, longer = (f"{100 * prefill.rate_for(length):.0f} %" for length in (from_length, 4 * from_length))
    if longer != share:
        share += f" ({longer} at {4 * from_length})"
    kept_whole = unrecognised or (
        "System messages, tool definitions and the template's tokens are kept whole, as far as prompts are rendered by "
        "the tokenizer's chat template"
    )
    return (
        f"PROMPTS ARE PRUNED, which is lossy: of those with {from_length} or more tokens that are not cached, the "
        f"target prefills about {share}. {kept_whole}. --spec-stack-min-prompt-tokens sets the length, "
        "--spec-stack-sparse-prefill off prefills all prompts densely"
    )


def graphs_note(config: ServerConfig, sizes: Sequence[int] | None) -> str:
    """The captured batch sizes of every gamma; sizes is None where no graphs are captured."""
    if sizes is None:
        return "none"
    # SGLang captures its launch gamma, the largest, before any policy is asked.
    graphs = {gamma: config.sizes_for(gamma, sizes) for gamma in config.gammas[:-1]} | {config.gammas[-1]: sizes}
    # To verify, to extend the draft, and over gamma 1 to draft on after that.
    num_graphs = sum(len(found) * (3 if gamma > 1 else 2) for gamma, found in graphs.items())
    each = "; ".join(
        f"gamma {gamma} for {len(found)} batch sizes up to {max(found, default=0)}" for gamma, found in graphs.items()
    )
    return f"{num_graphs} in all: {each}"


def penalty_advice(sampling: Mapping[str, Any]) -> str | None:
    """The advice where a checkpoint's generation_config.json disables drafting; None for nothing."""
    penalty = sampling.get("repetition_penalty", 1)
    if penalty == 1:
        return None
    return (
        f"the target's generation_config.json has repetition_penalty {penalty}, which every chat request inherits, and "
        "a request with a penalty drafts nothing; --sampling-defaults openai leaves the file aside, or requests set "
        "repetition_penalty 1"
    )


# `spec-stack doctor --sglang`, without a server or weights


def check_launch(arguments: Sequence[str]) -> dict[str, Any]:
    """Resolve the arguments of an SGLang launch as SGLang does, and report the result as plain values.

    Sentences by topic; "problem": why the launch would end, or None; "warnings". Reads configurations and tokenizers,
    from the hub too. Loads SGLang's plugins, and leaves the flags in the environment, as a launch does. Raises
    ValueError without SGLang in this Python.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ValueError(f"--sglang asks SGLang itself, and this Python has none: {how_to_install('sglang')}")
    report: dict[str, Any] = {"arguments": list(arguments), "problem": None, "warnings": []}
    try:
        report |= describe(*_resolve(list(arguments)))
    # Any exception of SGLang's here would end the launch too: it is the answer.
    except Exception as error:
        logging.getLogger(__name__).debug("the launch would end with", exc_info=True)
        report["problem"] = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return report


def as_text(report: dict[str, Any]) -> str:
    """A report of `check_launch` for people, line by line."""
    lines = [f"{name}: {text}" for name, text in report.items() if name not in _NOT_SHOWN]
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    problem = report["problem"]
    lines.append(f"problem: {problem}" if problem else "the server would start with these arguments")
    return "\n".join(lines)


def _resolve(arguments: list[str]) -> tuple[Launch, str, list[int] | None]:
    """By SGLang itself: the launch, what its chat template leaves unprotected, and the sizes of its CUDA graphs."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    load_plugins()
    server_args = _parse(arguments)
    config = ServerConfig.from_environment()
    if str(server_args.speculative_algorithm or "").upper() != NAME and config.scoring_model is None:
        raise ValueError(
            f"this launch does not use {NAME}; add --speculative-algorithm {NAME}, or --spec-stack-scoring-model to "
            "prune prompts alone"
        )
    server_args.resolve_once()
    args = resolving_view(server_args)
    # Without its aliases.
    algorithm = str(args.speculative_algorithm or "")
    target = ModelConfig.from_server_args(server_args)
    tokenizer = None
    if not args.skip_tokenizer_init:
        tokenizer = get_tokenizer(args.tokenizer_path or args.model_path, trust_remote_code=args.trust_remote_code)
    if algorithm == NAME:
        source = args.speculative_draft_model_path
        draft = ModelConfig.from_server_args(server_args, model_path=source, is_draft_model=True)
        launch = Launch.drafting(args, target, draft, tokenizer, config)
    else:
        launch = Launch.scoring(algorithm, args, target, tokenizer, config)
    return launch, ChatTurns.learn(tokenizer, args.chat_template).unrecognised, _sizes_to_capture(args)


def _parse(arguments: list[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    if arguments and not arguments[0].startswith("-"):
        # `sglang serve` takes the model first.
        arguments = ["--model-path", *arguments]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return prepare_server_args(arguments)
    except SystemExit as end:
        # argparse has printed a usage of hundreds of lines, and its reason in the last.
        reason = (said.getvalue().strip().splitlines() or ["it asks for help only"])[-1]
        raise ValueError(reason.partition("error: ")[2] or reason) from end


def _sizes_to_capture(args: Any) -> list[int] | None:
    """As SGLang's `get_batch_sizes_to_capture`, which needs a model: up to the most running requests."""
    decode, most = args.cuda_graph_config.decode, args.max_running_requests
    if decode.backend == "disabled":
        return None
    return sorted({min(size, most or size) for size in decode.bs or ()})
