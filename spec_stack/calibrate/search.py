"""Calibration: one dense draft pass per prompt, from which every setting is judged. The target's weights are not
needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from spec_stack.calibrate.choice import Case, TooFewPromptsError, choose
from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.calibrate.judged import judge
from spec_stack.calibrate.prompts import PromptMaker, fitting, plan
from spec_stack.config import PrefillConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.architectures import text_config
from spec_stack.prefill.calibration import Calibration, describe_setting, fingerprint
from spec_stack.prefill.cost import Shape, counted_break_even
from spec_stack.prefill.shipped import sketch

# Share of the budget for the shortest length, if there are others.
_SHARE_OF_FIRST = 0.75
_NEVER = 1 << 30
Progress = Callable[[int, int, str], None]
QUICK = CalibrateConfig(lengths=(1024,), prompts=24)
"""Few short prompts, for heads alone: `experiments/LOG.md`, "Calibration at load"."""

logger = logging.getLogger(__name__)


def calibrate(
    pair: ModelPair,
    config: CalibrateConfig | None = None,
    *,
    documents: Sequence[str] = (),
    progress: Progress = lambda *_: None,
    chooses_rates: bool = True,
) -> Calibration:
    """Choose how this pair prefills sparsely.

    Parameters
    ----------
    pair
        A pair with a tokenizer. Only its target's configuration is used (`ModelPair.load(..., target_weights=False)`).
    config : CalibrateConfig, optional
        Lengths and number of prompts, margin, budget and seed. Lengths over the models' limit are replaced by one that
        just fits.
    documents
        Texts to hide needles in, ideally the user's own; by default the standard library's source code and manuals.
    progress
        Called with the number of judged prompts, their total, and the last one's length and kind.
    chooses_rates
        False chooses heads alone.

    Returns
    -------
    Calibration
        To save beside the draft, or to apply to a PrefillConfig. `unfinished` is the number of prompts left.

    Raises
    ------
    ValueError
        Without a tokenizer, if no length fits the models, and if too few prompts were judged when the time was over.
    """
    started, config = monotonic(), config or CalibrateConfig()
    if pair.tokenizer is None:
        raise ValueError("calibration writes its prompts in words; give the pair a tokenizer")
    tasks = plan(fitting(pair, config.lengths), config.prompts)
    maker = PromptMaker(pair, documents, config.seed)
    draft_cache = pair.new_draft_cache(PrefillConfig.prefill_chunk)
    cases: list[Case] = []
    # By length, from when on no prompt starts.
    ends = {task.num_tokens: started + config.budget_s for task in tasks}
    if len(ends) > 1:
        ends[min(ends)] = started + _SHARE_OF_FIRST * config.budget_s
    for task in tasks:
        if monotonic() >= ends[task.num_tokens]:
            continue
        cases.append(Case(task, judge(pair, draft_cache, maker.make(task))))
        progress(len(cases), len(tasks), f"{task.num_tokens} tokens, {task.kind}")
    choice = choose(cases, config.margin, chooses_rates)
    settings, notes = dict(choice.settings), list(choice.notes)
    target, draft = (text_config(model.config) for model in (pair.target, pair.draft))
    if settings:
        settings["min_prompt_tokens"] = _shortest(target, draft, PrefillConfig(**settings), cases, notes)
    return Calibration(
        settings=settings,
        target=fingerprint(target),
        draft=fingerprint(draft),
        margin=config.margin,
        weights=sketch(pair.draft.get_input_embeddings().weight),
        notes=notes,
        seconds=monotonic() - started,
        num_prompts=len(cases),
        unfinished=len(tasks) - len(cases),
    )


def _shortest(target: Any, draft: Any, config: PrefillConfig, cases: Sequence[Case], notes: list[str]) -> int:
    """The shortest prompt that is pruned: one that was tried, with an estimated gain."""
    tried = min(case.task.num_tokens for case in cases)
    try:
        even = counted_break_even(Shape.of(target), Shape.of(draft), config)
    except ValueError:
        return tried
    if not even:
        notes.insert(0, "Sparse prefill gains nothing at any length: the draft costs as much as it saves.")
    return max(even or _NEVER, tried)


def calibrate_heads(
    pair: ModelPair,
    config: CalibrateConfig = QUICK,
    *,
    documents: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Choose a draft's scoring heads, for any target; keep rates stay. Arguments and errors: see `calibrate`."""
    # So few prompts choose no keep rate.
    found = calibrate(pair, config, documents=documents, progress=progress, chooses_rates=False)
    settings = {name: value for name, value in found.settings.items() if name != "min_prompt_tokens"}
    return replace(found, settings=settings, target={})


def calibrate_at_load(pair: ModelPair, file: Path) -> Calibration | None:
    """`calibrate_heads`, saved to `file`, for the next load; None where the time was too short. The log says so."""
    logger.warning("this draft has no calibration: 24 short prompts find its scoring heads, once, for %s", file)
    try:
        found = calibrate_heads(pair)
    except TooFewPromptsError as error:
        logger.warning("not calibrated; the next load tries again: %s", error)
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        found.save(file)
    except OSError as error:
        logger.warning("the calibration could not be saved, and is found again at the next load: %s", error)
    logger.warning("calibrated in %.0f s: %s", found.seconds, found.notes[-1])
    return replace(found, origin=file.name)


def format_calibration(calibration: Calibration) -> str:
    """The choice and its reasons, for a terminal."""
    config = calibration.apply()
    lines = [f"chosen: {describe_setting(config)}"]
    if config.scoring_heads:
        named = ", ".join(f"{layer}.{head}" for layer, head in config.scoring_heads)
        lines.append(f"heads (layer.head): {named}; {1 + max(layer for layer, _ in config.scoring_heads)} layers run")
    lines.append(f"prompts from {config.min_prompt_tokens} tokens on are pruned")
    if calibration.unfinished:
        lines.append(f"{calibration.num_prompts} prompts were judged; {calibration.unfinished} are left.")
    return "\n".join([*lines, *calibration.notes])
