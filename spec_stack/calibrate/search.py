"""Calibration: one dense draft pass per prompt, from which every setting is judged. The target's weights are not
needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from time import monotonic
from typing import Any

from spec_stack.calibrate.choice import RATES, Case, Choice, choose, recall
from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.calibrate.judged import ScoredPrompt, draft_ids, judge
from spec_stack.calibrate.prompts import Prompt, PromptMaker, fitting, plan
from spec_stack.config import PrefillConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.architectures import text_config
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import num_shared
from spec_stack.prefill.calibration import Calibration, Point, describe_setting, fingerprint
from spec_stack.prefill.cost import Shape, counted_break_even
from spec_stack.prefill.shipped import sketch

# Shares of the budget for the shortest length, if there are others, and for the final choice.
_SHARE_OF_FIRST = 0.75
_RESERVE = 0.02
_NEVER = 1 << 30
Progress = Callable[[int, int, str], None]


def calibrate(
    pair: ModelPair,
    config: CalibrateConfig | None = None,
    *,
    documents: Sequence[str] = (),
    progress: Progress = lambda *_: None,
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

    Returns
    -------
    Calibration
        To save beside the draft, or to apply to a PrefillConfig. `unfinished` is the number of prompts left.

    Raises
    ------
    ValueError
        Without a tokenizer, and if no length fits the models.
    """
    started, config = monotonic(), config or CalibrateConfig()
    if pair.tokenizer is None:
        raise ValueError("calibration writes its prompts in words; give the pair a tokenizer")
    tasks = plan(fitting(pair, config.lengths), config.prompts)
    maker = PromptMaker(pair, documents, config.seed)
    index = pair.new_draft_cache(PrefillConfig.prefill_chunk)
    cases: list[Case] = []
    # By length, when its last prompt must have been judged.
    ends = {task.num_tokens: started + (1 - _RESERVE) * config.budget_s for task in tasks}
    if len(ends) > 1:
        ends[min(ends)] = started + _SHARE_OF_FIRST * (1 - _RESERVE) * config.budget_s
    pace = _Pace()
    for task in tasks:
        if task.num_tokens not in ends:
            continue
        prompt = maker.make(task)
        if monotonic() + pace.expected_s(task.num_tokens) >= ends[task.num_tokens]:
            del ends[task.num_tokens]
            continue
        cases.append(Case(task, pace.judge(pair, index, prompt)))
        progress(len(cases), len(tasks), f"{task.num_tokens} tokens, {task.kind}")
    made = _result(pair, cases, choose(cases, config.margin), config.margin)
    weights = sketch(pair.draft.get_input_embeddings().weight)
    return replace(made, weights=weights, seconds=monotonic() - started, unfinished=len(tasks) - len(cases))


@dataclass
class _Pace:
    """Seconds per token of the last pass over a whole document, and its tokens."""

    token_s: float = 0.0
    num_tokens: int = 1

    def expected_s(self, num_tokens: int) -> float:
        """Seconds for a prompt; attention grows with the length and is part of a pass."""
        return self.token_s * num_tokens * math.sqrt(max(1.0, num_tokens / self.num_tokens))

    def judge(self, pair: ModelPair, index: CachedModel, prompt: Prompt) -> ScoredPrompt:
        """Judge a prompt, and learn the speed from a document's first one."""
        begun, num_tokens = monotonic(), len(prompt.token_ids)
        is_new = num_tokens > 2 * num_shared(index.token_ids, draft_ids(prompt))
        judged = judge(pair, index, prompt)
        if is_new:
            self.token_s, self.num_tokens = (monotonic() - begun) / num_tokens, num_tokens
        return judged


def _result(pair: ModelPair, cases: Sequence[Case], choice: Choice, margin: float) -> Calibration:
    target, draft = (text_config(model.config) for model in (pair.target, pair.draft))
    settings, notes = dict(choice.settings), list(choice.notes)
    if settings:
        settings["min_prompt_tokens"] = _shortest(target, draft, PrefillConfig(**settings), cases, notes)
    setting = {"chosen": describe_setting(PrefillConfig(**settings)), "default": "default", "BM25": "BM25"}
    lengths = sorted({case.task.num_tokens for case in cases})
    by_length = {length: [at for at, case in enumerate(cases) if case.task.num_tokens == length] for length in lengths}
    kinds = {}
    for kind in dict.fromkeys([case.task.kind for case in cases] + [case.task.shape for case in cases]):
        own = [at for at, case in enumerate(cases) if kind in (case.task.kind, case.task.shape)]
        shares = {name: fmean(values[at] for at in own) for name, values in choice.recalls.items()}
        if shares:
            kinds[kind] = shares | {"prompts": len(own)}
    return Calibration(
        settings=settings,
        target=fingerprint(target),
        draft=fingerprint(draft),
        margin=margin,
        head_recall={f"{layer}.{head}": share for (layer, head), share in choice.head_recall.items()},
        kinds=kinds,
        points=[
            Point(setting[name], length, rate, recall([needs[at] for at in own], rate))
            for name, needs in choice.needs.items()
            for length, own in by_length.items()
            for rate in RATES
        ],
        notes=notes,
        num_prompts=len(cases),
    )


def _shortest(target: Any, draft: Any, config: PrefillConfig, cases: Sequence[Case], notes: list[str]) -> int:
    """The shortest prompt that is pruned: one that was tried, with an estimated gain."""
    tried = min(case.task.num_tokens for case in cases)
    try:
        even = counted_break_even(Shape.of(target), Shape.of(draft), config)
    except ValueError:
        return tried
    if not even:
        notes.append("Sparse prefill gains nothing at any length: the draft costs as much as it saves.")
    return max(even or _NEVER, tried)
