"""Configuration fields: their meaning, and a record of the given ones."""

from __future__ import annotations

import math
from dataclasses import Field, field, fields
from functools import wraps
from itertools import takewhile
from typing import Any, TypeVar

Value = TypeVar("Value")
Config = TypeVar("Config", bound=type)


def option(default: Value, help: str, least: int | None = None, most: float = math.inf, hint: str = "") -> Value:
    """A dataclass field with its meaning, for `meaning`. least, most, hint: the range of whole numbers, for
    `checks.check_fields`."""
    bounds = {} if least is None else {"bounds": (least, most, hint)}
    return field(default=default, metadata={"help": help, **bounds})


def meaning(config: type, name: str) -> str:
    """A field's meaning. Raises KeyError for an unknown field."""
    known: dict[str, Field[Any]] = {entry.name: entry for entry in fields(config)}
    return str(known[name].metadata["help"])


def documented(config: Config) -> Config:
    """Add a "Parameters" section generated from the fields to a configuration's docstring."""
    rows = [
        f"{entry.name} : {entry.type}, default {entry.default!r}\n        {entry.metadata['help']}"
        for entry in fields(config)
        if "help" in entry.metadata
    ]
    config.__doc__ = "\n    ".join([(config.__doc__ or "").rstrip() + "\n", "Parameters", "----------", *rows, ""])
    return config


def remembers_given(config: Config) -> Config:
    """Record in `given` the fields that were passed to a configuration. A passed value overrides a calibration even if
    it equals the default. `dataclasses.replace` keeps and extends `given`."""
    names = {entry.name for entry in fields(config)} - {"given"}
    positional = [entry.name for entry in fields(config) if not entry.kw_only]
    make = config.__init__  # type: ignore[misc]

    @wraps(make)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        known = kwargs.get("given", ())
        if not isinstance(known, tuple) or not set(known) <= names:
            raise ValueError(f"given is found out, not set; leave it out, got {known!r}")
        make(self, *args, **kwargs)
        # `replace` passes its changes first, then the other fields in order, of which `given` is the first.
        named = takewhile(lambda name: name != "given", kwargs)
        given = dict.fromkeys([*self.given, *positional[: len(args)], *named])
        object.__setattr__(self, "given", tuple(given))

    config.__init__ = remember  # type: ignore[misc]
    return config
