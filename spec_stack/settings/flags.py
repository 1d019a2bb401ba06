"""Former flags of the command line and of SGLang's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class FormerFlag(argparse.Action):
    """Rejects a flag and names its replacement.

    instead: the flag and values that take its place.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, instead: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._instead = instead

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"there is no {option_string}: it is now {self._instead}")
