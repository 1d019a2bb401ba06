"""The entry point that SGLang calls in each process: version check, hooks, the algorithm.

SGLang only logs a plugin's failure, so an unknown version ends the launch, and the worker checks the hooks.
"""

from __future__ import annotations

import os
import sys

from spec_stack.settings.plugins import import_plugins
from spec_stack.sglang.server_args import ENVIRONMENT, NAME
from spec_stack.sglang.support import check_version


def register() -> None:
    """SGLang's entry point.

    Raises RuntimeError for an unsupported version and ImportError for a broken user plugin (SGLang logs both), and
    SystemExit where this launch uses the algorithm, or scores beside another.
    """
    try:
        check_version()
        # Before the settings are read, which may name what they register.
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
