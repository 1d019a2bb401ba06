"""The largest `max_dropped_attention` of a pair under which no more answers are lost than a bound allows. The target
runs.

Lost is an answer that is right when dense and wrong when pruned; where no answer is known, or the dense one is wrong, a
loss of more than `LOST_NATS` a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from spec_stack.binomial import num_needed, upper_bound
from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.calibrate.prompts import PromptMaker, fitting, plan
from spec_stack.config import SpecStackConfig
from spec_stack.engine.engine import Engine, PrefilledPrompt, token_logprobs
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.request import Call
from spec_stack.prefill.calibration import Calibration
from spec_stack.prefill.check import rates_to_try
from spec_stack.settings.checks import require

LOST_NATS = 0.3
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8)
"""From strict to loose; the first whose bound fails ends the search, so that the bound holds after it."""
_ANSWER_TOKENS = 20
Question = tuple[Call, Sequence[str]]
"""A prompt, and what a right answer holds; empty where that is not known."""


@dataclass(frozen=True)
class Rung:
    """A keep rate of a prompt: the attention that is dropped, and whether the target's answer was lost."""

    dropped_attention: float
    is_lost: bool


@dataclass(frozen=True)
class Bound:
    """What was found. max_dropped_attention: None where no threshold keeps the bound. num_lost, num_pruned: of
    num_prompts, under it, or under the strictest one."""

    max_dropped_attention: float | None
    max_loss: float
    num_prompts: int
    num_lost: int
    num_pruned: int

    def told(self) -> str:
        """The result in a sentence or two."""
        most, n = f"{self.max_loss:.3g}", self.num_prompts
        high = f"{upper_bound(self.num_lost, n):.3f}"
        found = f"{self.num_lost} of {n} prompts were lost, at most {high} (95 %), and {self.num_pruned} were pruned"
        if self.max_dropped_attention is not None:
            return f"max_dropped_attention {self.max_dropped_attention} keeps lost answers under {most}: {found}."
        needed = f"{num_needed(self.max_loss)} prompts without a loss would be needed"
        return f"No max_dropped_attention keeps lost answers under {most}: at {THRESHOLDS[0]}, {found}; {needed}."


def check_share(max_loss: float) -> None:
    """Raise ValueError for a bound that is no share."""
    require(0 < max_loss < 1, f"max_loss must be a share, over 0 and under 1, got {max_loss}")


def built_in(pair: ModelPair, config: CalibrateConfig, documents: Sequence[str]) -> Iterable[Question]:
    """The calibration's prompts of the shortest length, which hide facts, in other documents than it has chosen by."""
    maker = PromptMaker(pair, documents, config.seed + 1)
    for task in plan(fitting(pair, config.lengths)[:1], config.prompts):
        yield Call(input_ids=maker.make(task).token_ids), ()


def rungs_of(engine: Engine, question: Question) -> list[Rung]:
    """What a prompt loses at every keep rate that the check may try."""
    call, answers = question
    dense = PrefilledPrompt(engine, Call(**{**call, "sparse_prefill": "off"}))
    answer = dense.greedy(_ANSWER_TOKENS)
    own = token_logprobs(dense.logits(answer), answer).mean()
    is_right = _is_right(engine, answer, answers)
    rungs: list[Rung] = []
    for rate in rates_to_try(engine.config.prefill, len(dense.request.prompt_ids)):
        options: Any = {"sparse_prefill": "on", "keep_rate": rate, "max_dropped_attention": 1.0}
        pruned = PrefilledPrompt(engine, Call(**{**call, **options}))
        if not pruned.selection.tried:
            return [*rungs, Rung(0.0, False)]
        if is_right:
            is_lost = not _is_right(engine, pruned.greedy(_ANSWER_TOKENS), answers)
        else:
            is_lost = float(own - token_logprobs(pruned.logits(answer), answer).mean()) > LOST_NATS
        rungs.append(Rung(pruned.selection.tried[0].dropped_attention, is_lost))
    return rungs


def _is_right(engine: Engine, answer: Sequence[int], answers: Sequence[str]) -> bool:
    if not answers:
        return False
    text = engine.pair.tokenizer.decode(answer, skip_special_tokens=True).lower()
    return all(each.lower() in text for each in answers)


def find_bound(prompts: Sequence[Sequence[Rung]], max_loss: float) -> Bound:
    """The loosest threshold before the first whose upper bound of lost prompts is over max_loss."""
    found: Bound | None = None
    for threshold in THRESHOLDS:
        kept = [next((rung for rung in rungs if rung.dropped_attention <= threshold), None) for rungs in prompts]
        num_lost = sum(rung is not None and rung.is_lost for rung in kept)
        num_pruned = sum(rung is not None for rung in kept)
        if upper_bound(num_lost, len(prompts)) > max_loss:
            return found or Bound(None, max_loss, len(prompts), num_lost, num_pruned)
        found = Bound(threshold, max_loss, len(prompts), num_lost, num_pruned)
    if found is None:
        raise ValueError("there is no prompt to find a bound by")
    return found


def with_bound(
    calibration: Calibration,
    pair: ModelPair,
    questions: Iterable[Question],
    max_loss: float,
    budget_s: float,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Calibration:
    """A calibration with the pair's max_dropped_attention, where one keeps the bound, and a note that says what was
    found.

    Raises ValueError where the budget leaves no time for a prompt.
    """
    prefill = replace(calibration.apply(), max_dropped_attention=1.0)
    engine, until = Engine(pair, SpecStackConfig(prefill)), monotonic() + budget_s
    prompts: list[list[Rung]] = []
    listed = list(questions)
    for each in listed:
        if monotonic() > until:
            break
        prompts.append(rungs_of(engine, each))
        progress(len(prompts), len(listed), f"lost at each rate: {[rung.is_lost for rung in prompts[-1]]}")
    bound = find_bound(prompts, max_loss)
    settings = dict(calibration.settings)
    if bound.max_dropped_attention is not None:
        settings["max_dropped_attention"] = bound.max_dropped_attention
    return replace(calibration, settings=settings, notes=[*calibration.notes, bound.told()])
