"""Completes a server's settings by a calibration: the named one or the one of its draft. No SGLang import."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from spec_stack.prefill.shipped import choose_calibration, sketch_of_files
from spec_stack.sglang.server_args import NONE, ServerConfig
from spec_stack.sglang.support import NAME

logger = logging.getLogger(__name__)


def with_calibration(config: ServerConfig, draft: str, target_config: Any, draft_config: Any) -> ServerConfig:
    """The settings with calibrated values for those that have defaults.

    config.calibration names a file or folder, is "none", or None for the one beside the draft or shipped for it. Raises
    ValueError for a named one that does not fit these models; one beside the draft is skipped then, with a warning.
    """
    named = False if config.calibration == NONE else config.calibration
    configs = target_config, draft_config
    found, problem = choose_calibration(draft, named, configs, lambda: sketch_of_files(draft))
    if problem:
        logger.warning("%s: the calibration beside the draft is left aside: %s", NAME, problem)
    if found is None:
        return config
    logger.info("%s: prompts are pruned as calibrated by %s", NAME, found.origin)
    return replace(config, prefill=found.complete(config.prefill))
