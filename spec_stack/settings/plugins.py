"""Modules of the user's own that register something, for processes in which nobody can import them by hand.

The command line, a server's processes and lm-evaluation-harness call this; in Python, `import mine` does it.
"""

from __future__ import annotations

import os
from importlib import import_module

ENVIRONMENT = "SPEC_STACK_PLUGINS"


def import_plugins() -> None:
    """Import the modules that the environment variable SPEC_STACK_PLUGINS names, with commas between them.

    Each puts its lines into the registries while it is imported. A second call imports nothing again.

    Raises
    ------
    ImportError
        Where one of them cannot be imported, whatever it raised; the message names it.
    """
    for name in filter(None, map(str.strip, os.environ.get(ENVIRONMENT, "").split(","))):
        try:
            import_module(name)
        # The module is the user's, so it may raise anything.
        except Exception as error:
            raise ImportError(f"{ENVIRONMENT} names {name!r}, which cannot be imported: {error!r}") from error
