"""A TOML file of a command's flags."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_NOT_IN_FILES = ("help", "help-all", "config")


def flags_in(path: Path, actions: Iterable[argparse.Action], given: Collection[str]) -> list[str]:
    """The file's entries as flags, without those that are given. Raises ValueError for what is no entry of the command,
    or has another form, and OSError."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    named = {action.option_strings[0].removeprefix("--"): action for action in actions if action.option_strings}
    known = {name: action for name, action in named.items() if name not in _NOT_IN_FILES}
    flags: list[str] = []
    for key, value in entries.items():
        name = key.replace("_", "-")
        if name != key and name in entries:
            raise ValueError(f"{path}: {name} and {key} are one key; leave one of them out")
        if name not in known:
            near = get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]}?" if near else "its keys are the command's flags"
            raise ValueError(f"{path}: unknown key {key!r}; {meant}")
        if not {*known[name].option_strings} & {*given}:
            flags += _flags(known[name], value, f"{path}: {key}")
    return flags


def _flags(action: argparse.Action, value: Any, where: str) -> list[str]:
    """One entry as flags."""
    flag, is_switch = action.option_strings[0], action.nargs == 0
    if is_switch != isinstance(value, bool):
        raise ValueError(f"{where} must be {'true or false' if is_switch else 'a value'}, got {value!r}")
    if is_switch:
        # The second string of a switch that is on by default is its --no-….
        return [flag] if value else [*action.option_strings[1:]]
    values = value if isinstance(value, list) else [value]
    takes_many = action.nargs == "+" or isinstance(action, argparse._AppendAction)
    if (isinstance(value, list) and not takes_many) or any(isinstance(each, list | dict | bool) for each in values):
        raise ValueError(f"{where} must be {'a list of values' if takes_many else 'one value'}, got {value!r}")
    return [flag, *map(str, values)] if action.nargs == "+" else [f"{flag}={each}" for each in values]
