"""Small synthetic runs for the controller's tests: a draft that is right in runs, and says so more or less."""

from __future__ import annotations

import random
from dataclasses import dataclass

from spec_stack.bench.replay import Costs
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord


class RandomGamma(Policy):
    """A policy that proposes 0 to 8 tokens and sometimes stops early."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.contexts: list[StepContext] = []
        self.records: list[StepRecord] = []

    def choose(self, context: StepContext) -> int:
        self.contexts.append(context)
        return self._rng.randint(0, 8)

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return self._rng.random() < 0.8

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


@dataclass(frozen=True)
class StepCosts(Costs):
    """Seconds of a step: draft_base + draft_per_token * gamma (nothing at gamma 0), verify likewise (always)."""

    draft_base_s: float
    draft_per_token_s: float
    verify_base_s: float
    verify_per_token_s: float

    def draft_s(self, gamma: int) -> float:
        return self.draft_base_s + self.draft_per_token_s * gamma if gamma else 0.0

    def verify_s(self, gamma: int) -> float:
        return self.verify_base_s + self.verify_per_token_s * gamma


COSTS = StepCosts(0.0, 0.01, 0.03, 0.0)


class Greedy:
    """One prompt's greedy text: whether the draft is right at each position, its signals there, and after a mistake."""

    def __init__(self, seed: int, num_tokens: int = 60, p_right: float = 0.85) -> None:
        rng = random.Random(seed)
        self.num_tokens = num_tokens
        self.correct = [rng.random() < p_right for _ in range(num_tokens)]
        self.confidence = [rng.uniform(0.7, 1.0) if right else rng.uniform(0.1, 0.7) for right in self.correct]
        self.entropy = [4 * (1 - confidence) for confidence in self.confidence]
        self.tails = [[rng.uniform(0.1, 0.9) for _ in range(20)] for _ in range(num_tokens)]

    def record(
        self,
        request_id: str,
        gamma: int,
        *,
        task: str = "chat",
        precision: str = "fp16",
        costs: StepCosts = COSTS,
        prefill: int | None = None,
        reserve: int = 1,
    ) -> list[StepRecord]:
        """The run at a fixed gamma; with `prefill`, its first step is a prefill step that looks so far ahead.

        reserve 0 lets the last step overshoot, as the SpecKV authors' loop does.
        """
        records: list[StepRecord] = []
        position = 0
        while position < self.num_tokens:
            is_prefill = prefill is not None and not records
            wanted = prefill if is_prefill and prefill is not None else gamma
            drafted = min(wanted, self.num_tokens - position - reserve)
            accepted = 0
            while accepted < drafted and self.correct[position + accepted]:
                accepted += 1
            on_path = range(position, position + min(accepted + 1, drafted))
            tail = self.tails[position + accepted][: drafted - len(on_path)] if accepted < drafted else []
            signals = DraftSignals(
                [self.entropy[at] for at in on_path] + [4 * (1 - value) for value in tail],
                [self.confidence[at] for at in on_path] + tail,
            )
            record = StepRecord(
                request_id=request_id,
                step=len(records),
                policy=f"fixed-{gamma}",
                precision=precision,
                task=task,
                is_prefill=is_prefill,
                keep_rate=1.0,
                gamma=drafted,
                num_accepted=accepted,
                num_tokens=accepted + 1,
                signals=signals,
                draft_s=costs.draft_s(drafted),
                verify_s=5.0 if is_prefill else costs.verify_s(drafted),
                policy_s=0.0,
            )
            records.append(record)
            position += accepted + 1
        return records


def runs(num_prompts: int = 6, gammas: tuple[int, ...] = (2, 4, 6, 8), p_right: float = 0.85) -> list[StepRecord]:
    """Runs of several prompts in two tasks at several gammas."""
    records: list[StepRecord] = []
    for number in range(num_prompts):
        text = Greedy(number, p_right=p_right)
        for gamma in gammas:
            records += text.record(f"prompt-{number}", gamma, task=("chat", "code")[number % 2])
    return records


def step(
    gamma: int,
    num_accepted: int,
    *,
    draft_s: float | None = None,
    verify_s: float = 0.03,
    is_prefill: bool = False,
    precision: str = "fp16",
    confidence: float = 0.9,
) -> StepRecord:
    """One record with even signals."""
    return StepRecord(
        request_id="request",
        step=0,
        policy="any",
        precision=precision,
        task="chat",
        is_prefill=is_prefill,
        keep_rate=1.0,
        gamma=gamma,
        num_accepted=num_accepted,
        num_tokens=num_accepted + 1,
        signals=DraftSignals([4 * (1 - confidence)] * gamma, [confidence] * gamma),
        draft_s=0.01 * gamma if draft_s is None else draft_s,
        verify_s=verify_s,
        policy_s=0.0,
    )


def context(max_gamma: int = 16, last: StepRecord | None = None, precision: str = "fp16") -> StepContext:
    return StepContext(0, max_gamma, last, precision, "chat")
