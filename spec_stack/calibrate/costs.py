"""Time the parts of a first token on this machine, and tell how far a calibration is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from spec_stack.config import PrefillConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.architectures import text_config
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.calibration import describe_setting

Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, what: str) -> None:
    """No progress."""


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a first token, as functions of the number of tokens.

    Attributes
    ----------
    target
        Prefill of so many tokens in a row.
    draft
        Prefill of so many, by (window, number of layers).
    step_s
        One look-ahead token.
    """

    target: Callable[[float], float]
    draft: Mapping[tuple[int | None, int | None], Callable[[float], float]]
    step_s: float

    def ttft(self, config: PrefillConfig, num_tokens: int, keep_rate: float) -> float:
        """Seconds to the first token of a prompt."""
        kept = keep_rate * num_tokens
        look_ahead = self.step_s * (config.look_ahead + 1)
        if config.scorer == "anchors":
            return self.draft[None, None](kept) + look_ahead + self.target(kept)
        scoring = self.draft[config.draft_window, config.scoring_layers](num_tokens)
        if config.scoring_layers is not None:
            scoring += self.draft[None, None](kept)
        return scoring + look_ahead + self.target(kept)


class Plan:
    """How far a calibration is."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def step(self, what: str) -> None:
        self._progress(min(self._done, self._total), self._total, what)
        self._done += 1


def measure(pair: ModelPair, ways: Sequence[PrefillConfig], longest: int, plan: Plan) -> Costs:
    """Time the parts of a first token, on random ids, and fit them by length."""
    lengths = sorted({256, min(1024, longest), min(4096, longest)})
    num_ids = min(text_config(model.config).vocab_size for model in (pair.target, pair.draft))
    ids = torch.randint(0, num_ids, (lengths[-1],), generator=torch.Generator().manual_seed(0)).tolist()
    chunk = PrefillConfig.prefill_chunk

    def fit(prefill: Callable[[int], Any]) -> Callable[[float], float]:
        return fit_quadratic(lengths, [seconds_of(partial(prefill, length)) for length in lengths])

    plan.step("timing the target")
    target = fit(lambda length: pair.open_target(chunk).forward(ids[:length], range(length), 1))

    def draft_pass(way: PrefillConfig, length: int) -> None:
        model = CachedModel(pair.draft, chunk)
        model.prefill(ids[:length], range(length), way.draft_window, way.draft_sinks, way.scoring_layers)

    draft = {}
    for way in ways:
        plan.step(f"timing the draft, {describe_setting(way)}")
        draft[way.draft_window, way.scoring_layers] = fit(partial(draft_pass, way))
    plan.step("timing the look-ahead")
    model = CachedModel(pair.draft, chunk)
    model.prefill(ids[: lengths[-1]], range(lengths[-1]))
    steps = []
    for position in range(lengths[-1], lengths[-1] + 12):
        steps.append(once(partial(model.forward, ids[:1], [position], 1)))
    return Costs(target, draft, median(steps))


def once(run: Callable[[], Any]) -> float:
    started = perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - started


def seconds_of(run: Callable[[], Any]) -> float:
    once(run)
    return median(once(run) for _ in range(3))


def fit_quadratic(lengths: Sequence[int], seconds: Sequence[float]) -> Callable[[float], float]:
    """Seconds as a + b·n + c·n², none of them negative, by least squares of the relative error."""
    powers = torch.tensor([[1.0, n, n * n] for n in lengths], dtype=torch.float64)
    rows = powers / torch.tensor(seconds, dtype=torch.float64)[:, None]
    wanted = torch.ones(len(lengths), 1, dtype=torch.float64)
    best, best_error = torch.zeros(3, dtype=torch.float64), math.inf
    # Few enough to try which of the three there are.
    for chosen in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        scale = rows[:, chosen].amax(dim=0)
        solution = torch.linalg.lstsq(rows[:, chosen] / scale, wanted).solution[:, 0] / scale
        error = float((rows[:, chosen] @ solution - 1).square().sum())
        if bool((solution >= 0).all()) and error < best_error:
            best, best_error = torch.zeros(3, dtype=torch.float64), error
            best[chosen] = solution
    a, b, c = best.tolist()
    return lambda n: float(a + b * n + c * n * n)
