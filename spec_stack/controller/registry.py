"""The policies by name. Importing this loads none of them: each is imported when it is first made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from spec_stack.controller.base import Policy

POLICIES: dict[str, str | type[Policy]] = {
    "throughput": "spec_stack.controller.throughput:Throughput",
    "fixed": "spec_stack.controller.fixed:Fixed",
    "confidence": "spec_stack.controller.confidence:Confidence",
    "heuristic": "spec_stack.controller.heuristic:Heuristic",
    "ema": "spec_stack.controller.ema:Ema",
    "speckv": "spec_stack.controller.speckv:SpecKV",
}
"""name -> "module:Class" or the class itself, for Python and the command line. An entry more is a policy more."""
BATCH_POLICIES: dict[str, str | type[Policy]] = {
    "throughput": "spec_stack.controller.batch_throughput:BatchThroughput",
    "speckv": "spec_stack.controller.batch_speckv:BatchSpecKV",
    "confidence": "spec_stack.controller.batch_confidence:BatchConfidence",
    "ema": POLICIES["ema"],
    "heuristic": POLICIES["heuristic"],
    "fixed": POLICIES["fixed"],
}
"""The same for a server, where one gamma holds for a whole batch and is set before anything is drafted."""
POLICY_NAMES = tuple(POLICIES)
BATCH_POLICY_NAMES = tuple(BATCH_POLICIES)
CLOCK_POLICY_NAMES = ("throughput", "speckv")
"""Policies that decide by measured time, so that no two runs decide alike."""


def make_policy(name: str, **options: Any) -> Policy:
    """Build a policy by name.

    Parameters
    ----------
    name : str
        One of POLICIES.
    **options
        The fields of its class: make_policy("fixed", gamma=4).

    Raises
    ------
    ValueError
        For an unknown name or option (naming the nearest and the known ones) and for a bad value.
    """
    return _make(POLICIES, name, options)


def make_batch_policy(name: str, **options: Any) -> Policy:
    """Build a policy for a server's batches by name, one of BATCH_POLICIES; else as `make_policy`."""
    return _make(BATCH_POLICIES, name, options)


def check_policy(name: object) -> None:
    """Raise ValueError where no policy has this name; the message has the nearest and the known ones."""
    _check(POLICIES, name)


def policy_class(name: str) -> type[Policy]:
    """The class of a policy of POLICIES. Raises ValueError for an unknown name, naming the nearest."""
    return _find(POLICIES, name)


def _check(policies: Mapping[str, str | type[Policy]], name: object) -> None:
    if not isinstance(name, str) or name not in policies:
        raise ValueError(f"unknown policy {name!r}{_nearest(name, list(policies))}")


def _find(policies: Mapping[str, str | type[Policy]], name: str) -> type[Policy]:
    _check(policies, name)
    return _load(policies[name])


def _make(policies: Mapping[str, str | type[Policy]], name: str, options: dict[str, Any]) -> Policy:
    found = _find(policies, name)
    known: list[str] = [entry.name for entry in fields(found) if entry.init] if is_dataclass(found) else []
    for option in options:
        if option not in known:
            raise ValueError(f"policy {name!r} has no option {option!r}{_nearest(option, known)}")
    try:
        return found(**options)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"policy {name!r} cannot be built from {options}: {error}") from error


def _load(entry: str | type[Policy]) -> type[Policy]:
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        entry = getattr(import_module(module), name)
    if not (isinstance(entry, type) and issubclass(entry, Policy)):
        raise ValueError(f"the registry holds {entry!r}, which is no policy class; write `class Mine(Policy)`")
    return entry


def _nearest(wanted: object, known: list[str]) -> str:
    near = get_close_matches(str(wanted).lower(), known, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{meant} known: {', '.join(known)}" if known else f"{meant} it has none"
