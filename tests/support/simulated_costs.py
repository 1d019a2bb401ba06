"""A pair whose steps take known times and whose draft is right with known chances, for policies of gamma."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord

PLAIN_S = 3e-3
READ_S = 30e-6


@dataclass(frozen=True)
class Pair:
    """A draft: its seconds per token over a plain step's, what it says of its tokens, and the chance that it is right.

    num_prompt_tokens: that it has to catch up on, at read_s each; num_prefilled, prefill_s: what the target took in,
    and its time. per_slot: by what share of it a forward of the target, and of the draft, takes longer for every slot
    that it attends to; draft_kv_budget: at most so many in the draft.
    """

    ratio: float
    confidence: Callable[[random.Random], float]
    accepted: Callable[[float], float]
    num_prompt_tokens: int = 0
    prefill_s: float = 3e-3
    per_slot: tuple[float, float] = (0.0, 0.0)
    draft_kv_budget: int = 1 << 30
    read_s: float = READ_S
    num_prefilled: int = 0


def varied(rng: random.Random) -> float:
    return rng.choice([0.5, 0.9, 0.98, 0.99])


# A draft of few layers over a long text is soon as dear as the target: what it drafts there is lost.
GROWING = {
    "full draft, good": Pair(0.2, varied, lambda said: said, per_slot=(1 / 4000, 1 / 800)),
    "full draft, half as good": Pair(0.2, varied, lambda said: 0.5 * said, per_slot=(1 / 4000, 1 / 800)),
    "chosen slots, good": Pair(0.2, varied, lambda said: said, per_slot=(1 / 4000, 1 / 800), draft_kv_budget=512),
}


def answer(
    policy: Policy, pair: Pair, num_tokens: int, rng: random.Random, num_cached: int = 0, max_tokens: int = 0
) -> tuple[int, float, float]:
    """Tokens after the first one, seconds with the prefill, and what the same takes without drafting; behind so many
    tokens that target and draft have cached. max_tokens: what the policy knows of the length, where it is not all."""
    num_draft_slots = min(num_cached, pair.draft_kv_budget)
    target_s, draft_s_each = (
        PLAIN_S * ratio * (1 + share * slots)
        for ratio, share, slots in zip((1.0, pair.ratio), pair.per_slot, (num_cached, num_draft_slots), strict=True)
    )

    def record(step: int, signals: DraftSignals, num_accepted: int, draft_s: float, verify_s: float, draft_lag: int,
               read_prompt: bool) -> StepRecord:  # fmt: skip
        gamma = len(signals)
        return StepRecord("r", step, policy.name, "fp32", "", step == 0, 1.0, gamma, num_accepted, num_accepted + 1,
                          signals, draft_s, verify_s, 1e-5, read_prompt, 0, draft_lag if gamma else 0,
                          num_target_slots=num_cached, num_draft_slots=num_draft_slots,
                          num_prefilled=0 if step else pair.num_prefilled)  # fmt: skip

    last = record(0, DraftSignals(), 0, 0.0, pair.prefill_s, 0, False)
    policy.observe(last)
    seconds, done, draft_lag, step = pair.prefill_s, 1, pair.num_prompt_tokens + 1, 1
    while done < num_tokens:
        context = StepContext(step, max(num_tokens, max_tokens) - done - 1, last, "fp32", draft_lag=draft_lag,
                              num_target_slots=num_cached, num_draft_slots=num_draft_slots)  # fmt: skip
        most = max(0, min(policy.choose(context), num_tokens - done - 1, 16))
        signals, num_accepted, is_right = DraftSignals(), 0, True
        while len(signals) < most:
            said = pair.confidence(rng)
            signals.append(1.0 if said < 0.9 else 0.1, said)
            is_right = is_right and rng.random() < pair.accepted(said)
            num_accepted += is_right
            if len(signals) < most and not policy.keep_drafting(context, signals):
                break
        gamma = len(signals)
        draft_s = (gamma * draft_s_each + pair.read_s * (draft_lag - 1)) * rng.uniform(0.9, 1.1) if gamma else 0.0
        verify_s = target_s * (1 + 0.02 * gamma) * rng.uniform(0.9, 1.1)
        read_prompt = gamma > 0 and 0 < pair.num_prompt_tokens < draft_lag
        last = record(step, signals, num_accepted, draft_s, verify_s, draft_lag, read_prompt)
        policy.observe(last)
        seconds += draft_s + verify_s
        done, step = done + num_accepted + 1, step + 1
        draft_lag = 1 + int(num_accepted == gamma) if gamma else draft_lag + 1
    return done - 1, seconds, (done - 1) * target_s + pair.prefill_s


def turns_over_plain(
    make: Callable[[], Policy], pair: Pair, lengths: Sequence[int], num_tokens: int = 128, num_seeds: int = 20
) -> list[float]:
    """Plain time over the policy's, by turn of a conversation over so many tokens, the first that the policy sees."""
    ratios = []
    for seed in range(num_seeds):
        rng, policy = random.Random(seed), make()
        turns = [answer(policy, pair, num_tokens, rng, num_cached) for num_cached in lengths]
        ratios.append([plain / ours for _, ours, plain in turns])
    return [sum(turn) / num_seeds for turn in zip(*ratios, strict=True)]
