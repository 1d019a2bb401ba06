"""What a generator's requests get of its policies."""

from __future__ import annotations

import pytest

from spec_stack.controller.pool import PolicyPool


@pytest.mark.parametrize("gamma", [True, 1.0])
def test_a_bad_value_is_refused_though_it_equals_a_good_one_asked_for_before(gamma: object) -> None:
    pool = PolicyPool("throughput")
    pool.choose(gamma=1)
    with pytest.raises(ValueError, match="gamma must be a whole number"):
        pool.choose(gamma=gamma)  # type: ignore[arg-type]
