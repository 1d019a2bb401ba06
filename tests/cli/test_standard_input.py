"""A prompt on standard input: pipes and named pipes are read to their end, and a silent one is named."""

from __future__ import annotations

import argparse
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from spec_stack.cli import arguments as module
from spec_stack.cli.arguments import build_parser, read_prompt


def parsed(*told: str) -> argparse.Namespace:
    return build_parser().parse_args(["generate", *told])


@pytest.fixture(params=["pipe", "fifo"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A reading and a writing end."""
    if request.param == "pipe":
        yield os.pipe()
        return
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(path, os.O_WRONLY)
    os.set_blocking(reading, True)
    yield reading, writing


@pytest.mark.parametrize("is_late", [False, True])
def test_what_comes_is_read_to_its_end_and_a_silent_pipe_is_named(
    ends: tuple[int, int], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENT_S", 0.05)
    monkeypatch.setattr("sys.stderr", said := io.StringIO())
    reading, writing = ends

    def write() -> None:
        end = monotonic() + 30
        while is_late and "waiting for standard input" not in said.getvalue() and monotonic() < end:
            sleep(0.01)
        for part in (b"first ", b"second"):
            os.write(writing, part)
        os.close(writing)

    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        writer = threading.Thread(target=write)
        writer.start()
        if not is_late:
            writer.join()
        assert read_prompt(parsed()) == "first second"
        writer.join()
    assert ("waiting for standard input" in said.getvalue()) == is_late


def test_a_pipe_comes_before_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"The document.")
    os.close(writing)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert read_prompt(parsed("The question?")) == "The document.\n\nThe question?"


def test_what_is_no_pipe_and_no_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert read_prompt(parsed("The question?")) == "The question?"


@pytest.mark.parametrize(
    ("told", "prompt"),
    [
        (["-"], "Why?\n"),
        (["--file", "FILE", "-"], "a document\n\nWhy?\n"),
        (["--file", "-", "Who?"], "Why?\n\n\nWho?"),
        (["--file", "FILE", "Who?"], "a document\n\nWho?"),
        (["--file", "FILE"], "a document"),
        (["--file", "-", "-"], "Why?\n"),
    ],
)
def test_a_dash_is_standard_input_behind_a_file_too(
    told: list[str], prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_text("a document")
    monkeypatch.setattr("sys.stdin", io.StringIO("Why?\n"))
    given = [str(tmp_path / "a file") if each == "FILE" else each for each in told]
    assert read_prompt(parsed(*given)) == prompt
    if len(given) == 3 and "-" in given:
        monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
        with pytest.raises(ValueError, match="standard input is empty; leave - out"):
            read_prompt(parsed(*given))
