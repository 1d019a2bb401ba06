"""Model folders to change at will."""

from __future__ import annotations

import shutil
from pathlib import Path

from spec_stack.hf.loading import ASSETS
from spec_stack.prefill.calibration import FILE_NAME

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def copy_draft(to: Path) -> None:
    """Make a folder of the embedded draft with a tokenizer of its own; the embedded one has its target's."""
    # Its calibration is of the embedded pair.
    shutil.copytree(ASSETS / "draft", to, ignore=shutil.ignore_patterns(FILE_NAME))
    for name in TOKENIZER_FILES:
        shutil.copyfile(ASSETS / "target" / name, to / name)
