"""The command-line parser, and conversion of its arguments to requests and settings. Loads no model."""

from __future__ import annotations

import argparse
import json
import os
import select
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from spec_stack import __version__
from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.cli.chat import read_document
from spec_stack.config import (
    MAX_GAMMA,
    OLD_SWITCHES,
    PRECISIONS,
    DecodeConfig,
    LoadConfig,
    PrefillConfig,
    SamplingParams,
    SessionConfig,
    SparsePrefill,
    SpecStackConfig,
)
from spec_stack.controller.registry import POLICIES
from spec_stack.decode.registry import PROPOSERS
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.config import ServeConfig
from spec_stack.settings.flags import FormerFlag
from spec_stack.settings.options import meaning

DEMO_TOKENS = 8200
_SILENT_S = 1.0
# Options of `serve`, and their parsers.
SERVED: dict[str, Callable[[str], Any]] = {
    "host": str,
    "port": int,
    "model_name": str,
    "temperature": float,
    "default_max_tokens": int,
    "max_body_bytes": int,
    "max_prompt_tokens": int,
    "max_prompt_chars": int,
    "max_grammar_size": int,
    "prepare_s": float,
    "max_prepare_bytes": int,
    "max_queued": int,
    "max_queued_per_client": int,
    "max_choices": int,
    "max_sessions": int,
    "remembered_tokens": int,
    "shutdown_s": float,
}
# Options of `proxy`, likewise.
PROXIED: dict[str, Callable[[str], Any]] = {
    "host": str,
    "port": int,
    "marker": str,
    "deadline_s": float,
    "timeout_s": float,
    "max_body_bytes": int,
    "max_parsed_bytes": int,
    "max_queued": int,
    "max_queued_per_client": int,
    "max_conversations": int,
    "max_connections": int,
    "shutdown_s": float,
}
SWITCHES = ("allow_request_templates", "strip_special_tokens", "strict")
_EXAMPLES = """examples:
  spec-stack generate "Name three rivers."
  cat report.txt | spec-stack generate "Summarize this." --stats
  spec-stack generate --raw "def main():" --max-tokens 40
  spec-stack generate --file novel.txt "Who is the thief?" --keep-rate 0.1 --json
  spec-stack generate "A name and an age." --json-schema person.json
  spec-stack chat --file report.txt
  spec-stack generate "Hello" --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
"""


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let a flag accept "none"."""

    def read_or_none(text: str) -> Any:
        return None if text == NONE else read(text)

    read_or_none.__name__ = read.__name__
    return read_or_none


def heads(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "13.0,13.13" into (layer, head) pairs."""
    pairs = [pair.split(".") for pair in text.split(",")]
    return tuple((int(layer), int(head)) for layer, head in pairs)


def window(text: str) -> int | tuple[int, int]:
    """Parse "512", or "8192:512" for a window of 512 from 8,192 prompt tokens on."""
    shortest, found, size = text.partition(":")
    return (int(shortest), int(size)) if found else int(text)


NONE = "none"
# Flags of `PrefillConfig`: every calibrated field, so that each can override a calibration, and more.
PRUNING: dict[str, Callable[[str], Any]] = {
    "keep_rate": float,
    "min_prompt_tokens": int,
    "look_ahead": int,
    "draft_slots": int,
    "draft_window": _or_none(window),
    "draft_sinks": int,
    "scoring_layers": _or_none(int),
    "scoring_heads": _or_none(heads),
    "unit": str,
    "scoring_queries": str,
    "skipped_layers": int,
    "head_vote": str,
    "scorer": str,
    "positions": str,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser. Names, defaults and help come from the configuration dataclasses."""
    parser = argparse.ArgumentParser(
        prog="spec-stack",
        description="One draft model for both phases: sparse prefill and speculative decoding.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"spec-stack {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (
        *(_add_generate, _add_chat, _add_prune, _add_demo, _add_calibrate, _add_explain),
        *(_add_serve, _add_proxy, _add_doctor),
    ):
        add(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer or continue a prompt, streamed",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_pair_arguments(parser)
    parser.add_argument(
        "prompt", nargs="?", help="the prompt, behind what --file and standard input hold; - is standard input alone"
    )
    parser.add_argument(
        "--file", type=Path, help="take the prompt, or what comes before it, from a file; - is standard input"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--chat", action="store_true", help="send the prompt as a user message: the default for a chat model"
    )
    how.add_argument("--raw", action="store_true", help="go on with the prompt as it stands, also with a chat model")
    parser.add_argument("--system", help="a system message; implies --chat")
    parser.add_argument("--json-schema", type=Path, help="file with a JSON schema that the answer has to fit")
    parser.add_argument("--regex", help="regular expression that the answer has to fit")
    _add_answer_arguments(parser)
    parser.add_argument("--records", type=Path, help="add a record per step to this .jsonl file")
    parser.add_argument("--json", action="store_true", help="no stream: print text and metrics as one JSON object")
    parser.add_argument("--stats", action="store_true", help="say on standard error what the answer cost")


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser("chat", help="a conversation, in which only what is new is prefilled")
    _add_pair_arguments(parser)
    parser.add_argument(
        "--file", type=Path, action="append", default=[], help="a document to talk about; may be repeated"
    )
    parser.add_argument("--system", help="a system message")
    _add_answer_arguments(parser)
    for name, kind in (
        ("restore_threshold", float),
        ("max_restored_chunks", int),
        ("restore_margin", int),
        ("anchor_threshold", float),
    ):
        _add_option(parser, SessionConfig, name, type=kind)


def _add_prune(commands: Any) -> None:
    parser = commands.add_parser(
        "prune",
        help="shorten a text or OpenAI messages for any engine",
        description="Reads a text, OpenAI messages or a request's body (JSON), and writes the same with the lines left "
        "out that the draft finds of no use for the question. No target is loaded.",
    )
    parser.add_argument("file", nargs="?", type=Path, help="what to shorten (default: standard input)")
    _add_draft_arguments(parser)
    parser.add_argument(
        "--keep-rate",
        type=float,
        help="share of the tokens to keep; without it and --max-tokens the draft's own rate, "
        f"for {PrefillConfig.min_prompt_tokens} tokens and more",
    )
    parser.add_argument("--max-tokens", type=int, help="most tokens to keep, in the draft's")
    parser.add_argument("--question", help="what it will be asked, where that is not in it")
    parser.add_argument("--protect", action="append", default=[], help="a string whose lines are kept; may be repeated")
    parser.add_argument("--marker", default="", help="stands for every gap (default: nothing)")
    parser.add_argument("--json", action="store_true", help="print the result, kept spans and counts as a JSON object")
    parser.add_argument("--explain", action="store_true", help="say on standard error what was kept, and why")


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="dense + plain against sparse + speculative on a long real document")
    _add_pair_arguments(parser)
    parser.add_argument(
        "--tokens", type=int, default=DEMO_TOKENS, help="length of the document in tokens (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which document and fact (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs per mode (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_calibrate(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="find the heads of the draft that find what questions are about, and how little of a prompt they need",
        description="One pass of the draft a prompt; the target's weights are not loaded. What was judged is kept, so "
        "that a call that was ended goes on where it was.",
    )
    _add_pair_arguments(parser)
    parser.add_argument("--documents", type=Path, help="folder of your texts, to hide needles in (.txt, .md, .py)")
    _add_calibrate_argument(parser, "lengths", type=int, nargs="+")
    _add_calibrate_argument(parser, "prompts", type=int)
    _add_calibrate_argument(parser, "margin", type=float)
    _add_calibrate_argument(parser, "seed", type=int)
    parser.add_argument(
        "--budget",
        type=float,
        default=CalibrateConfig.budget_s / 60,
        help="minutes after which it chooses by what it has (default: %(default)g)",
    )
    parser.add_argument("--out", type=Path, help="file or folder for the result (default: the draft's folder)")
    parser.add_argument(
        "--work", type=Path, help="folder for what was judged (default: beside the result, until all is judged)"
    )
    parser.add_argument("--plot", type=Path, help="picture of recall against the share kept")


def _add_explain(commands: Any) -> None:
    parser = commands.add_parser(
        "explain", help="a page of what was kept of a prompt, who wrote each token, and where the time went"
    )
    _add_pair_arguments(parser)
    parser.add_argument(
        "prompt", nargs="?", help="the prompt, behind what --file and standard input hold; - is standard input alone"
    )
    parser.add_argument("--file", type=Path, help="take the prompt, or what comes before it, from a file")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user message")
    parser.add_argument("--system", help="a system message; implies --chat")
    parser.add_argument(
        "--turn", action="append", default=[], help="a user message after the prompt's answer, in a session; repeatable"
    )
    parser.add_argument("--demo", action="store_true", help="the demo's document and question, in place of a prompt")
    parser.add_argument("--compare", action="store_true", help="run it with dense prefill too, and show both")
    parser.add_argument(
        "--records", type=Path, action="append", help="show the runs of a file of records, and run nothing; repeatable"
    )
    parser.add_argument("--request", help="with --records: the request to show (default: all)")
    parser.add_argument("--out", type=Path, default=Path("explain.html"), help="the page (%(default)s)")
    _add_answer_arguments(parser)


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="an OpenAI-compatible endpoint, for this machine unless told otherwise")
    _add_pair_arguments(parser)
    for name, read in SERVED.items():
        _add_option(parser, ServeConfig, name, type=read)
    for name in SWITCHES:
        _add_option(parser, ServeConfig, name, action="store_true")
    _add_pruning_arguments(parser)
    _add_option(parser, DecodeConfig, "policy", metavar="|".join(POLICIES))
    _add_option(parser, DecodeConfig, "proposer", choices=["auto", *PROPOSERS])
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        help="wanted of every request; may be repeated (or SPEC_STACK_API_KEY)",
    )
    parser.add_argument(
        "--cors-origin", action="append", default=[], help=f"{meaning(ServeConfig, 'cors_origins')}; may be repeated"
    )


def _add_proxy(commands: Any) -> None:
    parser = commands.add_parser(
        "proxy",
        help="an OpenAI-compatible proxy that shortens prompts before any server",
        description="Forwards every request to the upstream server, chats and completions with the lines of long "
        "prompts left out that the draft finds of no use for the question. The headers x-spec-stack-reason, "
        "-prompt-tokens and -kept-tokens of a response say what was done.",
    )
    parser.add_argument("--upstream", required=True, help=meaning(ProxyConfig, "upstream"))
    _add_draft_arguments(parser)
    for name in ("keep_rate", "min_prompt_tokens", "scorer"):
        _add_option(parser, PrefillConfig, name, type=PRUNING[name], default=argparse.SUPPRESS)
    for name, read in PROXIED.items():
        _add_option(parser, ProxyConfig, name, type=read)
    parser.add_argument(
        "--no-recall", dest="recall", action="store_false", help="leave out in later turns what was left out before"
    )


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what is installed, and does this pair fit together")
    _add_pair_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--measure", action="store_true", help="load the pair and time it here: is it worth it, from what length on?"
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of --measure, about, on a machine that is idle (%(default)s)"
    )
    parser.add_argument(
        "--sglang",
        action="store_true",
        help="check a launch of SGLang, without launching it",
    )
    parser.add_argument("server_args", nargs="*", metavar="-- SERVER_ARGS", help="with --sglang: its arguments")


def _add_option(parser: argparse.ArgumentParser, config: type, name: str, **settings: Any) -> None:
    """Add a flag for a configuration field, with the field's name, default and help."""
    settings.setdefault("default", getattr(config, name))
    default = getattr(config, name)
    shown = f" ({default})" if isinstance(default, int | float | str) and default is not False else ""
    help_text = (meaning(config, name) + shown).replace("%", "%%")
    parser.add_argument(f"--{name.replace('_', '-')}", help=help_text, **settings)


def _add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help="target model: a folder, hub id or GGUF file (default: the embedded pair)")
    parser.add_argument("--draft", help="draft model, likewise")
    for name in ("precision", "draft_precision"):
        _add_option(parser, LoadConfig, name, metavar="|".join(("auto", *PRECISIONS)))
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: CUDA where there is one)")
    parser.add_argument(
        "--calibration",
        help="file of `spec-stack calibrate`, or none (default: the one beside the draft, or what ships for it)",
    )


def _add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", help="draft model: a folder, hub id or GGUF file (default: the embedded one)")
    parser.add_argument("--tokenizer", help="folder or hub id of its tokenizer (default: the draft's own)")
    _add_option(parser, LoadConfig, "draft_precision", metavar="|".join(("auto", *PRECISIONS)))
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: CUDA where there is one)")
    parser.add_argument("--calibration", help="file of `spec-stack calibrate`, or none")


def _add_calibrate_argument(parser: argparse.ArgumentParser, name: str, **how: Any) -> None:
    default = getattr(CalibrateConfig, name)
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    help_text = f"{meaning(CalibrateConfig, name)} (default: {shown})".replace("%", "%%")
    parser.add_argument(f"--{name}", default=default, help=help_text, **how)


def _add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    for name, kind in (
        ("max_tokens", int),
        ("temperature", float),
        ("top_k", int),
        ("top_p", float),
        ("min_p", float),
        ("repetition_penalty", float),
        ("min_tokens", int),
        ("seed", int),
    ):
        _add_option(parser, SamplingParams, name, type=kind)
    parser.add_argument(
        "--sampling", choices=["model"], help="take what the checkpoint's generation config sets for what is not given"
    )
    _add_option(parser, SamplingParams, "stop", action="append", default=[])
    _add_option(parser, SamplingParams, "ignore_eos", action="store_true")
    _add_pruning_arguments(parser)
    _add_option(parser, DecodeConfig, "policy", default=None, metavar="|".join(POLICIES))
    _add_option(parser, DecodeConfig, "proposer", default=None, choices=["auto", *PROPOSERS])
    parser.add_argument(
        "--gamma",
        type=int,
        help=f"the policy fixed with this many tokens per step, 0 to {MAX_GAMMA}; 0 is plain decoding",
    )


def _add_pruning_arguments(parser: argparse.ArgumentParser) -> None:
    _add_option(parser, PrefillConfig, "sparse_prefill", default=None, choices=[*get_args(SparsePrefill)])
    for name, values in OLD_SWITCHES.items():
        parser.add_argument(f"--{name}", action=FormerFlag, instead=f"--sparse-prefill, {values}")
    for name, read in PRUNING.items():
        _add_option(parser, PrefillConfig, name, type=read, default=argparse.SUPPRESS)


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt: a file or standard input, followed by the argument."""
    parts = []
    if arguments.file is not None and str(arguments.file) != "-":
        parts.append(read_document(arguments.file))
    elif str(arguments.file) == "-" or arguments.prompt in (None, "-") or _is_piped():
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("no prompt: give one as an argument, with --file, or on standard input")
        parts.append(_standard_input())
    if arguments.prompt not in (None, "-"):
        parts.append(str(arguments.prompt))
    return "\n\n".join(part for part in parts if part)


def read_prunable(file: Path | None) -> tuple[Any, dict[str, Any] | None]:
    """The text or messages for `prune`, and the request body around the messages, if any."""
    if file is not None and str(file) != "-":
        text = read_document(file)
    elif sys.stdin is None or sys.stdin.isatty():
        raise ValueError("nothing to prune: name a file, or send it to standard input")
    else:
        text = _standard_input()
    try:
        value = json.loads(text)
    except ValueError:
        return text, None
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return value["messages"], value
    is_chat = isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value)
    return (value if is_chat else text), None


def _standard_input() -> str:
    """All of standard input; a hint is printed while an open pipe sends nothing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if stat.S_ISFIFO(mode) and not select.select([sys.stdin], [], [], _SILENT_S)[0]:
            sys.stderr.write("spec-stack: waiting for standard input to end (</dev/null where there is none)\n")
    except (OSError, ValueError):
        # A stream without a file descriptor never blocks.
        pass
    return sys.stdin.read()


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file."""
    if sys.stdin is None:
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def request_of(arguments: argparse.Namespace, prompt: str, is_chat_model: bool) -> dict[str, Any]:
    """Options of `SpecStackGenerator.stream` from the arguments. is_chat_model: whether the target has a chat template,
    which is used unless --raw is given."""
    request = answer_options(arguments)
    if arguments.raw and arguments.system is not None:
        raise ValueError("--system goes into a chat template, which --raw leaves out")
    if arguments.chat or arguments.system is not None or (is_chat_model and not arguments.raw):
        system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        request["messages"] = [*system, {"role": "user", "content": prompt}]
    else:
        request["prompt"] = prompt
    response_format = _response_format(arguments)
    if response_format is not None:
        request["response_format"] = response_format
    return request


def _response_format(arguments: argparse.Namespace) -> dict[str, Any] | None:
    if arguments.json_schema is not None and arguments.regex is not None:
        raise ValueError("give --json-schema or --regex, not both")
    if arguments.regex is not None:
        return {"type": "regex", "pattern": arguments.regex}
    if arguments.json_schema is None:
        return None
    try:
        schema = json.loads(read_document(arguments.json_schema))
    except json.JSONDecodeError as error:
        raise ValueError(f"{arguments.json_schema} is not JSON: {error}") from error
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def answer_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `stream` without the prompt."""
    return {
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "min_p": arguments.min_p,
        "repetition_penalty": arguments.repetition_penalty,
        "min_tokens": arguments.min_tokens,
        "sampling": arguments.sampling,
        "seed": arguments.seed,
        "stop": arguments.stop,
        "ignore_eos": arguments.ignore_eos,
        "sparse_prefill": arguments.sparse_prefill,
        "policy": arguments.policy,
        "gamma": arguments.gamma,
        "proposer": arguments.proposer,
    }


def prefill_of(arguments: argparse.Namespace) -> PrefillConfig:
    """The prefill configuration; given flags override a calibration, even at their defaults."""
    return PrefillConfig(**{name: getattr(arguments, name) for name in PRUNING if hasattr(arguments, name)})


def served_config(arguments: argparse.Namespace) -> SpecStackConfig:
    """The configuration of `serve`'s requests."""
    prefill = prefill_of(arguments)
    if arguments.sparse_prefill is not None:
        prefill = replace(prefill, sparse_prefill=arguments.sparse_prefill)
    return SpecStackConfig(prefill, DecodeConfig(policy=arguments.policy, proposer=arguments.proposer))


def check_writable(path: Path) -> None:
    """Raise ValueError if no file can be written at this path."""
    folder = path if path.is_dir() else path.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def read_documents(folder: Path | None) -> list[str]:
    if folder is None:
        return []
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".txt", ".md", ".py") and file.is_file())
    if not files:
        raise ValueError(f"{folder} holds no .txt, .md or .py file")
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]
