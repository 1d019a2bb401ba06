"""From which length on pruning pays, by what a device takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spec_stack.config import PrefillConfig
from spec_stack.sglang.threshold import NEVER, PrefillSeconds, measured_break_even, threshold_of

CONFIG = PrefillConfig(keep_rate=0.2)


class Device:
    """A clock that only forwards move. busy_s: what launching a forward's kernels takes, however few its tokens.
    cached_s: what every token takes on top of that for each that is cached."""

    def __init__(self, base_s: float, per_token_s: float, busy_s: float = 0.0, cached_s: float = 0.0) -> None:
        self.now, self.lengths, self.cached = 0.0, list[int](), list[int]()
        self._seconds = base_s, per_token_s, busy_s, cached_s

    def prefill(self, num_tokens: int, num_cached: int) -> None:
        base_s, per_token_s, busy_s, cached_s = self._seconds
        if num_cached:
            self.now += num_tokens * num_cached * cached_s + 5.0 * (num_cached not in self.cached)
            self.cached.append(num_cached)
        # The first forward of a length compiles, and another one stalls.
        disturbed = num_tokens not in self.lengths or self.lengths.count(num_tokens) == 2
        self.now += max(base_s + per_token_s * num_tokens, busy_s) + 5.0 * disturbed
        self.lengths.append(num_tokens)

    def measured(self, **options: Any) -> PrefillSeconds:
        return PrefillSeconds.measured(self.prefill, clock=lambda: self.now, **options)


def test_seconds_are_those_of_the_quickest_forwards() -> None:
    device = Device(0.01, 1e-4)
    seconds = device.measured()
    assert (seconds.base_s, seconds.per_token_s) == pytest.approx((0.01, 1e-4))
    assert seconds.is_told
    assert max(device.lengths) == 512


@pytest.mark.parametrize("per_token_s", [5e-5, 2e-5, 1.1e-5])
def test_where_launching_takes_longer_than_the_tokens_longer_forwards_are_timed(per_token_s: float) -> None:
    seconds = Device(0.0, per_token_s, busy_s=0.02).measured()
    assert seconds.is_told
    assert seconds.per_token_s == pytest.approx(per_token_s)


def test_what_no_length_tells_is_not_told() -> None:
    assert not Device(0.0, 1e-6, busy_s=0.02).measured().is_told
    short = Device(0.0, 1e-5, busy_s=0.02)
    assert not short.measured(most_tokens=1024).is_told
    assert max(short.lengths) == 1024


def test_ranks_run_the_same_forwards_until_all_of_them_can_tell() -> None:
    # Of every length three times whether it is slow, and once whether it tells.
    answers = iter([*[False] * 3, *[False] * 4, *[False] * 3, True])
    device = Device(0.01, 1e-4)
    assert device.measured(agree=lambda own: next(answers)).is_told
    assert max(device.lengths) == 1024


def test_slow_forwards_are_not_repeated_and_ranks_agree_on_that() -> None:
    device, other = Device(1.0, 0.03), Device(1.0, 0.03)
    assert device.measured().per_token_s == pytest.approx(0.03)
    assert device.lengths == [128, 128, 512, 512]
    # Another rank was quicker, and all repeat what it repeats.
    answers = iter([False, False, False, True, True])
    assert other.measured(agree=lambda own: next(answers)).per_token_s == pytest.approx(0.03)
    assert other.lengths == [128] * 4 + [512] * 2


def test_only_a_draft_that_is_clearly_too_dear_ends_pruning() -> None:
    told, untold = PrefillSeconds(0.01, 1e-4), PrefillSeconds(0.02, 0.0, is_told=False)
    assert threshold_of(told, told, 3000)[0] == threshold_of(told, untold, 3000)[0] == 3000
    assert threshold_of(told, told, 0)[0] == NEVER
    assert (
        threshold_of(told, untold, 0)[0] == threshold_of(untold, told, 0)[0] == threshold_of(untold, told, 3000)[0] == 0
    )


def test_a_pass_by_some_layers_or_by_none_pays_sooner() -> None:
    target, draft = PrefillSeconds(0.01, 2e-5), PrefillSeconds(0.1, 1e-5)
    whole, half = (measured_break_even(target, draft, CONFIG, layers=share) for share in (1.0, 0.5))
    assert whole > half
    slow = PrefillSeconds(0.1, 1e-3)
    assert measured_break_even(target, slow, CONFIG, drafts=False) == 0
    assert measured_break_even(target, slow, replace(CONFIG, scorer="bm25"), drafts=False)


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
        kept = max(0.2 * num_tokens, sum(CONFIG.forced_tokens))
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


@pytest.mark.parametrize("cached_s", [0.0, 1e-8, 1e-6])
@pytest.mark.parametrize("busy_s", [0.0, 0.02])
@pytest.mark.parametrize("most_tokens", [512, 700, 4096, 100_000])
def test_scoring_is_timed_behind_a_cache_too(cached_s: float, busy_s: float, most_tokens: int) -> None:
    device = Device(0.01, 1e-4, busy_s, cached_s)
    seconds = device.measured(most_tokens=most_tokens, scores=True)
    (chunk,) = set(device.cached)
    assert chunk == min(max(device.lengths), most_tokens // 2)
    assert seconds.behind_s == pytest.approx(chunk * cached_s, rel=1e-6, abs=1e-4 if busy_s else 1e-9)
    assert seconds.scoring(0.5).per_token_s == pytest.approx(0.5 * (seconds.per_token_s + seconds.behind_s))
    plain = Device(0.01, 1e-4, busy_s, cached_s)
    assert plain.measured(most_tokens=most_tokens).behind_s == 0
    assert not plain.cached


def test_a_draft_that_is_slow_behind_a_cache_prunes_later_or_never() -> None:
    target, draft = PrefillSeconds(0.01, 1e-3), PrefillSeconds(0.3, 1e-4)
    slower, far_slower = (replace(draft, behind_s=behind_s) for behind_s in (4e-4, 4e-3))
    assert 0 < measured_break_even(target, draft, CONFIG) < measured_break_even(target, slower, CONFIG)
    assert measured_break_even(target, far_slower, CONFIG) == 0
    assert measured_break_even(target, far_slower, replace(CONFIG, scorer="bm25")) > 0
