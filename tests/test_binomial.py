"""Bounds of a share by counting."""

from __future__ import annotations

import pytest

from spec_stack.binomial import lower_bound, num_needed, upper_bound


@pytest.mark.parametrize(("num", "n"), [(0, 1), (0, 149), (1, 5), (3, 20), (19, 20), (40, 400)])
@pytest.mark.parametrize("level", [0.95, 0.975])
def test_the_bounds_are_those_of_the_beta_distribution(num: int, n: int, level: float) -> None:
    beta = pytest.importorskip("scipy.stats").beta
    assert upper_bound(num, n, level) == pytest.approx(beta.ppf(level, num + 1, n - num), abs=1e-9)
    expected = beta.ppf(1 - level, num, n - num + 1) if num else 0
    assert lower_bound(num, n, level) == pytest.approx(expected, abs=1e-9)


def test_nothing_seen_bounds_nothing_and_all_lost_is_all() -> None:
    assert (lower_bound(0, 0), upper_bound(0, 0), upper_bound(7, 7)) == (0, 1, 1)


@pytest.mark.parametrize("share", [0.5, 0.1, 0.02, 0.003])
def test_so_many_cases_without_a_loss_are_needed(share: float) -> None:
    n = num_needed(share)
    assert upper_bound(0, n) <= share < upper_bound(0, n - 1)
