"""Texts that neither the demo nor calibration takes."""

from __future__ import annotations

from pathlib import Path

from spec_stack.calibrate.documents import module_source

MODULES = ("smtplib", "optparse", "mailbox", "difflib", "locale", "uuid", "configparser", "statistics")


def read_texts(folder: Path | None) -> list[str]:
    """Read the texts of a folder, of none the source of the modules. Raises ValueError where a folder holds no text."""
    if folder is None:
        return [module_source(module) for module in MODULES]
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md", ".py", ".rst"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    if not texts:
        raise ValueError(f"{folder} holds no .txt, .md, .rst or .py file")
    return texts
