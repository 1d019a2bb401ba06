"""`spec-stack doctor --sglang`: checks a launch and describes its server, without starting it or loading weights."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_stack.config import how_to_install
from spec_stack.sglang import launch_messages as notes
from spec_stack.sglang.server_args import NAME, ServerConfig, with_calibration
from spec_stack.sglang.support import (
    architecture_refusal,
    pruning_refusal,
    require_no_state,
    require_scoring,
    require_slots,
    untested_refusal,
)
from spec_stack.sglang.threshold import with_threshold
from spec_stack.tokenizers.chat_turns import ChatTurns

_NOT_SHOWN = ("arguments", "problem", "warnings", "numbers")


def check_launch(arguments: Sequence[str]) -> dict[str, Any]:
    """Resolve the arguments of an SGLang launch as SGLang does, and report the result as plain values.

    Sentences by topic; "problem": why the launch would end, or None; "warnings"; "numbers": the sentences' figures.
    Reads configurations and tokenizers, from the hub too. Loads SGLang's plugins, and leaves the flags in the
    environment, as a launch does. Raises ValueError without SGLang in this Python.
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


def describe(launch: Launch) -> dict[str, Any]:
    """What a launch will take and do: sentences by topic, their "numbers", and "warnings"."""
    config, numbers = launch.config, _numbers(launch)
    report: dict[str, Any] = {"vocabularies": launch.vocabularies}
    if not launch.is_own:
        report["scoring backend"] = launch.scoring
    report["prompts"] = notes.pruning_note(config, launch.refusal, launch.unrecognised)
    report["drafting"] = notes.drafting_note(config) if launch.is_own else notes.others_note(launch.algorithm)
    report["attention"] = str(launch.args.decode_attention_backend or launch.args.attention_backend)
    report["target's pool"] = _target_pool_note(launch, numbers)
    if launch.prunes:
        report["draft's pool"] = pool_note(config, numbers["draft_pool_bytes"] // numbers["draft_pool_tokens"])
    if "draft_kv_budget" in numbers:
        report["draft's slots"] = notes.slots_note(**numbers["draft_kv_budget"])
    if launch.is_own:
        report["CUDA graphs"] = notes.graphs_note(config, launch.sizes)
    return {**report, "numbers": numbers, "warnings": _warnings(launch)}


def _numbers(launch: Launch) -> dict[str, Any]:
    args, config = launch.args, launch.config
    own_bytes = launch.own_bytes or _num_per_token(launch.small, args.tp_size) * int(launch.small.dtype.itemsize)
    numbers: dict[str, Any] = {
        "prunes": launch.prunes,
        "min_prompt_tokens": config.prefill.min_prompt_tokens if launch.prunes else None,
        "target_bytes_per_token": _bytes_per_token(launch.target, args),
        "draft_bytes_per_token": launch.own_bytes or _bytes_per_token(launch.small, args),
        "drafts": launch.is_own,
        "gammas": list(config.gammas) if launch.is_own else [],
    }
    if launch.prunes:
        tokens = config.most_pool_tokens
        numbers |= {"draft_pool_tokens": tokens, "draft_pool_bytes": tokens * own_bytes}
    if launch.is_own and config.prefill.sparse_prefill == "draft_only":
        numbers["draft_kv_budget"] = notes.slots_of(config, args.max_running_requests, own_bytes)
    if launch.is_own and launch.sizes is not None:
        graphs = notes.captured(config, launch.sizes)
        numbers |= {"graph_batch_sizes": graphs, "num_graphs": notes.num_graphs(graphs)}
    return numbers


def _warnings(launch: Launch) -> list[str]:
    found = []
    if launch.args.disable_radix_cache:
        found.append("without the radix cache every turn of a conversation is prefilled, and pruned, anew")
    if launch.is_own and (advice := notes.penalty_advice(launch.target.get_default_sampling_params())):
        found.append(advice)
    return found


def _bytes_per_token(model: Any, args: Any) -> int | None:
    """Bytes of a token in SGLang's pool; None where its layers are not plain attention."""
    if architecture_refusal(model) is not None:
        return None
    is_short = str(args.kv_cache_dtype or "auto").startswith("fp8")
    return _num_per_token(model, args.tp_size) * (1 if is_short else int(model.dtype.itemsize))


def _num_per_token(model: Any, tp_size: int) -> int:
    return int(model.num_hidden_layers * model.get_num_kv_heads(tp_size) * (model.head_dim + model.v_head_dim))


def _target_pool_note(launch: Launch, numbers: Mapping[str, Any]) -> str:
    """Memory of a token in SGLang's own pool."""
    note, draft = f"{numbers['target_bytes_per_token']} bytes of the target", numbers["draft_bytes_per_token"]
    if launch.is_own and "draft_kv_budget" not in numbers:
        # SGLang reserves a slot of the draft's beside each of the target's.
        note = f"{note} and {draft} bytes of the draft"
    return "not estimated for these layers" if "None" in note else f"each token takes {note} on each rank"


def pool_note(config: ServerConfig, bytes_per_token: int) -> str:
    """Memory of the draft's own pool, as far as known before loading."""
    num_tokens = config.most_pool_tokens
    note = f"{num_tokens} tokens of {bytes_per_token} bytes, {num_tokens * bytes_per_token / 1e9:.2f} GB on each rank"
    if config.draft_pool_tokens is not None:
        return note
    return f"{note}, or a tenth of the memory that the weights leave, if that is less (--spec-stack-draft-pool-tokens)"


# By SGLang itself


def _resolve(arguments: list[str]) -> Launch:
    """Raises whatever ends such a launch."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    from spec_stack.sglang.scoring_backend import ScoringBackend, choose_backend, rows_differ

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
    config = with_threshold(with_calibration(config, source, *configs), *configs)
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
