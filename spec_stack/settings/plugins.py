"""User modules that register components, for processes that cannot import them explicitly: the command line and
servers. In Python use `import mine`."""

from __future__ import annotations

import os
from importlib import import_module

ENVIRONMENT = "SPEC_STACK_PLUGINS"


def import_plugins() -> None:
    """Import the comma-separated modules in the environment variable SPEC_STACK_PLUGINS. Modules register components on
    import, and later calls do nothing. Raises ImportError with the module's name for any failure."""
    for name in filter(None, map(str.strip, os.environ.get(ENVIRONMENT, "").split(","))):
        try:
            import_module(name)
        # A user's module may raise anything.
        except Exception as error:
            raise ImportError(f"{ENVIRONMENT} names {name!r}, which cannot be imported: {error!r}") from error
