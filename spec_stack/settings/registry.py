"""Open registries of policies and selection rules."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Registry(UserDict[str, str | Thing], Generic[Thing]):
    """Maps a name to an object, or to "module:attribute", imported on first use.

    `registry["mine"] = Mine` makes the name valid in configurations, the command line and the server. kind: the noun in
    messages ("policy"). known: the list of valid names in `spec_stack.config`, kept in sync. entries: the built-in
    ones.
    """

    def __init__(self, kind: str, known: list[str], entries: Mapping[str, str | Thing]) -> None:
        self.kind, self._known = kind, known
        super().__init__(entries)

    def __setitem__(self, name: str, entry: str | Thing) -> None:
        super().__setitem__(name, entry)
        if name not in self._known:
            self._known.append(name)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._known.remove(name)

    def find(self, name: object) -> Thing:
        """The named object. Raises ValueError for an unknown name, with the nearest one."""
        check_name(self.kind, name, self)
        entry = self[str(name)]
        if not isinstance(entry, str):
            return entry
        module, _, attribute = entry.partition(":")
        found: Thing = getattr(import_module(module), attribute)
        return found


def check_name(kind: str, name: object, known: Collection[str]) -> None:
    """Raise ValueError for an unknown name, with the nearest one."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {kind} {name!r}{nearest(name, known)}")


def nearest(wanted: object, known: Collection[str]) -> str:
    """The end of an error message: the nearest name, and all names."""
    near = get_close_matches(str(wanted).lower(), known, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{meant} known: {', '.join(known)}" if known else f"{meant} it has none"
