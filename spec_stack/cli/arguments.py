"""The command-line parser, and conversion of its arguments to requests and settings. Loads no model."""

from __future__ import annotations

import argparse
import io
import json
import os
import select
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from spec_stack import __version__
from spec_stack.api.request_body import PROMPT_FIELDS, find_prompt
from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.cli.chat import read_document, system_messages
from spec_stack.cli.help import Parser, ShortHelp
from spec_stack.config import (
    MAX_GAMMA,
    PRECISIONS,
    DecodeConfig,
    LoadConfig,
    PrefillConfig,
    SamplingParams,
    SessionConfig,
)
from spec_stack.controller.registry import POLICIES
from spec_stack.prefill.calibration import CHOSEN
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.config import ServeConfig
from spec_stack.settings.options import meaning

Config = TypeVar("Config")
DEMO_TOKENS = 8200
_NONE = "none"
_SILENT_S = 1.0
_PRECISIONS = ("auto", *PRECISIONS)
# Names that help lists; a wrong one is an error of the configuration.
_KNOWN: dict[str, Iterable[str]] = {"policy": POLICIES, "precision": _PRECISIONS, "draft_precision": _PRECISIONS}
PAIR = ("target", "draft", "precision", "draft_precision", "draft_step", "device")
# Flags of `PrefillConfig`: every calibrated field, so that each can override a calibration, and more.
_CHECK = ("max_dropped_attention", "check_tokens", "check_rates")
PRUNING = (*CHOSEN, *_CHECK[1:], "draft_kv_budget", "positions")
# Options of `stream` without a flag, and those that have one.
_NOT_SAMPLED = ("bad_words_ids", "logit_bias", "stop_token_ids")
ANSWERED = (
    *(entry.name for entry in fields(SamplingParams)),
    *("sampling", "sparse_prefill", "policy", "gamma", "proposer", "question"),
)
_EXAMPLES = """examples:
  spec-stack generate --raw "def main():" --max-tokens 40
  spec-stack generate --file module.py "What is the value of MAX_SIZE?" --keep-rate 0.2 --stats
  cat server.log | spec-stack prune --question "Why did the upload fail?"
  spec-stack chat --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --file report.txt
"""


def _reader(read: Callable[[str], Any], form: str, takes_none: bool) -> Callable[[str], Any]:
    """A flag's conversion, which names the form of a value that cannot be read."""

    def read_or_none(text: str) -> Any:
        if takes_none and text.lower() == _NONE:
            return None
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {form}, got {text!r}") from None

    return read_or_none


def _heads(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "13.0,13.13" into (layer, head) pairs."""
    pairs = [pair.split(".") for pair in text.split(",")]
    return tuple((int(layer), int(head)) for layer, head in pairs)


def window(text: str) -> int | tuple[int, int]:
    """Parse "512", or "8192:512" for a window of 512 from 8,192 prompt tokens on."""
    shortest, found, size = text.partition(":")
    return (int(shortest), int(size)) if found else int(text)


def _curve(text: str) -> float | tuple[tuple[int, float], ...]:
    """Parse "0.2", or "2048:0.3,8192:0.1" for a rate by length."""
    if ":" not in text:
        return float(text)
    pairs = [pair.split(":") for pair in text.split(",")]
    return tuple((int(length), float(rate)) for length, rate in pairs)


# How fields are written that are no single number.
_FORMS: dict[str, tuple[Callable[[str], Any], str]] = {
    "draft_window": (window, "N|FROM:N"),
    "scoring_heads": (_heads, "LAYER.HEAD,…"),
    "keep_rate": (_curve, "X|LENGTH:X,…"),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser. Names, defaults and help come from the configuration dataclasses."""
    parser = Parser(
        prog="spec-stack",
        description="One draft model for both phases: sparse prefill and speculative decoding.",
        epilog=f"{_EXAMPLES}\n`spec-stack COMMAND --help` shows a command's usual flags, --help-all every one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"spec-stack {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in _COMMANDS:
        add(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate", help="answer or continue a prompt, streamed", epilog=_EXAMPLES, formatter_class=ShortHelp
    )
    prompt, output = parser.add_argument_group("prompt"), parser.add_argument_group("output")
    how = prompt.add_mutually_exclusive_group()
    _add_prompt_arguments(prompt, how)
    how.add_argument("--raw", action="store_true", help="continue the prompt as plain text, also with a chat model")
    _add_pair_arguments(parser)
    output.add_argument("--json-schema", type=Path, help="JSON schema file for the answer")
    output.add_argument("--regex", help="regular expression for the answer")
    output.add_argument("--json", action="store_true", help="no stream: print text and metrics as one JSON object")
    output.add_argument("--stats", action="store_true", help="print the cost of the answer on standard error")
    _add_answer_arguments(parser)
    _add_question(prompt)
    _add_quiet(output)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat", help="a conversation with cached turns; only new text is prefilled", formatter_class=ShortHelp
    )
    prompt = parser.add_argument_group("prompt")
    _add_list(prompt, "--file", "document for the first turn", type=Path)
    prompt.add_argument("--system", help="a system message")
    _add_question(prompt)
    _add_quiet(parser)
    _add_pair_arguments(parser)
    _add_answer_arguments(parser)
    _add(parser.add_argument_group("recall of dropped text"), SessionConfig)


def _add_prune(commands: Any) -> None:
    parser = commands.add_parser(
        "prune",
        help="shorten a text or OpenAI messages for any engine",
        description="Reads a text, OpenAI messages or a request's body (chats, completions, Responses and Anthropic's "
        "messages; other JSON is a text), and writes the same without the lines "
        "that the draft scores lowest for the question. No target is loaded.",
    )
    parser.add_argument("file", nargs="?", type=Path, help="file to shorten (default: standard input)")
    _add_draft_arguments(parser)
    default = f"the draft's calibrated rate, for prompts of {PrefillConfig.min_prompt_tokens} tokens or more"
    parser.add_argument("--keep-rate", type=float, help=f"share of the tokens to keep (default: {default})")
    parser.add_argument("--max-tokens", type=int, help="budget in the draft's tokens; both ends are kept in any case")
    _add(parser, PrefillConfig, "scorer", "max_dropped_attention")
    _add_question(parser)
    _add_quiet(parser)
    _add_list(parser, "--protect", "string whose lines are kept")
    parser.add_argument("--marker", help='text in place of every gap (default: "…" for lines and in sentences)')
    parser.add_argument("--json", action="store_true", help="print the result, kept spans and counts as a JSON object")
    parser.add_argument("--explain", action="store_true", help="print the kept spans and the reason on standard error")


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="dense + plain against sparse + speculative on a long real document")
    _add_pair_arguments(parser)
    for flag, default, help_text in (
        ("--tokens", DEMO_TOKENS, "length of the document in tokens"),
        ("--seed", 0, "selects the document and the fact"),
        ("--repeats", 3, "timed runs per mode"),
    ):
        parser.add_argument(flag, type=int, default=default, help=f"{help_text} (%(default)s)")
    _add_json(parser)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="compare policies with each other and with Transformers, on prompts or recorded runs",
        description="Without records: answers prompts live with a dense target, by plain decoding, the default, every "
        "registered policy with the draft alone, and Transformers' assisted generation and prompt lookup. With files "
        "of records: replays policies on them, without a model. SPEC_STACK_PLUGINS names modules with your policies.",
    )
    add = parser.add_argument
    add("records", nargs="*", type=Path, help="recorded runs of the same prompts at several gammas (.jsonl, .parquet)")
    _add_pair_arguments(parser)
    add(
        "--prompts",
        type=Path,
        help="a JSON object per line with messages, prompt or text, and task (default: built-in)",
    )
    add("--policies", nargs="+", default=[], metavar="NAME[:OPTION=X,…]", help="these policies (default: all)")
    add("--max-tokens", type=int, default=64, help="most tokens of an answer (%(default)s)")
    add("--minutes", type=float, default=10.0, help="start no prompt after so many minutes (%(default)s)")
    add("--rows", type=Path, help="file for a row per answer, from which a run resumes")
    add("--record", type=Path, help="new .jsonl file for the steps of gammas 0, 2, 4 and 8, to be replayed")
    add("--no-rivals", dest="rivals", action="store_false", help="leave Transformers' arms out")
    add("--cpu-seconds", action="store_true", help="measure processor seconds, on a CPU that other programs use too")
    add("--folds", type=int, default=5, help="of a replay: parts of the prompts, each left out once (%(default)s)")
    add("--cold", action="store_true", help="of a replay: start policies anew in each fold")
    add("--csv", type=Path, help="file for the leaderboard as CSV")
    add("--plot", type=Path, help="file for a plot (.png, .svg, .pdf; needs matplotlib)")
    _add_json(parser)


def _add_calibrate(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="choose the draft's scoring heads and the keep rate",
        description="One draft pass per prompt; the target's weights are not loaded.",
    )
    _add_pair_arguments(parser)
    parser.add_argument("--documents", type=Path, help="folder of your texts to hide needles in (.txt, .md, .py)")
    _add(parser, CalibrateConfig, but=("budget_s",))
    budget = CalibrateConfig.budget_s / 60
    parser.add_argument("--budget", type=float, default=budget, help="time budget in minutes (default: %(default)g)")
    parser.add_argument(
        "--out", type=Path, help="file or folder for the result (default: the draft's folder, or the hub's cache)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="24 prompts of 1,024 tokens choose the heads alone, in a minute or two"
    )
    what = (
        "share of lost answers: also find the largest max_dropped_attention whose upper 95 %% bound stays under it. "
        "The target"
    )
    parser.add_argument("--max-loss", type=float, help=f"{what} runs, for another --budget at most")
    what = (
        "with --max-loss: your prompts, a JSON object per line with messages, prompt or text, and answers where known"
    )
    parser.add_argument("--loss-prompts", type=Path, help=f"{what} (default: facts in documents alone)")


def _add_explain(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="write an HTML page with the answer, what was kept of the prompt, and what kept it",
        formatter_class=ShortHelp,
    )
    _add_pair_arguments(parser)
    _add_prompt_arguments(parser)
    _add_list(parser, "--turn", "user message after the prompt's answer, in a session")
    parser.add_argument("--demo", action="store_true", help="use the demo's document and question as the prompt")
    parser.add_argument("--compare", action="store_true", help="show the answer to the whole prompt too")
    parser.add_argument("--out", type=Path, help="the page (default: a file named after the prompt)")
    _add_quiet(parser)
    _add_answer_arguments(parser)


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", help="an OpenAI-compatible server, on the local machine by default", formatter_class=ShortHelp
    )
    _add_pair_arguments(parser)
    server = parser.add_argument_group("server")
    _add_config(server)
    _add(server, ServeConfig, but=("api_keys", "cors_origins"))
    key = "API key that requests must have (or SPEC_STACK_API_KEY)"
    _add_list(server, "--api-key", key, dest="api_keys", metavar="KEY")
    _add_list(server, "--cors-origin", meaning(ServeConfig, "cors_origins"), dest="cors_origins", metavar="ORIGIN")
    _add_pruning_arguments(parser)
    _add(parser.add_argument_group("drafting"), DecodeConfig, "policy", "proposer")


def _add_proxy(commands: Any) -> None:
    parser = commands.add_parser(
        "proxy",
        help="an OpenAI-compatible proxy that shortens prompts in front of any server",
        description="Forwards every request to the upstream server; long prompts lose the lines that the draft\n"
        "scores lowest for the question. The response headers x-spec-stack-reason, -prompt-tokens,\n"
        "-kept-tokens and -recalled-tokens report it.",
        formatter_class=ShortHelp,
    )
    _add(parser, ProxyConfig, "upstream", required=True)
    _add_config(parser)
    _add_draft_arguments(parser)
    _add(parser, PrefillConfig, "keep_rate", "min_prompt_tokens", "scorer", *_CHECK)
    _add(parser, ProxyConfig, but=("upstream",))


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="installed packages, and the compatibility of a pair")
    _add_pair_arguments(parser)
    _add_json(parser)
    add = parser.add_argument
    add("--measure", action="store_true", help="load the pair, and time prompts and answers here")
    add("--minutes", type=float, default=10.0, help="time budget of --measure (%(default)s)")
    what = "with --measure: measure speed-up and fidelity on these prompts, a JSON object per line with messages, "
    add("--prompts", type=Path, help=f"{what}prompt or text")
    what = "with --measure: text files, in which facts are hidden and asked for"
    add("--documents", type=Path, nargs="+", default=[], help=what)
    what = "with --prompts or --documents: settings to compare (default: 0.1 0.2 0.3 and the calibrated one)"
    add("--keep-rates", type=float, nargs="+", help=what)
    what = "with --prompts or --documents: also measure the draft's check with this threshold"
    add("--max-dropped-attention", type=float, help=f"{what}, from the lowest keep rate on (default: a calibrated one)")
    add("--rows", type=Path, help="file for a row per prompt, from which a run resumes (default: next to the prompts)")
    what = "check an SGLang launch: KV pools, CUDA graphs, which prompts are pruned, or why it would fail; loads no "
    add("--sglang", action="store_true", help=f"{what}weights")
    add("server_args", nargs="*", metavar="-- SERVER_ARGS", help="with --sglang: the launch's arguments")


def _add(parser: Any, config: type, *names: str, but: Sequence[str] = (), **settings: Any) -> None:
    """Add a flag for each of these configuration fields (all but some by default), with its name, type and help. One
    that is not given is not in the namespace, where the configuration's default holds."""
    known, kinds = {entry.name: entry for entry in fields(config)}, get_type_hints(config)
    for name in names or [name for name in known if name not in but]:
        default = known[name].default
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        help_text = meaning(config, name) + ("" if isinstance(shown, bool) or shown in (None, "") else f" ({shown})")
        own = _reading(name, kinds[name], default) | settings
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, help=help_text.replace("%", "%%"), default=argparse.SUPPRESS, **own)


def _reading(name: str, kind: Any, default: object) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if default else "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    parts = (kind, *get_args(kind))
    if Sequence[str] in parts:
        return {"action": "append"}
    if kind in (Sequence[int], Sequence[float]):
        return {"type": get_args(kind)[0], "nargs": "+", "metavar": "N" if kind == Sequence[int] else "X"}
    takes_none = type(None) in parts
    numbers = ((float, "X"), (int, "N"), (str, name.upper()))
    read, form = _FORMS.get(name) or next(each for each in numbers if each[0] in parts)
    form = "|".join(_KNOWN[name] if name in _KNOWN else [form, *[_NONE] * takes_none])
    return {"type": _reader(read, form, takes_none), "metavar": form}


_COMMANDS = (
    *(_add_generate, _add_chat, _add_prune, _add_demo, _add_bench, _add_calibrate, _add_explain),
    *(_add_serve, _add_proxy, _add_doctor),
)


def _add_list(parser: Any, flag: str, help: str, **settings: Any) -> None:
    """Add a flag that may be repeated."""
    parser.add_argument(flag, action="append", default=[], help=f"{help}; repeatable", **settings)


def _add_question(parser: Any) -> None:
    what = "what finds the kept text, in place of the question in the prompt; the answer does not read it"
    parser.add_argument("--question", default=argparse.SUPPRESS, help=what)


def _add_quiet(parser: Any) -> None:
    parser.add_argument("--quiet", action="store_true", help="no lines on standard error about what was kept")


def _add_config(parser: Any) -> None:
    what = "TOML file of these flags (keep-rate = 0.1, recall = false); given flags override it"
    parser.add_argument("--config", type=Path, metavar="FILE", help=what)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_pair_arguments(command: argparse.ArgumentParser) -> None:
    parser = command.add_argument_group("models")
    parser.add_argument("--target", help="target model: a folder, hub id or GGUF file (default: the embedded pair)")
    parser.add_argument("--draft", help="draft model, likewise")
    _add(parser, LoadConfig, "precision", "draft_step")
    _add_placement(parser)


def _add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """The draft of commands without a target."""
    parser.add_argument("--draft", help="draft model: a folder, hub id or GGUF file (default: the embedded one)")
    parser.add_argument("--tokenizer", help="folder or hub id of its tokenizer (default: the draft's own)")
    _add_placement(parser)


def _add_placement(parser: Any) -> None:
    """The draft's precision and calibration, and the device."""
    _add(parser, LoadConfig, "draft_precision")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: CUDA if available)")
    parser.add_argument(
        "--calibration",
        type=lambda text: False if text == _NONE else text,
        help="file of `spec-stack calibrate`, or none; auto makes one where none is known, from a few short prompts "
        "(default: the draft's saved or shipped one)",
    )


def _add_prompt_arguments(parser: Any, how: Any = None) -> None:
    """The prompt of `generate` and `explain`. how: the group of --chat, if it excludes another flag."""
    parser.add_argument("prompt", nargs="?", help="the prompt, after --file and standard input; - is standard input")
    parser.add_argument("--file", type=Path, help="file with the prompt or its beginning; - is standard input")
    (how or parser).add_argument("--chat", action="store_true", help="send the prompt as a user message (chat models)")
    parser.add_argument("--system", help="a system message; implies --chat")


def _add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    sampling, drafting = parser.add_argument_group("sampling"), parser.add_argument_group("drafting")
    _add(sampling, SamplingParams, but=_NOT_SAMPLED)
    of_model = "use the checkpoint's generation config by default"
    sampling.add_argument("--sampling", choices=["model"], default=argparse.SUPPRESS, help=of_model)
    _add_pruning_arguments(parser)
    _add(drafting, DecodeConfig, "policy", "proposer")
    gamma = f"fixed tokens per step, 0 to {MAX_GAMMA}; 0 is plain decoding"
    drafting.add_argument("--gamma", type=int, default=argparse.SUPPRESS, help=gamma, metavar="N")


def _add_pruning_arguments(parser: argparse.ArgumentParser) -> None:
    _add(parser.add_argument_group("pruning"), PrefillConfig, "sparse_prefill", *PRUNING)


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt: a file or standard input, followed by the argument. Raises ValueError if it is empty."""
    parts = []
    if arguments.file is not None and str(arguments.file) != "-":
        parts.append(read_document(arguments.file))
    is_named = str(arguments.file) == "-" or arguments.prompt == "-"
    if is_named or (arguments.file is None and (arguments.prompt is None or _is_piped())):
        parts.append(_standard_input("no prompt"))
        if None not in (arguments.file, arguments.prompt) and not parts[-1].strip():
            raise ValueError("standard input is empty; leave - out")
    if arguments.prompt not in (None, "-"):
        parts.append(_checked_text(str(arguments.prompt), "the prompt"))
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    return prompt


def read_prunable(file: Path | None) -> tuple[Any, Callable[[Any], Any] | None]:
    """The text or chat for `prune`, and what makes of a shorter one the JSON that was read; None for a text, which
    other JSON is too. Line ends stay."""
    if file is not None and str(file) != "-":
        text = read_document(file, newline="")
    else:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(newline="")
        text = _standard_input("nothing to prune")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text, None
    if isinstance(value, str):
        return value, lambda shorter: shorter
    is_chat = isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value)
    body = {"messages": value} if is_chat else value
    if isinstance(body, dict) and not isinstance(body.get("messages", []), list):
        raise ValueError(f'the body\'s "messages" must be a list of messages, got {body["messages"]!r}')
    if isinstance(body, dict) and body.get("spec_stack") is not None:
        raise ValueError("the body's spec_stack is for the proxy; give --keep-rate, --question, … in its place")
    if not isinstance(body, dict) or not any(isinstance(body.get(name), str | list) for name in PROMPT_FIELDS):
        return text, None
    prompt = find_prompt(body)
    return prompt.chat, lambda chat: prompt.shortened(chat)["messages"] if is_chat else prompt.shortened(chat)


def _standard_input(problem: str) -> str:
    """All of standard input; a hint is printed while an open pipe sends nothing. Raises ValueError for a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError(f"{problem}: give an argument, a file, or standard input")
    if stat.S_ISFIFO(_stdin_mode()) and not select.select([sys.stdin], [], [], _SILENT_S)[0]:
        sys.stderr.write("spec-stack: waiting for standard input to end (</dev/null where there is none)\n")
    return _checked_text(sys.stdin.read().removeprefix("\ufeff"), "standard input")


def _checked_text(text: str, name: str) -> str:
    """A text that the shell gave. Raises ValueError for bytes that are not UTF-8, which Python reads as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error}") from error
    return text


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file."""
    return stat.S_ISFIFO(_stdin_mode()) or stat.S_ISREG(_stdin_mode())


def _stdin_mode() -> int:
    """The file mode of standard input; 0 without a file descriptor."""
    try:
        return os.fstat(sys.stdin.fileno()).st_mode if sys.stdin is not None else 0
    except (OSError, ValueError):
        return 0


def request_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `SpecStackGenerator.stream` for `generate`, without the prompt."""
    if arguments.raw and arguments.system is not None:
        raise ValueError("--system goes into a chat template, which --raw leaves out")
    response_format = _response_format(arguments)
    return answer_options(arguments) | ({} if response_format is None else {"response_format": response_format})


def prompt_of(arguments: argparse.Namespace, prompt: str, is_chat_model: bool) -> dict[str, Any]:
    """The prompt as an option of `stream`. is_chat_model: whether the target has a chat template, which is used unless
    --raw is given."""
    if arguments.chat or arguments.system is not None or (is_chat_model and not arguments.raw):
        return {"messages": [*system_messages(arguments.system), {"role": "user", "content": prompt}]}
    return {"prompt": prompt}


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
    """Options of `stream` without the prompt; raises ValueError before any model is loaded."""
    for config in (SamplingParams, DecodeConfig):
        config_of(config, arguments)
    return given(arguments, ANSWERED)


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of the named arguments that the namespace has."""
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def config_of(config: type[Config], arguments: argparse.Namespace) -> Config:
    """A configuration from the arguments that have its fields' names; given ones override a calibration, even at their
    defaults."""
    return config(**given(arguments, [entry.name for entry in fields(config)]))  # type: ignore[arg-type]


def check_writable(path: Path) -> None:
    """Raise ValueError if no file can be written at this path."""
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; name a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
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
    return [file.read_text(encoding="utf-8-sig", errors="replace") for file in files]
