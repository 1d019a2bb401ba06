"""What a decoder accepts of given right and wrong proposals."""

from __future__ import annotations

import pytest

from experiments.real.slots import accepted


@pytest.mark.parametrize(
    ("is_right", "expected"),
    [
        # A step ends with the target's own token, right or wrong, whose place nothing is proposed for.
        ([True] * 10, (8, 8)),
        ([False] * 3, (0, 6)),
        ([True, False, True, True], (3, 6)),
        ([], (0, 0)),
    ],
)
def test_a_step_ends_at_the_first_wrong_token_or_behind_the_proposal(
    is_right: list[bool], expected: tuple[int, int]
) -> None:
    assert accepted(is_right, 4) == expected
