"""The entry point that SGLang calls in each of its processes: version, hooks, the algorithm.

SGLang logs a plugin's failure and serves on without it, and nothing here may pass silently. So an unknown version ends
a launch that asks for the algorithm, and the worker refuses to start where a hook is not in place.
"""

from __future__ import annotations

import sys

from spec_stack.settings.plugins import import_plugins
from spec_stack.sglang.support import NAME, check_version


def register() -> None:
    """SGLang's entry point. Raises RuntimeError for a version the hooks were not made for and ImportError for a plugin
    of the user's that cannot be imported (SGLang logs both), and SystemExit where this very launch asks for the
    algorithm."""
    try:
        check_version()
        # Before anything reads the settings, which may name what they register.
        import_plugins()
    except (RuntimeError, ImportError) as error:
        if any(argument.upper().removeprefix("--SPECULATIVE-ALGORITHM=") == NAME for argument in sys.argv):
            raise SystemExit(f"error: {error}") from error
        raise
    from spec_stack.sglang import algorithm, hooks

    algorithm.register()
    hooks.register()
