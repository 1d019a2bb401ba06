"""Things by name, open to anybody: policies, proposers and selection rules are registered alike."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Registry(UserDict[str, str | Thing], Generic[Thing]):
    """Maps a name to a thing, or to the place "module:attribute" from which it is imported when it is first asked for.

    `registry["mine"] = Mine` is all it takes to add one; configurations, the command line and the server take the name
    from then on.

    Parameters
    ----------
    kind : str
        Names the things in messages: "policy".
    known : list of str
        The list of `spec_stack.config` that says which names a configuration takes. Kept equal to the keys.
    entries : mapping of str to thing or str
        Those of the package.
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
        """Return what a name stands for. Raises ValueError for an unknown one, naming the nearest."""
        check_name(self.kind, name, self)
        entry = self[str(name)]
        if not isinstance(entry, str):
            return entry
        module, _, attribute = entry.partition(":")
        found: Thing = getattr(import_module(module), attribute)
        return found


def check_name(kind: str, name: object, known: Collection[str]) -> None:
    """Raise ValueError where a name is none of the known ones; the message has the nearest."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {kind} {name!r}{nearest(name, known)}")


def nearest(wanted: object, known: Collection[str]) -> str:
    """Return the end of a message about a name that is not known: the nearest one, and all there are."""
    near = get_close_matches(str(wanted).lower(), known, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{meant} known: {', '.join(known)}" if known else f"{meant} it has none"
