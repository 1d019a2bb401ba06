"""Texts that neither the demo nor calibration takes."""

from __future__ import annotations

from pathlib import Path

from spec_stack.calibrate.documents import module_source
from spec_stack.cli.arguments import read_documents

MODULES = ("smtplib", "optparse", "mailbox", "difflib", "locale", "uuid", "configparser", "statistics")


def read_texts(folder: Path | None) -> list[str]:
    """Read the texts of a folder, of none the source of the modules. Raises ValueError where a folder holds no text."""
    return read_documents(folder) or [module_source(module) for module in MODULES]
