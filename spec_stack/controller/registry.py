"""The policies by name; each module is imported when its policy is first made."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from spec_stack.config import KNOWN_POLICIES
from spec_stack.controller.base import Policy
from spec_stack.settings.registry import Registry, nearest

POLICIES: Registry[type[Policy]] = Registry(
    "policy",
    KNOWN_POLICIES,
    {
        "throughput": "spec_stack.controller.throughput:Throughput",
        "fixed": "spec_stack.controller.simple:Fixed",
        "confidence": "spec_stack.controller.simple:Confidence",
        "heuristic": "spec_stack.controller.simple:Heuristic",
        "ema": "spec_stack.controller.simple:Ema",
        "speckv": "spec_stack.controller.speckv:SpecKV",
    },
)
"""name -> "module:Class" or the class itself, for Python and the command line. An entry more is a policy more."""
BATCH_POLICIES: Registry[type[Policy]] = Registry(
    "batch policy",
    [],
    {
        "throughput": "spec_stack.controller.batch:BatchThroughput",
        "ema": "spec_stack.controller.simple:Ema",
        "heuristic": "spec_stack.controller.simple:Heuristic",
        "fixed": "spec_stack.controller.simple:Fixed",
    },
)
"""The same for a server, where one gamma holds for a whole batch and is set before anything is drafted."""
CLOCK_POLICY_NAMES = ("throughput", "speckv")
"""Policies that decide by measured time, so that no two runs decide alike."""


def make_policy(name: str, **options: Any) -> Policy:
    """Build a policy of POLICIES by name; options are its fields: make_policy("fixed", gamma=4).

    Raises ValueError for an unknown name or option (naming the nearest and the known ones) and for a bad value.
    """
    return _make(POLICIES, name, options)


def make_batch_policy(name: str, **options: Any) -> Policy:
    """As `make_policy`, for a server's batches: one of BATCH_POLICIES."""
    return _make(BATCH_POLICIES, name, options)


def _make(policies: Registry[type[Policy]], name: str, options: dict[str, Any]) -> Policy:
    found = policies.find(name)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(f"the registry holds {found!r}, which is no policy class; write `class Mine(Policy)`")
    known: list[str] = [entry.name for entry in fields(found) if entry.init] if is_dataclass(found) else []
    for option in options:
        if option not in known:
            raise ValueError(f"policy {name!r} has no option {option!r}{nearest(option, known)}")
    try:
        return found(**options)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"policy {name!r} cannot be built from {options}: {error}") from error
