"""The entry point that SGLang calls in each of its processes: version, hooks, the algorithm.

SGLang logs a plugin's failure and serves on without it, and nothing here may pass silently. So an unknown version ends
a launch that asks for the algorithm, and the worker refuses to start where a hook is not in place.
"""

from __future__ import annotations

import os
import sys

from spec_stack.settings.plugins import import_plugins
from spec_stack.sglang.server_args import ENVIRONMENT
from spec_stack.sglang.support import NAME, check_version


def register() -> None:
    """SGLang's entry point. Raises RuntimeError for a version the hooks were not made for and ImportError for a plugin
    of the user's that cannot be imported (SGLang logs both), and SystemExit where this very launch asks for the
    algorithm, or for scores beside another."""
    try:
        check_version()
        # Before anything reads the settings, which may name what they register.
        import_plugins()
    except (RuntimeError, ImportError) as error:
        if _is_asked_for():
            raise SystemExit(f"error: {error}") from error
        raise
    from spec_stack.sglang import algorithm, hooks

    algorithm.register()
    hooks.register()


def _is_asked_for() -> bool:
    names = (argument.upper().removeprefix("--SPECULATIVE-ALGORITHM=") for argument in sys.argv)
    return any(name == NAME or name.startswith("--SPEC-STACK-") for name in names) or (
        "scoring_model" in os.environ.get(ENVIRONMENT, "")
    )
