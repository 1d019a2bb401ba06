"""`spec-stack doctor --sglang`: checks a launch and describes its server, without starting it or loading weights."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
from collections.abc import Sequence
from typing import Any

from spec_stack.config import how_to_install
from spec_stack.sglang.launch import Launch, describe
from spec_stack.sglang.server_args import NAME, ServerConfig
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
    """By SGLang itself: the launch, what its chat template leaves unprotected, and the sizes of its CUDA graphs.

    Raises whatever ends such a launch.
    """
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
        path = args.tokenizer_path or args.model_path
        tokenizer = get_tokenizer(path, trust_remote_code=args.trust_remote_code)
    if algorithm == NAME:
        source = args.speculative_draft_model_path
        draft = ModelConfig.from_server_args(server_args, model_path=source, is_draft_model=True)
        launch = Launch.drafting(args, target, draft, tokenizer, config)
    else:
        launch = Launch.scoring(algorithm, args, target, tokenizer, config, args.device)
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
