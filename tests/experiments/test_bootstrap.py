from __future__ import annotations

import numpy as np
import pytest

from experiments.common.bootstrap import mean_interval, rank_correlation, ratio_interval


def test_an_interval_of_a_mean_is_about_two_standard_errors_to_either_side() -> None:
    values = np.random.default_rng(1).normal(3.0, 1.0, 400)
    middle, low, high = mean_interval(values.tolist())
    assert middle == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.1)


def test_a_ratio_is_of_sums_and_pairs_stay_together() -> None:
    seconds = np.random.default_rng(2).uniform(1, 50, 60)
    assert ratio_interval((2 * seconds).tolist(), seconds.tolist()) == pytest.approx([2, 2, 2])
    middle, low, high = ratio_interval([1.0, 9.0], [2.0, 3.0])
    assert middle == 2
    assert (low, high) == (0.5, 3.0)


def test_a_rank_correlation_sees_order_and_ties_alone() -> None:
    values = [1.0, 2.0, 2.0, 9.0, 30.0]
    assert rank_correlation(values, [value**3 for value in values])[0] == 1.0
    assert rank_correlation(values, [-value for value in values])[0] == -1.0
    assert rank_correlation(values, [0.0] * 5) == [0, 0, 0]
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4.
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4])[0] == pytest.approx(0.949, abs=1e-3)
