"""What a launch and the doctor tell of graphs and penalties. No SGLang here."""

from __future__ import annotations

from typing import Any

import pytest

from spec_stack.sglang.launch import graphs_note, penalty_advice
from spec_stack.sglang.server_args import ServerConfig

# SGLang's own for 48 running requests under speculation.
_SIZES = [*range(1, 9), *range(10, 33, 2), 40, 44, 48]


def test_the_largest_gamma_is_captured_for_all_batches_and_the_others_for_those_that_meet_them() -> None:
    config = ServerConfig()
    note = graphs_note(config, _SIZES)
    assert note.startswith(f"{23 * (2 + 2 + 3 + 3) + 20 * 3} in all: ")
    assert "gamma 4 for 20 batch sizes up to 32" in note
    assert note.endswith("gamma 8 for 23 batch sizes up to 48")
    assert graphs_note(config, None) == "none"


@pytest.mark.parametrize(
    ("sampling", "is_warned"),
    [
        ({"repetition_penalty": 1.05, "top_p": 0.8}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"repetition_penalty": 1.0}, False),
        ({"repetition_penalty": 1}, False),
        ({"temperature": 0.7}, False),
        ({}, False),
    ],
)
def test_a_checkpoints_own_penalty_is_a_warning_that_names_the_way_out(
    sampling: dict[str, Any], is_warned: bool
) -> None:
    advice = penalty_advice(sampling)
    assert (advice is not None) == is_warned
    assert not is_warned or "--sampling-defaults openai" in (advice or "")
