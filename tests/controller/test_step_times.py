"""The live cost model."""

from __future__ import annotations

import random

import pytest

from spec_stack.controller.step_times import DiscountedCurve, StepCost
from spec_stack.controller.tuning import TUNING
from tests.support.reference_controller import shrunk_slopes


@pytest.mark.parametrize("bend", [pytest.param(0.0, marks=pytest.mark.nightly), 0.05])
def test_a_curve_is_what_costs_least_with_no_slope_under_0(bend: float) -> None:
    rng = random.Random(3)
    points = [(float(rng.randint(1, 12)), rng.uniform(0.9, 1.1)) for _ in range(50)]
    points = [(x, y - 0.01 * min(x, 4) + bend * max(x - 8, 0)) for x, y in points]
    curve, base = DiscountedCurve(), 0.95
    for x, y in [(0.0, base), *points]:
        curve.add(x, y)
    slopes = shrunk_slopes(points, base, TUNING.keep, TUNING.shrinkage, list(TUNING.knots))
    for x in range(14):
        expected = base + sum(slope * max(x - knot, 0.0) for slope, knot in zip(slopes, TUNING.knots, strict=True))
        assert curve.at(x) == pytest.approx(expected, abs=2e-3)


def test_a_token_costs_what_it_adds_where_it_is_added() -> None:
    # Up to five rows take one row's time, as products of few rows do.
    model = StepCost()
    for gamma in (1, 3, 4, 6, 8, 10, 12) * 60:
        model.observe(gamma, 0.01 * gamma, 0.1 + 0.02 * max(gamma - 4, 0))
    assert model.verify_per_token_s(1) < 0.003
    assert model.verify_per_token_s(9) == pytest.approx(0.02, rel=0.1)
    assert model.per_token_s(9) == pytest.approx(0.03, rel=0.1)
    assert model.verify_s(10) == pytest.approx(0.22, rel=0.05)


def test_costs_are_recovered_in_spite_of_stalls() -> None:
    rng = random.Random(1)
    model = StepCost()
    model.observe(4, 9.0, 9.0)
    for _ in range(200):
        gamma = rng.randint(0, 8)
        stall = 20.0 if rng.random() < 0.03 else 1.0
        model.observe(gamma, 0.01 * gamma * rng.uniform(0.9, 1.1), stall * (0.03 + 0.001 * gamma))
    assert model.per_token_s() == pytest.approx(0.011, rel=0.15)
    assert model.seconds(4) == pytest.approx(0.03 + 4 * 0.011, rel=0.15)
    # Also right after one in both models.
    model.observe(4, 5.0, 5.0)
    assert model.per_token_s() < 2 * 0.011


def test_one_gamma_alone_and_a_plain_step_give_the_price_of_a_token() -> None:
    model = StepCost()
    model.observe(0, 0.0, 0.03)
    for _ in range(200):
        model.observe(4, 0.04, 0.03 + 4 * 0.02)
    assert model.per_token_s() == pytest.approx(0.03, rel=0.05)
    assert model.plain_s == pytest.approx(0.03)


def test_recomputed_tokens_are_priced_into_the_drafted_token() -> None:
    # Half of the drafted tokens are read once more; every token beside the first costs the target 2 ms.
    rng = random.Random(2)
    model = StepCost()
    recomputed = 0
    for _ in range(300):
        gamma = rng.randint(0, 8)
        model.observe(gamma, 0.01 * gamma, 0.03 + 0.002 * (gamma + recomputed), recomputed)
        recomputed = gamma // 2 + rng.randint(0, gamma % 2)
    assert model.plain_s == pytest.approx(0.03, rel=0.05)
    assert model.per_token_s() == pytest.approx(0.01 + 0.002 * 1.5, rel=0.05)
