"""Help fits one screen, and what is misspelt is named."""

from __future__ import annotations

import json

import pytest

from spec_stack.cli.main import COMMANDS, main

# Rows and columns of an ordinary terminal window.
ROWS, COLUMNS = 50, 80
SHORT = ("generate", "chat", "serve", "explain")


def help_of(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([command, flag])
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


@pytest.mark.parametrize("command", SHORT)
def test_the_usual_flags_fit_one_screen_and_all_of_them_are_a_flag_away(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = help_of(command, "--help", capsys), help_of(command, "--help-all", capsys)
    assert short.count("\n") <= ROWS
    usual = {word for word in short.split() if word.startswith("--")}
    every = {word for word in whole.split() if word.startswith("--")}
    assert {"--target", "--keep-rate", "--help-all"} <= usual < every
    assert {"--draft-sinks", "--head-reduction"} <= every - usual
    for title in ("models:", "pruning:", "drafting:"):
        assert title in short
        assert title in whole


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(command, "-h", capsys).startswith(f"usage: spec-stack {command}")


@pytest.mark.parametrize(
    ("flag", "meant"), [("--keep-rat=0.1", "--keep-rate"), ("--max-token", "--max-tokens"), ("--sed", "--seed")]
)
def test_a_misspelt_flag_is_named_with_the_nearest(flag: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "x", flag])
    assert f"unrecognized arguments: {flag}; did you mean {meant}?" in capsys.readouterr().err


def test_dashes_make_no_flag_near_another(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["prune", "--file=notes.txt"])
    assert "did you mean" not in capsys.readouterr().err


def test_a_misspelt_command_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generat", "x"]) == 2
    assert "unknown command 'generat'; did you mean 'generate'?" in capsys.readouterr().err


def test_the_doctors_verdict_comes_first_and_no_dict_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "the pair fits together"
    assert not [line for line in rest if "{" in line]
    assert main(["doctor", "--precision", "int3"]) == 1
    assert capsys.readouterr().out.startswith("problem: unknown precision")
    assert main(["doctor", "--json", "--precision", "int3"]) == 1
    assert "unknown precision" in json.loads(capsys.readouterr().out)["problem"]


def test_the_embedded_pair_says_that_it_answers(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--raw", "def main():", "--max-tokens", "2"]
    assert main(command) == 0
    assert "the embedded test pair answers" in capsys.readouterr().err
    assert main([*command, "--quiet"]) == 0
    assert "embedded" not in capsys.readouterr().err
