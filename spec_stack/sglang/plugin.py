"""The entry point that SGLang calls in each process: version check, user plugins, hooks.

SGLang only logs a plugin's failure, so an unknown version ends the launch, and a scheduler checks the hooks.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from importlib.metadata import version

from spec_stack.settings.plugins import import_plugins
from spec_stack.sglang.server_args import ENVIRONMENT, NAME

logger = logging.getLogger(__name__)
ALLOW_UNTESTED = "SPEC_STACK_ALLOW_UNTESTED"
# Tested by `tests/serving` (docs/operations.md), up to the newest that pip installs; others are refused.
VERSIONS = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")


def register() -> None:
    """SGLang's entry point.

    Raises RuntimeError for an unsupported version and ImportError for a broken user plugin (SGLang logs both), and
    SystemExit where this launch uses the algorithm, or scores with another.
    """
    try:
        check_version()
        # Before the settings are read, which may name what they register.
        import_plugins()
    except (RuntimeError, ImportError) as error:
        if _is_requested():
            raise SystemExit(f"error: {error}") from error
        raise
    from spec_stack.sglang import hooks

    hooks.register()


def check_version() -> None:
    """Raise RuntimeError unless SGLang has a supported version, or a newer one is allowed."""
    installed = version("sglang")
    # A plus sign is followed by the build of the same source.
    if installed.partition("+")[0] in VERSIONS:
        return
    supported = f"{NAME} was made for SGLang {VERSIONS[0]} to {VERSIONS[-1]}, and this is {installed}"
    if _numbers(installed) < _numbers(VERSIONS[-1]):
        raise RuntimeError(f"{supported}; install one of those")
    if os.environ.get(ALLOW_UNTESTED) != "1":
        raise RuntimeError(f"{supported}; install one of those, or set {ALLOW_UNTESTED}=1 to try")
    logger.warning("%s, WHICH NO TEST HAS SEEN: %s=1 allows it if the self-test passes", supported, ALLOW_UNTESTED)


def _numbers(version_text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version_text)[:3]))


def _is_requested() -> bool:
    names = (argument.upper().removeprefix("--SPECULATIVE-ALGORITHM=") for argument in sys.argv)
    return any(name == NAME or name.startswith("--SPEC-STACK-") for name in names) or (
        "scoring_model" in os.environ.get(ENVIRONMENT, "")
    )
