"""After a pruned prefill the draft has the kept tokens to run before it drafts: what that costs is never lost twice."""

from __future__ import annotations

import random

import pytest

from spec_stack.controller.registry import make_policy
from tests.support.nightly import others_nightly
from tests.support.simulated_costs import PLAIN_S, Pair, answer

# Over a plain step, as of a 1.5B target and a 0.5B draft on a CPU: a token of the target's prefill, and the draft's.
PREFILL, READ = 0.066, 0.02
# Of the draft's layers, those that scoring did not run.
LATE = 3 / 8


class Even(random.Random):
    """Steps that take what they take in the mean."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def pair_of(num_kept: int, share: float, ratio: float, chance: float) -> Pair:
    """A draft whose token costs `ratio` of a plain step, after a prefill of so many tokens of which it has to run a
    share of the layers; it is right `chance` times as often as it says."""
    return Pair(
        ratio,
        lambda rng: rng.choice([0.6, 0.9, 0.98]),
        lambda said: said * chance,
        num_prompt_tokens=round(num_kept * share),
        prefill_s=num_kept * PREFILL * PLAIN_S,
        read_s=READ * PLAIN_S,
        num_prefilled=num_kept,
    )


def over_plain(pair: Pair, num_tokens: int, num_answers: int, seed: int, max_tokens: int = 0) -> list[float]:
    """Time after the prefill over that of plain decoding, by answer, under one policy that is new."""
    rng, policy, found = Even(seed), make_policy("throughput"), []
    for _ in range(num_answers):
        _, seconds, plain = answer(policy, pair, num_tokens, rng, max_tokens=max_tokens)
        found.append((seconds - pair.prefill_s) / (plain - pair.prefill_s))
    return found


DRAFTS = others_nightly(
    [(kept, share, ratio, chance) for kept in (205, 820) for share in (LATE, 1.0) for ratio in (0.1, 0.42)
     for chance in (1.0, 0.85, 0.5, 0.0)],
    usual=[(205, LATE, 0.42, 1.0), (205, LATE, 0.42, 0.0), (205, LATE, 0.1, 0.5), (820, LATE, 0.42, 0.85),
           (205, 1.0, 0.42, 0.85), (820, 1.0, 0.1, 0.0)],
)  # fmt: skip


@pytest.mark.parametrize(("num_kept", "share", "ratio", "chance"), DRAFTS)
@pytest.mark.parametrize("num_tokens", [8, 16, 64, 256])
def test_no_answer_length_is_slower_than_plain_beside_one_trial_of_an_unknown_draft(
    num_tokens: int, num_kept: int, share: float, ratio: float, chance: float
) -> None:
    trial = (num_kept * share * READ + 1) / num_tokens
    for seed in range(4):
        found = over_plain(pair_of(num_kept, share, ratio, chance), num_tokens, 12, seed)
        assert sum(found) <= 1.02 * len(found) + trial
        if num_tokens == 8:
            assert max(found) <= 1.02


@pytest.mark.parametrize(("num_kept", "share", "ratio", "chance"), DRAFTS)
def test_answers_that_end_before_their_limit_cost_one_trial_too(
    num_kept: int, share: float, ratio: float, chance: float
) -> None:
    """Until it has seen some, the policy takes an answer without a known length for a long one."""
    trial = (num_kept * share * READ + 1) / 8
    for seed in range(4):
        found = over_plain(pair_of(num_kept, share, ratio, chance), 8, 40, seed, max_tokens=512)
        assert sum(found) <= 1.02 * len(found) + trial


@pytest.mark.parametrize(
    ("num_tokens", "num_kept", "share", "gain"), [(64, 205, LATE, 1.2), (256, 205, LATE, 1.3), (256, 820, LATE, 1.25)]
)
def test_a_good_draft_gains_though_it_has_to_run_the_kept_tokens(
    num_tokens: int, num_kept: int, share: float, gain: float
) -> None:
    for seed in range(4):
        _, *later = over_plain(pair_of(num_kept, share, 0.42, 1.0), num_tokens, 6, seed)
        assert len(later) / sum(later) > gain


def test_what_scoring_has_left_to_run_decides_whether_a_short_answer_drafts() -> None:
    """Cheap drafts, 16 tokens: it pays to run the late layers over the kept tokens, and not to read them again."""
    resumed, read_again = (over_plain(pair_of(205, share, 0.1, 1.0), 16, 12, 0) for share in (LATE, 1.0))
    assert sum(resumed) < 0.9 * len(resumed)
    assert read_again == pytest.approx([1.0] * 12)
