"""Long texts present on every machine: standard-library source code and its manuals."""

from __future__ import annotations

import importlib.util
from pathlib import Path

MODULES = (
    "argparse",
    "tarfile",
    "typing",
    "inspect",
    "zipfile",
    "subprocess",
    "doctest",
    "turtle",
    "pickletools",
    "ast",
)


def module_source(module: str) -> str:
    """A standard-library module's source, without importing it. Raises ValueError if it has none."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ValueError(f"this Python has no source for the module {module!r}")
    return Path(spec.origin).read_text(encoding="utf-8")


def default_documents() -> list[str]:
    """Standard-library texts, half source code and half English manuals."""
    sources = [module_source(module) for module in MODULES]
    from pydoc_data.topics import topics

    manual = "\n\n".join(topics.values())
    size = len(manual) // len(sources)
    return sources + [manual[at * size : (at + 1) * size] for at in range(len(sources))]
