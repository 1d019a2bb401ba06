"""From which length on pruning pays, by what a device takes."""

from __future__ import annotations

import pytest

from spec_stack.config import PrefillConfig
from spec_stack.sglang.break_even import PrefillSeconds, measured_break_even

CONFIG = PrefillConfig(keep_rate=0.2)


def test_seconds_are_those_of_the_quickest_forwards() -> None:
    """A clock that only forwards move; the first one compiles, and one in the middle stalls."""
    now, num_run = 0.0, 0

    def prefill(num_tokens: int) -> None:
        nonlocal now, num_run
        num_run += 1
        now += 0.01 + 1e-4 * num_tokens + (5.0 if num_run in (1, 3) else 0.0)

    seconds = PrefillSeconds.measured(prefill, clock=lambda: now)
    assert (seconds.base_s, seconds.per_token_s) == pytest.approx((0.01, 1e-4))


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (PrefillSeconds(0.008, 1.5e-5), PrefillSeconds(0.02, 2e-6)),
        (PrefillSeconds(0.1, 2e-3), PrefillSeconds(0.05, 4e-4)),
        (PrefillSeconds(0.0, 1e-4), PrefillSeconds(0.5, 1e-5)),
    ],
)
@pytest.mark.parametrize("drafts", [True, False])
def test_a_prompt_of_that_length_gains_and_a_shorter_one_does_not(
    target: PrefillSeconds, draft: PrefillSeconds, drafts: bool
) -> None:
    """By the seconds of both ways written out."""

    def gain(num_tokens: int) -> float:
        kept = max(0.2 * num_tokens, 3 * 32)
        behind = draft.at if drafts else lambda _: 0.0
        whole = target.at(num_tokens) + behind(num_tokens)
        pruned = draft.at(num_tokens) + target.at(kept) + behind(kept)
        return whole - pruned

    even = measured_break_even(target, draft, CONFIG, drafts)
    assert gain(even) > 0
    assert even == 256 or gain(round(even * 0.85)) < 0


def test_a_model_that_only_scores_must_be_quicker_than_what_it_spares() -> None:
    target, almost = PrefillSeconds(0.01, 1e-3), PrefillSeconds(0.0, 9e-4)
    assert measured_break_even(target, almost, CONFIG, drafts=True)
    assert measured_break_even(target, almost, CONFIG, drafts=False) == 0


def test_where_the_draft_is_as_slow_as_the_target_nothing_pays() -> None:
    slow = PrefillSeconds(0.01, 1e-4)
    assert measured_break_even(slow, PrefillSeconds(0.01, 1e-3), CONFIG) == 0
