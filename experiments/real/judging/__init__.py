"""The prompts that judge selection: `all_prompts`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from experiments.real.evidence_prompts import Measure
from experiments.real.judging import agents, requests
from experiments.real.judging.documents import Texts
from experiments.real.judging.prompt import JudgingPrompt

_SEED = 1
# Generators, and how many documents each makes, in units of its own.
_FAMILIES = (
    (requests.requests, 1),
    (requests.in_languages, 1),
    (requests.unasked, 2),
    (agents.loops, 2),
    (agents.newest, 1),
    (agents.own_plans, 2),
    (agents.recorded, 2),
)


def all_prompts(folder: Path, num_tokens: int, measure: Measure) -> list[JudgingPrompt]:
    """The prompts of about num_tokens, always the same, the families mixed so that a part of a run is balanced."""
    texts = Texts(folder, _SEED)
    found: list[tuple[float, list[JudgingPrompt]]] = []
    for make, size in _FAMILIES:
        made = make(texts, size, num_tokens, measure)
        groups = [list(group) for _, group in groupby(made, key=lambda prompt: prompt.group)]
        found += [(at / len(groups), group) for at, group in enumerate(groups)]
    return [prompt for _, group in sorted(found, key=lambda each: each[0]) for prompt in group]
