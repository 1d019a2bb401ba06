"""A server's settings, completed by the calibration that lies beside its draft or is named. No SGLang here."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from spec_stack.prefill.shipped import choose_calibration, sketch_of_files
from spec_stack.sglang.server_args import NONE, ServerConfig
from spec_stack.sglang.support import NAME

logger = logging.getLogger(__name__)


def with_calibration(config: ServerConfig, draft: str, target_config: Any, draft_config: Any) -> ServerConfig:
    """The settings with what was calibrated where they have the defaults.

    Parameters
    ----------
    config
        Its `calibration` names a file or folder, is "none", or None for what lies beside the draft, or else ships for
        it.
    draft
        The draft's folder or hub id.
    target_config, draft_config
        The transformers text configurations.

    Raises
    ------
    ValueError
        For one that is named and does not hold for these models. One that lies beside the draft is
        left aside then, and the log says why.
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
