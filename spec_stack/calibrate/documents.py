"""Long texts that every machine has: the source of the standard library, and the manuals' English."""

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
    """The source of a standard-library module, found without importing it. Raises ValueError where there is none."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ValueError(f"this Python has no source for the module {module!r}")
    return Path(spec.origin).read_text(encoding="utf-8")


def default_documents() -> list[str]:
    """Texts of the standard library in two equal halves: source code, and the manuals' English."""
    sources = [module_source(module) for module in MODULES]
    from pydoc_data.topics import topics

    manual = "\n\n".join(topics.values())
    size = len(manual) // len(sources)
    return sources + [manual[at * size : (at + 1) * size] for at in range(len(sources))]
