"""Help on one screen, and errors that name the nearest command or flag."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from copy import copy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from spec_stack.cli.config_file import flags_in

# What `--help` shows of commands with a `ShortHelp`, in few words. `--help-all` has the rest, in full.
_USUAL = {
    "--help": "this screen",
    "--help-all": "every flag, with its whole meaning",
    "prompt": "the prompt, after --file and standard input",
    "--target": "folder, hub id or GGUF file (the embedded test pair)",
    "--upstream": "base URL of the server, as for OpenAI's clients",
    "--draft": "the draft: folder, hub id or GGUF file",
    "--precision": "auto, fp32, fp16, bf16, int8 or nf4",
    "--device": "cpu, cuda, cuda:1 (CUDA if available)",
    "--calibration": "file of `spec-stack calibrate`, auto or none",
    "--file": "the prompt or its beginning; - is standard input",
    "--turn": "a further user message, in a session; repeatable",
    "--demo": "the demo's document and question as the prompt",
    "--chat": "send the prompt as a user message",
    "--raw": "continue the prompt as plain text",
    "--system": "a system message",
    "--question": "finds the kept text, in place of the prompt's",
    "--json-schema": "JSON schema file for the answer",
    "--regex": "regular expression for the answer",
    "--max-tokens": "most tokens to generate (256)",
    "--temperature": "0 is greedy (0, of serve 1)",
    "--top-p": "share of the probability to draw from (1)",
    "--seed": "of sampling",
    "--stop": "text that ends the answer; repeatable",
    "--sparse-prefill": "auto (long prompts), on, off or draft_only",
    "--keep-rate": "share of the prompt that is kept (0.2, or calibrated)",
    "--min-prompt-tokens": "shortest prompt that is pruned (2048, or calibrated)",
    "--policy": "chooses the tokens drafted a step (throughput)",
    "--gamma": "fixed tokens drafted a step; 0 is plain decoding",
    "--json": "text and metrics as one JSON object",
    "--stats": "the answer's cost on standard error",
    "--quiet": "no lines about what was kept",
    "--compare": "the answer to the whole prompt too",
    "--out": "file of the page",
    "--config": "TOML file of flags: keep-rate = 0.1",
    "--host": "address to listen on (127.0.0.1)",
    "--port": "its port (8000, of a proxy 8001)",
    "--deadline-s": "most seconds that scoring may delay a request (10)",
    "--log-json": "a JSON object a line",
    "--api-key": "key that requests must have; repeatable",
    "--max-queued": "most waiting requests (64)",
    "--max-sessions": "conversations whose caches are kept (8)",
}
_MAX_METAVAR = 8


class ShortHelp(argparse.RawDescriptionHelpFormatter):
    """Shows the usual flags, a line each."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], *more: Any, **settings: Any) -> None:
        """Every flag by one word."""
        positional = [action for action in actions if not action.option_strings]
        names = "".join(f" [{action.dest}]" for action in positional)
        super().add_usage(f"%(prog)s [flags]{names}", [], *more, **settings)

    def add_argument(self, action: argparse.Action) -> None:
        """Leave out a flag that is not usual."""
        name = action.option_strings[-1] if action.option_strings else action.dest
        if name not in _USUAL:
            return
        shown = copy(action)
        shown.help = _USUAL[name].replace("%", "%%")
        if shown.nargs != 0 and (shown.choices or len(str(shown.metavar or shown.dest)) > _MAX_METAVAR):
            shown.choices, shown.metavar = None, "NAME" if action.type is None else "X"
        super().add_argument(shown)


class HelpAll(argparse.Action):
    """Prints the whole help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print it and exit."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.print_help()
        raise SystemExit(0)


class Parser(argparse.ArgumentParser):
    """A parser of whole flags: as an abbreviation, `--prefill` would set `--prefill-chunk`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        if self.formatter_class is ShortHelp:
            self.add_argument("--help-all", action=HelpAll, nargs=0, help="every flag, with its whole meaning")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read the command's file, if it has one, and refuse what is no flag of the command, naming the nearest."""
        if "--config" in self._option_string_actions:
            files = argparse.ArgumentParser(prog=self.prog, add_help=False, allow_abbrev=False)
            files.add_argument("--config", type=Path)
            named, args = files.parse_known_args(args)
            if named.config is not None:
                args = [*flags_in(named.config, self._actions, [each.partition("=")[0] for each in args]), *args]
        known, left = super().parse_known_args(args, namespace)
        if left:
            # Without dashes, which would make short names alike.
            flags = {flag.lstrip("-"): flag for flag in self._option_string_actions}
            near = get_close_matches(left[0].partition("=")[0].lstrip("-"), flags, 1)
            self.error(f"unrecognized arguments: {' '.join(left)}{f'; did you mean {flags[near[0]]}?' if near else ''}")
        return known, left
