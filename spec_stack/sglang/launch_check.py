"""Checks a launch and describes its server, without starting it or loading weights."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from spec_stack.config import how_to_install
from spec_stack.sglang.calibration import with_calibration
from spec_stack.sglang.launch_notes import (
    DRAFT_AT_SLOTS,
    drafting_note,
    gammas_advice,
    graphs_note,
    penalty_advice,
    pool_note,
    prunes,
    pruning_note,
    states_bytes,
    states_note,
)
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import NAME, backend_maps_positions, pruning_of, require_slots, scoring_refusal
from spec_stack.tokenizers.chat_turns import ChatTurns


def check_launch(arguments: Sequence[str]) -> dict[str, Any]:
    """Resolve a launch's arguments as SGLang does, and report the result as plain values.

    arguments: those of `sglang serve` or `python -m sglang.launch_server`. "problem": why the launch would end, else
    None; "warnings": what works worse than it might. Raises ValueError without SGLang in this Python.

    Reads configurations and tokenizers, from the hub too. SGLang queries the device. Loads SGLang's plugins in this
    process; os.environ is restored.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ValueError(f"--sglang asks SGLang itself, and this Python has none: {how_to_install('sglang')}")
    report: dict[str, Any] = {"arguments": list(arguments), "problem": None, "warnings": []}
    with _environment_restored():
        try:
            _check(list(arguments), report)
        # Any exception of SGLang's here would end the launch too: it is the answer.
        except Exception as error:
            logging.getLogger(__name__).debug("the launch would end with", exc_info=True)
            report["problem"] = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return report


def _check(arguments: list[str], report: dict[str, Any]) -> None:
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    load_plugins()
    server_args = _parse(arguments)
    algorithm = str(server_args.speculative_algorithm or "").upper()
    config = ServerConfig.from_environment()
    if algorithm != NAME and config.scoring_model is None:
        raise ValueError(
            f"this launch does not use {NAME}; add --speculative-algorithm {NAME}, or --spec-stack-scoring-model to "
            "prune prompts alone"
        )
    server_args.resolve_once()
    resolved = resolving_view(server_args)
    # Without its aliases.
    algorithm = str(resolved.speculative_algorithm or "")
    scoring = config.scoring_model or resolved.speculative_draft_model_path
    models = _model_configs(server_args, scoring, is_draft=algorithm == NAME)
    tokenizer = None
    if not resolved.skip_tokenizer_init:
        path = resolved.tokenizer_path or resolved.model_path
        tokenizer = get_tokenizer(path, trust_remote_code=resolved.trust_remote_code)
    report["vocabularies"] = _vocabularies(models, tokenizer, scoring, resolved.trust_remote_code)
    target_text, draft_text = (model.hf_text_config for model in models)
    pruning = pruning_of(config.positions, resolved, *models, algorithm=algorithm)
    refusal = pruning.refusal(pruning.default)
    if algorithm != NAME and (refusal := scoring_refusal(resolved, algorithm, *models, config.positions)) is not None:
        raise ValueError(f"--spec-stack-scoring-model does not work here: {refusal}")
    config = with_calibration(config, scoring, target_text, draft_text)
    if algorithm == NAME and config.prefill.sparse_prefill == "draft_only":
        require_slots(resolved, models[1])
    turns = ChatTurns.learn(tokenizer, resolved.chat_template)
    report["prompts"] = pruning_note(config, refusal, turns.unrecognised)
    if refusal is None:
        report["positions"] = pruning.note or pruning.default
    report["drafting"] = drafting_note(config) if algorithm == NAME else f"{algorithm or 'none'}, by SGLang itself"
    sizes = _sizes_to_capture(resolved)
    backend = resolved.decode_attention_backend or resolved.attention_backend
    report["attention"] = str(backend)
    if resolved.disable_radix_cache:
        report["warnings"].append("without the radix cache every turn of a conversation is prefilled, and pruned, anew")
    if prunes(config, refusal):
        report["draft's pool"] = pool_note(config, _bytes_per_token(models[1], resolved.tp_size))
    if algorithm != NAME:
        return
    report["CUDA graphs"] = graphs_note(config, sizes)
    if sizes is not None:
        num_bytes = states_bytes(config, sizes, models[0].context_len, resolved.page_size or 1, str(backend))
        report["memory of gammas"] = states_note(config, num_bytes)
        report["warnings"] += filter(None, [gammas_advice(config, _device_bytes(resolved.device))])
    report["warnings"] += filter(None, [penalty_advice(models[0].get_default_sampling_params())])
    is_original = refusal is None and pruning.default == "original"
    if is_original and not backend_maps_positions(resolved.speculative_draft_attention_backend or backend):
        report["warnings"].append(DRAFT_AT_SLOTS)
    if 0 in config.gammas and backend == "fa3":
        report["warnings"].append("before SGLang 0.5.23, FA3 has no CUDA graph for the draft's extension after a step")


def _sizes_to_capture(resolved: Any) -> list[int] | None:
    """As SGLang's `get_batch_sizes_to_capture`, which needs a model: up to the most running requests."""
    decode, most = resolved.cuda_graph_config.decode, resolved.max_running_requests
    if decode.backend == "disabled":
        return None
    return sorted({min(size, most or size) for size in decode.bs or ()})


def _bytes_per_token(model: Any, tp_size: int) -> int:
    """Bytes of one token's keys and values on one rank."""
    numbers = model.num_hidden_layers * model.get_num_kv_heads(tp_size) * (model.head_dim + model.v_head_dim)
    return int(numbers * model.dtype.itemsize)


def _device_bytes(device: str) -> float:
    """A device's memory; 0 where unknown."""
    from sglang.srt.utils.common import get_device_memory_capacity

    return 2**20 * (get_device_memory_capacity(device) or 0)


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


def _model_configs(server_args: Any, scoring: str, is_draft: bool) -> tuple[Any, Any]:
    from sglang.srt.configs.model_config import ModelConfig

    from spec_stack.sglang.scoring_model import read_config

    target = ModelConfig.from_server_args(server_args)
    if is_draft:
        return target, ModelConfig.from_server_args(server_args, model_path=scoring, is_draft_model=True)
    return target, read_config(scoring, server_args)


def _vocabularies(models: tuple[Any, Any], tokenizer: Any, draft: str, trust_remote_code: bool) -> str:
    """Raises ValueError where they do not fit together."""
    from spec_stack.sglang.padded_vocabulary import OTHER_TOKENIZER, have_one_vocabulary

    sizes = [model.vocab_size for model in models]
    # Without a tokenizer the check is skipped where the rows fit.
    if (sizes[0] != sizes[1] or tokenizer is not None) and not have_one_vocabulary(tokenizer, draft, trust_remote_code):
        raise ValueError(f"{draft} ({sizes[1]} embedding rows, the target {sizes[0]}): {OTHER_TOKENIZER}")
    if sizes[0] == sizes[1]:
        return f"{sizes[0]} embedding rows in both"
    return f"one tokenizer, {sizes[0]} and {sizes[1]} embedding rows: the draft's are fitted to the target's"


@contextlib.contextmanager
def _environment_restored() -> Iterator[None]:
    """Our flags, and some of SGLang's, are passed to other processes through the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
