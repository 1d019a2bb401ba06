"""Scripts that nothing else runs must at least fit the package that they measure."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "experiments").glob("*/*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_a_script_finds_all_that_it_imports(path: Path) -> None:
    importlib.import_module(".".join(path.with_suffix("").parts))
