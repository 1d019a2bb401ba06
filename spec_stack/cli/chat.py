"""A conversation in a terminal, over one session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from spec_stack.api.session import Session
    from spec_stack.types import Metrics

HELP = "/file PATH adds a document to the next message, /reset begins anew, /help, /quit; Ctrl-C stops an answer"
_DIM, _PLAIN = "\033[2m", "\033[0m"


def read_document(path: Path) -> str:
    """The text of a file. Raises ValueError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def status_line(metrics: Metrics) -> str:
    """What a turn cost, in one line."""
    parts = [
        f"{metrics.num_new_tokens} new",
        f"{metrics.num_cached_tokens} cached",
        f"{metrics.num_kept_tokens} kept",
        f"{metrics.num_restored_tokens} restored",
        f"TTFT {metrics.ttft_s:.2f} s",
    ]
    if metrics.decode_tokens_per_s is not None:
        parts.append(f"{metrics.decode_tokens_per_s:.0f} tokens/s")
    if metrics.acceptance_rate is not None:
        parts.append(f"{metrics.acceptance_rate:.0%} accepted")
    return " · ".join(parts)


class Chat:
    """Reads lines, answers them, and says below each answer what it cost.

    Parameters
    ----------
    open_session : callable
        Makes the session; called again after /reset.
    options : dict
        For every `Session.stream`.
    system : str, optional
        A system message.
    documents : sequence of str
        Texts that go ahead of the first message.
    read : callable
        Gives the next line, as `input` does, whose errors end the chat.
    out : file
        Where answers go.
    settle : callable, optional
        Called when a turn has ended, or was ended.
    """

    def __init__(
        self,
        open_session: Callable[[], Session],
        options: dict[str, Any],
        system: str | None = None,
        documents: Sequence[str] = (),
        read: Callable[[str], str] = input,
        out: TextIO | None = None,
        settle: Callable[[], object] | None = None,
    ) -> None:
        self._settle = settle or (lambda: None)
        self._open_session, self._options, self._read, self._out = open_session, options, read, out or sys.stdout
        self._head = [] if system is None else [{"role": "system", "content": system}]
        self._begin(documents)

    def _begin(self, documents: Sequence[str]) -> None:
        self.session = self._open_session()
        self.messages: list[dict[str, str]] = list(self._head)
        self._documents = list(documents)

    def run(self) -> None:
        """Go on until the input ends or /quit."""
        self._say(HELP, dim=True)
        while True:
            try:
                line = self._read("> ").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("")
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self.session.close()
            self._begin(())
        elif name == "/file" and rest:
            try:
                self._documents.append(read_document(Path(rest.strip())))
            except ValueError as error:
                self._say(str(error), dim=True)
        else:
            self._say(HELP, dim=True)

    def _answer(self, line: str) -> None:
        """One turn; what an interrupted one has said stays in the history, a refused one leaves none."""
        asked = [*self.messages, {"role": "user", "content": "\n\n".join([*self._documents, line])}]
        text, metrics = "", None
        try:
            with closing(self.session.stream(messages=asked, **self._options)) as outputs:
                try:
                    for output in outputs:
                        text += output.text
                        self._out.write(output.text)
                        self._out.flush()
                        metrics = output.metrics
                finally:
                    self._settle()
        except KeyboardInterrupt:
            self._say("\n(stopped)", dim=True)
        except ValueError as error:
            self._say(str(error), dim=True)
            return
        else:
            self._say("")
        self._documents = []
        self.messages = [*asked, {"role": "assistant", "content": text}]
        if metrics is not None:
            self._say(status_line(metrics), dim=True)

    def _say(self, text: str, dim: bool = False) -> None:
        if dim and self._out.isatty():
            text = f"{_DIM}{text}{_PLAIN}"
        print(text, file=self._out, flush=True)
