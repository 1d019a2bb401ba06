"""Measure what `throughput` costs where drafting does not pay, against plain decoding, with times known exactly.

Forty answers of each length to a draft whose tokens are accepted with a known chance: steps take
plain * (1 + 0.02 per verified token) and `ratio` * plain per drafted token, each with 10 % noise, and a draft that is
behind takes 30 us a token to catch up. "running" keeps one policy, "fresh" makes one for every answer. Plain time over
the policy's, prefill included. Then answers behind 8,000 tokens of which the draft sees chosen slots, at a pretrained
pair's costs: a drafted token takes 0.35 of a plain step, reading the slots nine, and texts of two kinds may come in
turn; plain time over the policy's, without the prefill. Then a conversation whose context grows over eight turns, and
shrinks again: its steps take the longer the more slots each model attends to; by the policy, and by the rule of a
server that has this conversation alone. Takes a minute; timing on a machine is bench_floor.py's.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from experiments.common.script import run_script
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord
from spec_stack.controller.registry import make_batch_policy, make_policy

PLAIN_S = 3e-3
READ_S = 30e-6
LENGTHS = (8, 24, 128)
SLOT_LENGTHS = (32, 96, 256)
TURNS = (1_000, 2_000, 4_000, 8_000, 32_000, 1_000, 16_000, 32_000)


@dataclass(frozen=True)
class Pair:
    """A draft: its seconds per token over a plain step's, what it says of its tokens, and the chance that it is right.

    num_prompt_tokens: that it has to catch up on, at read_s each; num_prefilled, prefill_s: what the target took in,
    and its time. per_slot: by what share of it a forward of the target, and of the draft, takes longer for every slot
    that it attends to; draft_slots: at most so many in the draft.
    """

    ratio: float
    confidence: Callable[[random.Random], float]
    accepted: Callable[[float], float]
    num_prompt_tokens: int = 0
    prefill_s: float = 3e-3
    per_slot: tuple[float, float] = (0.0, 0.0)
    draft_slots: int = 1 << 30
    read_s: float = READ_S
    num_prefilled: int = 0


def varied(rng: random.Random) -> float:
    return rng.choice([0.5, 0.9, 0.98, 0.99])


def sure(rng: random.Random) -> float:
    return 0.99


def about(chance: float) -> Callable[[random.Random], float]:
    """Confidences that vary widely about a mean."""
    return lambda rng: min(max(rng.betavariate(2 * chance, 2 * (1 - chance)), 0.02), 0.995)


def over_slots(chance: float) -> Pair:
    """A draft of which that share is right, and which knows it."""
    read_s, prefill_s = 9 * PLAIN_S / 512, 370 * PLAIN_S
    return Pair(0.35, about(chance), lambda said: said, 512, prefill_s, read_s=read_s, num_prefilled=8000)


CASES = {
    "good": Pair(0.288, varied, lambda said: said),
    "useless and sure": Pair(0.288, sure, lambda said: 0.02),
    "useless and unsure": Pair(0.288, lambda rng: 0.05, lambda said: 0.02),
    "30 % accepted, signals say nothing": Pair(0.3, lambda rng: 0.8, lambda said: 0.3),
    "as dear as the target, all accepted": Pair(1.0, sure, lambda said: 1.0),
    "dearer than the target": Pair(1.5, varied, lambda said: said),
    "temperature 1, half as good": Pair(0.288, varied, lambda said: 0.5 * said),
    "useless and sure, 1,800-token prompt": Pair(0.288, sure, lambda said: 0.02, 1800, 0.12),
    "good, 1,800-token prompt": Pair(0.288, varied, lambda said: said, 1800, 0.12),
}
SLOTS = {
    "useless": [over_slots(0.05)],
    "half right": [over_slots(0.55)],
    "0.7 right": [over_slots(0.7)],
    "0.9 right": [over_slots(0.9)],
    "half and 0.9 right in turn": [over_slots(0.55), over_slots(0.9)],
}
# A draft of few layers over a long text is soon as dear as the target: what it drafts there is lost.
GROWING = {
    "full draft, good": Pair(0.2, varied, lambda said: said, per_slot=(1 / 4000, 1 / 800)),
    "full draft, half as good": Pair(0.2, varied, lambda said: 0.5 * said, per_slot=(1 / 4000, 1 / 800)),
    "chosen slots, good": Pair(0.2, varied, lambda said: said, per_slot=(1 / 4000, 1 / 800), draft_slots=512),
}


def answer(
    policy: Policy, pair: Pair, num_tokens: int, rng: random.Random, num_cached: int = 0
) -> tuple[int, float, float]:
    """Tokens after the first one, seconds with the prefill, and what the same takes without drafting; behind so many
    tokens that target and draft have cached."""
    num_draft_slots = min(num_cached, pair.draft_slots)
    target_s, draft_s_each = (
        PLAIN_S * ratio * (1 + share * slots)
        for ratio, share, slots in zip((1.0, pair.ratio), pair.per_slot, (num_cached, num_draft_slots), strict=True)
    )

    def record(step: int, signals: DraftSignals, num_accepted: int, draft_s: float, verify_s: float, num_unread: int,
               read_prompt: bool) -> StepRecord:  # fmt: skip
        gamma = len(signals)
        return StepRecord("r", step, policy.name, "fp32", "", step == 0, 1.0, gamma, num_accepted, num_accepted + 1,
                          signals, draft_s, verify_s, 1e-5, read_prompt, 0, num_unread if gamma else 0,
                          num_target_slots=num_cached, num_draft_slots=num_draft_slots,
                          num_prefilled=0 if step else pair.num_prefilled)  # fmt: skip

    last = record(0, DraftSignals(), 0, 0.0, pair.prefill_s, 0, False)
    policy.observe(last)
    seconds, done, num_unread, step = pair.prefill_s, 1, pair.num_prompt_tokens + 1, 1
    while done < num_tokens:
        context = StepContext(step, num_tokens - done - 1, last, "fp32", num_unread=num_unread,
                              num_target_slots=num_cached, num_draft_slots=num_draft_slots)  # fmt: skip
        most = max(0, min(policy.choose(context), context.max_gamma, 16))
        signals, num_accepted, is_right = DraftSignals(), 0, True
        while len(signals) < most:
            said = pair.confidence(rng)
            signals.append(1.0 if said < 0.9 else 0.1, said)
            is_right = is_right and rng.random() < pair.accepted(said)
            num_accepted += is_right
            if len(signals) < most and not policy.keep_drafting(context, signals):
                break
        gamma = len(signals)
        draft_s = (gamma * draft_s_each + pair.read_s * (num_unread - 1)) * rng.uniform(0.9, 1.1) if gamma else 0.0
        verify_s = target_s * (1 + 0.02 * gamma) * rng.uniform(0.9, 1.1)
        read_prompt = gamma > 0 and 0 < pair.num_prompt_tokens < num_unread
        last = record(step, signals, num_accepted, draft_s, verify_s, num_unread, read_prompt)
        policy.observe(last)
        seconds += draft_s + verify_s
        done, step = done + num_accepted + 1, step + 1
        num_unread = 1 + int(num_accepted == gamma) if gamma else num_unread + 1
    return done - 1, seconds, (done - 1) * target_s + pair.prefill_s


def over_plain(name: str, pair: Pair, num_tokens: int, is_fresh: bool) -> float:
    rng, policy = random.Random(0), make_policy(name)
    plain = ours = 0.0
    for _ in range(40):
        if is_fresh:
            policy = make_policy(name)
        _, seconds, plain_s = answer(policy, pair, num_tokens, rng)
        plain += plain_s
        ours += seconds
    return plain / ours


def slots_over_plain(name: str, pairs: Sequence[Pair], num_tokens: int, num_seeds: int = 5) -> list[float]:
    """Plain time over the policy's for twenty answers to pairs in turn: the mean, least and most of seeds."""
    ratios = []
    for seed in range(num_seeds):
        rng, policy = random.Random(seed), make_policy(name)
        runs = [
            (pair.prefill_s, answer(policy, pair, num_tokens, rng)) for pair in (pairs * 20)[seed % len(pairs) :][:20]
        ]
        plain, ours = (sum(run[at] - prefill_s for prefill_s, run in runs) for at in (2, 1))
        ratios.append(plain / ours)
    return [sum(ratios) / num_seeds, min(ratios), max(ratios)]


def turns_over_plain(
    make: Callable[[], Policy], pair: Pair, lengths: Sequence[int] = TURNS, num_tokens: int = 128, num_seeds: int = 20
) -> list[float]:
    """Plain time over the policy's, by turn of a conversation over so many tokens, the first that the policy sees."""
    ratios = []
    for seed in range(num_seeds):
        rng, policy = random.Random(seed), make()
        turns = [answer(policy, pair, num_tokens, rng, num_cached) for num_cached in lengths]
        ratios.append([plain / ours for _, ours, plain in turns])
    return [sum(turn) / num_seeds for turn in zip(*ratios, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="throughput")
    arguments = parser.parse_args()
    print(f"{'':38s}" + "".join(f"{f'{length} tokens: running, fresh':>28s}" for length in LENGTHS))
    result: dict[str, dict[int, list[float]]] = {}
    for name, pair in CASES.items():
        result[name] = {
            length: [over_plain(arguments.policy, pair, length, is_fresh) for is_fresh in (False, True)]
            for length in LENGTHS
        }
        print(
            f"{name:38s}" + "".join(f"{f'{running:.3f}, {fresh:.3f}':>28s}" for running, fresh in result[name].values())
        )
    print(f"\n{'slots of 8,000 tokens':38s}" + "".join(f"{f'{length} tokens':>24s}" for length in SLOT_LENGTHS))
    slots = {
        name: {length: slots_over_plain(arguments.policy, pairs, length) for length in SLOT_LENGTHS}
        for name, pairs in SLOTS.items()
    }
    for name, row in slots.items():
        print(
            f"{name:38s}" + "".join(f"{f'{mean:.3f} [{low:.2f}, {high:.2f}]':>24s}" for mean, low, high in row.values())
        )
    print(f"\n{'a conversation of 128-token answers':42s}" + "".join(f"{length:>9,d}" for length in TURNS))
    makers = {"": partial(make_policy, arguments.policy), "a server's rule: ": partial(make_batch_policy, "throughput")}
    growing = {
        f"{whose}{name}": turns_over_plain(make, pair)
        for whose, make in makers.items()
        for name, pair in GROWING.items()
    }
    for name, ratios in growing.items():
        print(f"{name:42s}" + "".join(f"{ratio:9.3f}" for ratio in ratios))
    print(
        json.dumps(
            {
                "experiment": "simulate_floor",
                "policy": arguments.policy,
                "result": result,
                "slots": slots,
                "growing": growing,
            }
        )
    )


if __name__ == "__main__":
    run_script(main)
