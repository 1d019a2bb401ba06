"""`spec-stack doctor --sglang`: checks a launch and describes its server, without starting it or loading weights.

A server's log has the same notes. Bytes are of each rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_stack.config import how_to_install
from spec_stack.prefill.cost import NEVER
from spec_stack.sglang.draft_kv_rows import num_row_slots, pool_slots
from spec_stack.sglang.server_args import MOST_POOL_TOKENS, NAME, ServerConfig, with_calibration
from spec_stack.sglang.support import (
    architecture_refusal,
    pruning_refusal,
    require_no_state,
    require_scoring,
    require_slots,
    untested_refusal,
)
from spec_stack.tokenizers.chat_turns import ChatTurns

_NOT_SHOWN = ("arguments", "problem", "warnings")


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
        report |= describe(_resolve(list(arguments)))
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


@dataclass(frozen=True)
class Launch:
    """A launch as SGLang resolves it.

    algorithm: "" for none. args: SGLang's arguments. target, small: SGLang's configurations of the models. config:
    calibrated. refusal, unrecognised: as in `pruning_note`. sizes: batch sizes of CUDA graphs, None without. scoring:
    what runs a scoring model. own_bytes: of a token of its KV outside SGLang, or 0.
    """

    algorithm: str
    args: Any
    target: Any
    small: Any
    config: ServerConfig
    refusal: str | None
    vocabularies: str
    unrecognised: str = ""
    sizes: Sequence[int] | None = None
    scoring: str = ""
    own_bytes: int = 0

    @property
    def is_own(self) -> bool:
        """Return whether SPEC_STACK drafts."""
        return self.algorithm == NAME

    @property
    def prunes(self) -> bool:
        return self.refusal is None and self.config.prunes

    @property
    def has_slots(self) -> bool:
        """Return whether the draft has slots of its own."""
        return self.is_own and self.config.prefill.sparse_prefill == "draft_only"


def describe(launch: Launch) -> dict[str, Any]:
    """What a launch will take and do: sentences by topic, and "warnings"."""
    config, args = launch.config, launch.args
    report: dict[str, Any] = {"vocabularies": launch.vocabularies}
    if not launch.is_own:
        report["scoring backend"] = launch.scoring
    report["prompts"] = pruning_note(config, launch.refusal, launch.unrecognised)
    report["drafting"] = drafting_note(config, launch.algorithm)
    report["attention"] = str(args.decode_attention_backend or args.attention_backend)
    report["target's pool"] = _target_pool_note(launch)
    own_bytes = launch.own_bytes or _numbers_per_token(launch.small, args) * int(launch.small.dtype.itemsize)
    if launch.prunes:
        report["draft's pool"] = pool_note(config, own_bytes)
    if launch.has_slots:
        num_slots = num_row_slots(config.prefill, config.gammas[-1])
        num_bytes = pool_slots(args.max_running_requests, num_slots) * own_bytes
        report["draft's slots"] = slots_note(num_slots, num_bytes)
    if launch.is_own:
        report["CUDA graphs"] = graphs_note(config, launch.sizes)
    return {**report, "warnings": _warnings(launch)}


def _warnings(launch: Launch) -> list[str]:
    found = []
    if launch.args.disable_radix_cache:
        found.append("without the radix cache every turn of a conversation is prefilled, and pruned, anew")
    if launch.is_own and (advice := penalty_advice(launch.target.get_default_sampling_params())):
        found.append(advice)
    return found


def _target_pool_note(launch: Launch) -> str:
    """Memory of a token in SGLang's own pool, where all of its layers are plain attention."""
    models = [(launch.target, "the target")]
    if launch.is_own and not launch.has_slots:
        # SGLang reserves a slot of the draft's beside each of the target's.
        models.append((launch.small, "the draft"))
    if any(architecture_refusal(model) is not None for model, _ in models):
        return "not estimated for these layers"
    is_short = str(launch.args.kv_cache_dtype or "auto").startswith("fp8")
    sizes = []
    for model, name in models:
        itemsize = 1 if is_short else int(model.dtype.itemsize)
        sizes.append(f"{_numbers_per_token(model, launch.args) * itemsize} bytes of {name}")
    return f"each token takes {' and '.join(sizes)} on each rank"


def _numbers_per_token(model: Any, args: Any) -> int:
    """Numbers of a token's keys and values on one rank."""
    return int(model.num_hidden_layers * model.get_num_kv_heads(args.tp_size) * (model.head_dim + model.v_head_dim))


# Notes, for a server's log too


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


def slots_note(num_per_request: int, num_bytes: int) -> str:
    return f"the draft has {num_per_request} slots of its own for each request, {num_bytes / 1e9:.2f} GB in all"


def pool_note(config: ServerConfig, bytes_per_token: int) -> str:
    """Memory of the draft's own pool, as far as known before loading."""
    num_tokens = config.draft_pool_tokens or MOST_POOL_TOKENS
    note = f"{num_tokens} tokens of {bytes_per_token} bytes, {num_tokens * bytes_per_token / 1e9:.2f} GB on each rank"
    if config.draft_pool_tokens is not None:
        return note
    return f"{note}, or a tenth of the memory that the weights leave, if that is less (--spec-stack-draft-pool-tokens)"


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


def drafting_note(config: ServerConfig, algorithm: str) -> str:
    """algorithm: the name of what decodes; "" for none."""
    if algorithm == NAME:
        return f"policy {config.policy}, gammas {list(config.gammas)}"
    return f"{algorithm or 'none'}, by SGLang itself"


# By SGLang itself


def _resolve(arguments: list[str]) -> Launch:
    """Raises whatever ends such a launch."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    from spec_stack.sglang.scoring_model import ScoringBackend, choose_backend, rows_differ

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
    source = config.scoring_model or args.speculative_draft_model_path
    target = ModelConfig.from_server_args(server_args)
    tokenizer = None
    if not args.skip_tokenizer_init:
        path = args.tokenizer_path or args.model_path
        tokenizer = get_tokenizer(path, trust_remote_code=args.trust_remote_code)
    if algorithm == NAME:
        small = ModelConfig.from_server_args(server_args, model_path=source, is_draft_model=True)
        require_no_state(small.hf_text_config)
        must_fit = rows_differ(target.vocab_size, small.vocab_size, tokenizer, source, args.trust_remote_code)
        backend = ScoringBackend(True, "", small, must_fit)
    else:
        backend = choose_backend(config, args, target, tokenizer, args.device)
        small = backend.config
        require_scoring(args, target, small)
    configs = target.hf_text_config, small.hf_text_config
    config = with_calibration(config, source, *configs)
    if algorithm == NAME and config.prefill.sparse_prefill == "draft_only":
        require_slots(args, small)
    return Launch(
        algorithm=algorithm,
        args=args,
        target=target,
        small=small,
        config=config,
        refusal=pruning_refusal(args, small if algorithm == NAME else None) or untested_refusal(args, target, config),
        vocabularies=backend.vocabularies(target.vocab_size),
        scoring=str(backend),
        own_bytes=0 if backend.is_sglang else small.bytes_per_token,
        unrecognised=ChatTurns.learn(tokenizer, args.chat_template).unrecognised,
        sizes=_sizes_to_capture(args),
    )


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
