"""A terminal chat over one session."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from spec_stack.cli.progress import ProgressLine

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator
    from spec_stack.types import Metrics, StepOutput

HELP = (
    "/file PATH adds a document to the next message, /undo takes the last turn back, /save PATH, /load PATH, "
    "/reset begins anew, /help, /quit; what is pasted is one message; Ctrl-C stops an answer"
)
# A path, which a message may begin with, has more signs.
_COMMAND = re.compile("/[A-Za-z]+(?:\\s|\\Z)")
_DIM, _PLAIN = "\033[2m", "\033[0m"
# Longest gap in seconds between pasted lines.
_PASTE_S = 0.05


def read_block(prompt: str, source: TextIO | None = None) -> str:
    """The next line, or all pasted lines. Raises EOFError as `input`."""
    source = source or sys.stdin
    lines = [input(prompt)]
    while source.isatty() and select.select([source], [], [], _PASTE_S)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines)


def read_document(path: Path, newline: str | None = None) -> str:
    """The text of a file, without a byte order mark; newline as for `open`. Raises ValueError if it cannot be read or
    has no text."""
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            if (text := file.read()).strip():
                return text
            raise ValueError(f"{path} is empty; leave it out, or name another file")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def system_messages(text: str | None) -> list[dict[str, str]]:
    """The messages at the beginning of a chat."""
    return [] if text is None else [{"role": "system", "content": text}]


def status_line(metrics: Metrics) -> str:
    """The cost of a turn in one line."""
    parts = [
        f"{metrics.num_new_tokens} new",
        f"{metrics.num_cached_tokens} cached",
        f"{metrics.num_kept_tokens} kept",
        f"{metrics.num_recalled_tokens} recalled",
        f"TTFT {metrics.ttft_s:.2f} s",
    ]
    if metrics.decode_tokens_per_s is not None:
        parts.append(f"{metrics.decode_tokens_per_s:.0f} tokens/s")
    if metrics.acceptance_rate is not None:
        parts.append(f"{metrics.acceptance_rate:.0%} accepted")
    return " · ".join(parts)


class Chat:
    """Answers lines in one session, and prints the cost below each answer."""

    def __init__(
        self,
        generator: SpecStackGenerator,
        options: dict[str, Any],
        system: str | None = None,
        documents: Sequence[str] = (),
        read: Callable[[str], str] = read_block,
        out: TextIO | None = None,
        told: Callable[[int, int], None] = lambda num_kept, num_tokens: None,
    ) -> None:
        self._generator, self._options, self._told = generator, options, told
        self._read, self._out, self._progress = read, out or sys.stdout, ProgressLine()
        self._head, self._first_documents = system_messages(system), list(documents)
        self._is_dim = self._out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._begin()

    def _begin(self) -> None:
        self.session = self._generator.session()
        self.messages: list[dict[str, str]] = list(self._head)
        self._documents = list(self._first_documents)
        # The documents of every turn: /undo gives them back.
        self._attached: list[list[str]] = []
        self._num_dropped = 0

    def run(self) -> None:
        """Read lines until end of input or /quit."""
        self._say(HELP, dim=True)
        while True:
            try:
                given = self._read("> ")
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("")
                continue
            line = given.strip()
            if given.rstrip() == "/quit":
                return
            if _COMMAND.match(given) and "\n" not in line:
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        name, _, path = line.partition(" ")
        commands = {"/reset": self._reset, "/undo": self._undo}
        path_commands: dict[str, Callable[[Path], None]] = {"/save": self._save, "/load": self._load}
        path_commands["/file"] = lambda path: self._documents.append(read_document(path))
        try:
            if name in commands:
                commands[name]()
            elif name in path_commands and path.strip():
                path_commands[name](Path(path.strip()).expanduser())
            elif name in (*path_commands, "/help", "/quit"):
                self._say(HELP, dim=True)
            else:
                self._say(f"{name} is no command; a blank before it sends it as a message. {HELP}", dim=True)
        except (ValueError, OSError) as error:
            self._say(str(error), dim=True)

    def _reset(self) -> None:
        self.session.close()
        self._begin()
        if self._documents:
            self._say(f"{len(self._documents)} documents go with the next message", dim=True)

    def _undo(self) -> None:
        """Remove the last turn; its documents go with the next message, at which the session rolls back."""
        if len(self.messages) <= len(self._head):
            raise ValueError("there is no turn to take back")
        self.messages = self.messages[:-2]
        self._documents = [*(self._attached.pop() if self._attached else []), *self._documents]
        again = f"; {len(self._documents)} documents go with the next message" if self._documents else ""
        self._say(f"taken back; {self._num_turns} turns are left{again}", dim=True)

    @property
    def _num_turns(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    def _save(self, path: Path) -> None:
        """Write the session to a file, and the messages to another file beside it."""
        self.session.save(path)
        said = _messages_of(path)
        state = {"messages": self.messages, "documents": self._documents, "attached": self._attached}
        said.write_text(json.dumps(state), encoding="utf-8")
        self._say(f"saved to {path} and {said}", dim=True)

    def _load(self, path: Path) -> None:
        messages, documents, attached = _read_messages(_messages_of(path))
        session = self._generator.load_session(path)
        self.session.close()
        self.session, self.messages, self._documents, self._attached = session, messages, documents, attached
        self._say(f"loaded; {self._num_turns} turns", dim=True)

    def _answer(self, line: str) -> None:
        """One turn. An interrupted answer stays in the history; a rejected turn does not."""
        messages = [*self.messages, {"role": "user", "content": "\n\n".join([*self._documents, line])}]
        answer: list[StepOutput] = []
        try:
            self._stream(messages, answer)
        except KeyboardInterrupt:
            self._say("\n(stopped)", dim=True)
        except ValueError as error:
            self._say(str(error), dim=True)
            return
        else:
            self._say("")
        self._attached.append(self._documents)
        self._documents = []
        self.messages = [*messages, {"role": "assistant", "content": "".join(output.text for output in answer)}]
        if answer and (metrics := answer[-1].metrics) is not None:
            self._say(status_line(metrics), dim=True)
            num_dropped = metrics.num_prompt_tokens - metrics.num_kept_tokens
            if num_dropped > self._num_dropped:
                self._told(metrics.num_kept_tokens, metrics.num_prompt_tokens)
            self._num_dropped = num_dropped

    def _stream(self, messages: Sequence[Mapping[str, str]], answer: list[StepOutput]) -> None:
        """Print an answer as it streams, and append its steps to `answer`."""
        with warnings.catch_warnings():
            # For programs that pass the new message alone; here it follows an /undo.
            warnings.filterwarnings("ignore", "this call shares .* begins anew")
            steps = self.session.stream(messages=messages, on_progress=self._progress, **self._options)
        with closing(steps) as outputs:
            try:
                for output in outputs:
                    answer.append(output)
                    self._out.write(output.text)
                    self._out.flush()
            finally:
                self._progress.clear()

    def _say(self, text: str, dim: bool = False) -> None:
        if dim and self._is_dim:
            text = f"{_DIM}{text}{_PLAIN}"
        print(text, file=self._out, flush=True)


def _messages_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.messages.json")


def _read_messages(path: Path) -> tuple[list[dict[str, str]], list[str], list[list[str]]]:
    """Read the messages of /save. Raises ValueError for an invalid file."""
    try:
        values = json.loads(read_document(path))
        messages = [{name: str(message[name]) for name in ("role", "content")} for message in values["messages"]]
        attached = [[str(text) for text in turn] for turn in values.get("attached", [])]
        return messages, [str(text) for text in values["documents"]], attached
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: its messages are not those of a chat: {error!r}") from error
