"""What a policy measured at one length of the context, and what it makes of it at another."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from spec_stack.controller.base import StepContext, StepRecord
from spec_stack.controller.registry import make_batch_policy, make_policy
from spec_stack.controller.step_times import PerContextLength
from tests.support.controller_data import step
from tests.support.simulated_costs import GROWING, turns_over_plain


def at(target: int, draft: int = 0, precision: str = "fp32") -> StepContext:
    return StepContext(1, 9, None, precision, num_target_slots=target, num_draft_slots=draft)


@pytest.mark.parametrize("seed", range(5))
def test_a_length_begins_with_what_is_known_half_or_twice_as_far_and_else_anew(seed: int) -> None:
    """Against a list of what was asked for, searched from its beginning."""
    rng = random.Random(seed)
    known: PerContextLength[list[str]] = PerContextLength(lambda: ["new"], lambda far: [far[0], "far"])
    seen: dict[tuple[str, int, int], list[str]] = {}
    for _ in range(60):
        key = rng.choice(["fp32", "bf16"]), rng.randrange(9, 16), rng.randrange(9, 16)
        if key not in seen:
            others = sorted(
                (max(abs(each[1] - key[1]), abs(each[2] - key[2])), each) for each in seen if each[0] == key[0]
            )
            seen[key] = ["new"]
            if others:
                distance, nearest = others[0]
                seen[key] = list(seen[nearest]) if distance <= 1 else [seen[nearest][0], "far"]
        precision, *sizes = key
        target, draft = (int(2**size * rng.uniform(0.71, 1.41)) for size in sizes)
        assert known.at(at(target, draft, precision)) == seen[key]
    assert sorted(known.values()) == sorted(seen.values())


def test_contexts_too_short_to_matter_are_one_length() -> None:
    known: PerContextLength[list[int]] = PerContextLength(list)
    known.at(at(0)).append(1)
    assert known.at(at(700, 300)) == [1]
    assert known.values() == [[1]]


MAKERS = {"in process": partial(make_policy, "throughput"), "on a server": partial(make_batch_policy, "throughput")}


def turns(name: str, lengths: tuple[int, ...], where: str = "in process") -> list[float]:
    return turns_over_plain(MAKERS[where], GROWING[name], lengths, num_seeds=6)


def test_a_conversation_that_grows_and_jumps_in_length_stays_at_plain_speed_where_its_draft_becomes_dear() -> None:
    lengths = (1_000, 2_000, 4_000, 8_000, 32_000, 1_000, 32_000)
    good, poor = turns("full draft, good", lengths), turns("full draft, half as good", lengths)
    assert min(good + poor) > 0.95
    # What a short context took is not forgotten over a long one.
    assert good[5] > 0.95 * good[0] > 1.3


def test_a_server_that_meets_short_and_long_contexts_in_turn_takes_each_for_what_it_is() -> None:
    lengths = (1_000, 32_000) * 3
    good, poor = (turns(f"full draft, {how}", lengths, "on a server") for how in ("good", "half as good"))
    assert min(good[2:] + poor[2:]) > 0.95
    assert min(good[::2]) > 1.3


@pytest.mark.parametrize("where", MAKERS)
def test_a_draft_over_chosen_slots_gains_the_more_the_longer_the_context_is(where: str) -> None:
    ratios = turns("chosen slots, good", (1_000, 4_000, 32_000), where)
    assert ratios == sorted(ratios)
    assert ratios[-1] > 1.5 * ratios[0]


@pytest.mark.parametrize(("draft_lag", "drafts"), [(512, True), (32_000, False)])
def test_the_slots_of_a_long_prompt_are_read_where_the_whole_of_it_would_not_be(draft_lag: int, drafts: bool) -> None:
    """The price of waking a draft is that of what it has to catch up on, before it was ever measured."""
    policy = make_policy("throughput")
    policy.observe(_over(step(0, 0, verify_s=10.0, is_prefill=True), draft_lag))
    for _ in range(4):
        policy.observe(_over(step(0, 0, verify_s=0.03), draft_lag))
    chosen = policy.choose(replace(at(32_000, draft_lag, "fp16"), max_gamma=200, draft_lag=draft_lag))
    assert (chosen > 0) == drafts


def _over(record: StepRecord, num_draft_slots: int) -> StepRecord:
    prefilled = 32_000 if record.is_prefill else 0
    return replace(record, num_target_slots=32_000, num_draft_slots=num_draft_slots, num_prefilled=prefilled)
