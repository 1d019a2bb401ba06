"""Parameters of which `make test` runs some, and the night all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def others_nightly(values: Iterable[Any], usual: Iterable[Any]) -> list[Any]:
    """The values; those that are not among the usual ones are marked `nightly`. A tuple is several parameters."""
    kept = list(usual)
    return [value if value in kept else _nightly(value) for value in values]


def _nightly(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)
