from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spec_stack import SpecStackGenerator
from spec_stack.cli.chat import Chat
from spec_stack.cli.main import main


def talk(
    embedded: SpecStackGenerator,
    lines: list[Any],
    drawn: dict[str, Any] | None = None,
    out: io.StringIO | None = None,
    **options: Any,
) -> tuple[Chat, str]:
    """What a chat says to these lines, an exception among which is raised by the reading of it."""
    source: Iterator[Any] = iter(lines)

    def read(prompt: str) -> str:
        line = next(source, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    out = out or io.StringIO()
    chat = Chat(embedded, drawn or {"max_tokens": 12}, read=read, out=out, **options)
    chat.run()
    return chat, out.getvalue()


def test_a_second_turn_goes_on_from_the_first_and_says_what_it_cost(embedded: SpecStackGenerator) -> None:
    chat, said = talk(embedded, ["Give three tips.", "", KeyboardInterrupt(), "Why?"], system="Be brief.")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.messages[2]["content"] in said
    costs = [line for line in said.splitlines() if " new · " in line]
    assert len(costs) == 2
    assert " 0 cached" in costs[0]
    assert " 0 cached" not in costs[1]
    assert "TTFT" in costs[1]


def test_documents_go_ahead_of_the_next_message_and_a_reset_forgets_all(
    embedded: SpecStackGenerator, tmp_path: Path
) -> None:
    path = tmp_path / "facts.txt"
    path.write_text("The red code for Alice is 48213.")
    lines = ["/file", f"/file {path}", f"/file {tmp_path / 'none'}", "What is it?", "Why?", "/quit", "never read"]
    chat, said = talk(embedded, lines, documents=["First."])
    assert chat.messages[0]["content"] == f"First.\n\n{path.read_text()}\n\nWhat is it?"
    assert chat.messages[2]["content"] == "Why?"
    assert "cannot read" in said
    assert said.count("/reset begins anew") == 2
    chat, said = talk(embedded, ["Hi.", "/reset", "Hi."])
    assert len(chat.messages) == 2
    assert said.count(" 0 cached") == 2


def test_a_message_may_begin_with_a_slash_and_an_unknown_command_is_named(embedded: SpecStackGenerator) -> None:
    for line in ("/etc/passwd: what is it?", "/", "/* a comment */", " /reset is a command", "/usr/bin"):
        chat, _ = talk(embedded, [line])
        assert chat.messages[0]["content"] == line.strip()
    for line in ("/rest", "/Files x"):
        chat, said = talk(embedded, [line])
        assert not chat.messages
        assert f"{line.split()[0]} is no command; a blank before it sends it as a message. /file PATH" in said
    for line in ("/help", "/file", "/quit now"):
        assert "is no command" not in talk(embedded, [line])[1]


def test_an_interrupt_stops_the_answer_only(embedded: SpecStackGenerator) -> None:
    class Impatient(io.StringIO):
        def flush(self) -> None:
            if self.getvalue().endswith("\n") or self.interrupted:
                return
            self.interrupted = True
            raise KeyboardInterrupt

        interrupted = False

    out = Impatient()
    chat, _ = talk(embedded, ["Give three tips.", "Why?"], out=out)
    assert out.getvalue().count("(stopped)") == 1
    assert len(chat.messages) == 4
    assert chat.messages[1]["content"] in out.getvalue()
    assert chat.messages[3]["content"]


def test_a_message_that_is_refused_leaves_the_chat_as_it_was(embedded: SpecStackGenerator) -> None:
    chat, said = talk(embedded, ["word " * 17000, "Hi."])
    assert "positions" in said
    assert len(chat.messages) == 2


def test_the_command_reads_lines_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = tmp_path / "document.txt"
    document.write_text("The red code for Alice is 48213.")
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the red code for Alice?\nWhy?\n"))
    assert main(["chat", "--file", str(document), "--max-tokens", "24", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "48213" in said
    assert said.count("recalled") == 2


def test_a_turn_is_taken_back_and_a_chat_is_saved_and_goes_on_elsewhere(
    embedded: SpecStackGenerator, tmp_path: Path
) -> None:
    path = tmp_path / "chat"
    lines = ["/undo", "Hi.", "Give three tips.", "/undo", f"/save {path}", f"/save {tmp_path / 'no' / 'x'}"]
    chat, said = talk(embedded, lines)
    assert "no turn to take back" in said
    assert "taken back; 1 turns are left" in said
    assert "cannot write" in said
    again, said = talk(embedded, ["/load nowhere", f"/load {path}", "Why?"], system="Unused.")
    assert "cannot read nowhere.messages.json" in said
    assert again.messages[:2] == chat.messages
    assert again.messages[2] == {"role": "user", "content": "Why?"}
    assert " 0 cached" not in said.splitlines()[-1]
    path.with_name("chat.messages.json").write_text('{"messages": [{"role": "user"}], "documents": []}')
    assert "not those of a chat" in talk(embedded, [f"/load {path}"])[1]


def test_what_is_pasted_into_a_terminal_is_one_message() -> None:
    code = (
        "from spec_stack.cli.chat import read_block\nprint(repr(read_block('> ')), repr(read_block('> ')), flush=True)"
    )
    ours, theirs = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    read = b""
    for sent, awaited in ((b"def f():\n    return 1\n\nWhy?\n", b"> "), (b"Thanks.\n", b"> ")):
        while read.count(b"> ") < (1 if sent.startswith(b"def") else 2):
            read += os.read(ours, 1000)
        assert awaited in read
        os.write(ours, sent)
    while b"Thanks.'" not in read:
        read += os.read(ours, 1000)
    assert b"'def f():\\n    return 1\\n\\nWhy?' 'Thanks.'" in read
    assert process.wait(600) == 0
    os.close(ours)


def test_an_undo_gives_the_documents_back_and_warns_of_nothing(
    embedded: SpecStackGenerator, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path, saved = tmp_path / "facts.txt", tmp_path / "saved"
    path.write_text("The red code for Alice is 48213. " * 20)
    question = "What is it?"
    whole = f"First.\n\n{path.read_text()}\n\n{question}"
    for lines in (
        [f"/file {path}", question, "/undo", question],
        [f"/file {path}", question, "/undo", "/undo", question],
        [f"/file {path}", question, "Why?", "/undo", "/undo", question],
        [f"/file {path}", question, f"/save {saved}", "/undo", f"/load {saved}", "/undo", question],
        [question, "/undo", f"/file {path}", question],
    ):
        chat, said = talk(embedded, lines, documents=["First."])
        assert chat.messages[0]["content"] == whole
        assert len(chat.messages) == 2
        assert "go with the next message" in said
    chat, said = talk(embedded, [question, "/reset", question], documents=["First."])
    assert chat.messages[0]["content"] == f"First.\n\n{question}"
    assert not [warning for warning in recwarn if "begins anew" in str(warning.message)]


def test_what_was_dropped_is_told_once(embedded: SpecStackGenerator) -> None:
    told: list[tuple[int, int]] = []
    rooms = "".join(f"The code of room {at} is {4 * at}.\n" for at in range(60))
    talk(
        embedded,
        ["What is the code of room 41?", "And now?"],
        {"max_tokens": 2, "sparse_prefill": "on", "keep_rate": 0.3},
        documents=[rooms],
        told=lambda *counts: told.append(counts),
    )
    assert told
    assert all(num_kept < num_tokens for num_kept, num_tokens in told)


@pytest.mark.parametrize(
    ("environment", "is_dim"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_a_terminal_without_escapes_gets_none(
    embedded: SpecStackGenerator, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_dim: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b" in talk(embedded, ["/quit"], out=Terminal())[1]) == is_dim


def test_closed_standard_streams_are_no_traceback() -> None:
    command = f"{sys.executable} -m spec_stack"
    for line, status in (
        ("chat <&-", 2),
        ("prune <&-", 2),
        ("chat --max-tokens 0 </dev/null 2>&-", 2),
        ("--version >&-", 0),
    ):
        run = subprocess.run(f"{command} {line}", shell=True, capture_output=True, text=True, timeout=300)
        assert run.returncode == status, run.stderr
        assert "Traceback" not in run.stderr
        assert run.stdout == ""
