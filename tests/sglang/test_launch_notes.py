"""What a launch and the doctor tell of graphs, memory and penalties. No SGLang here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spec_stack.sglang.launch_check import pool_note
from spec_stack.sglang.launch_messages import (
    graphs_note,
    num_graphs,
    penalty_advice,
    states_bytes,
)
from spec_stack.sglang.server_args import ServerConfig

# SGLang's own for 48 running requests under speculation.
_SIZES = [*range(1, 9), *range(10, 33, 2), 40, 44, 48]


def test_the_largest_gamma_is_captured_for_all_batches_and_the_others_for_those_that_meet_them() -> None:
    config = ServerConfig()
    note = graphs_note(config, _SIZES)
    assert num_graphs(config, _SIZES) == 23 * (2 + 2 + 3 + 3) + 20 * 3
    assert "gamma 4 for 20 batch sizes up to 32" in note
    assert "gamma 8 for 23 batch sizes up to 48. Gamma 8, the first one, is captured for all" in note
    assert graphs_note(config, None) == "none"


@pytest.mark.parametrize(
    ("gammas", "backend", "context_len", "page_size", "expected"),
    [
        # One target, one extension, gamma - 1 drafts, four tables each.
        ((4,), "fa3", 40_960, 1, 5 * 4 * 48 * 40_960 * 4),
        ((4,), "fa3", 40_960, 16, 5 * 4 * 48 * 2_560 * 4),
        ((1,), "triton", 8_192, 1, (2 * 2 * 8 + 2 + 8) * 48 * 8_192),
        ((1,), "flashinfer", 8_192, 1, (2 * 2 * 4 + 2 + 4) * 48 * 8_192 + (384 << 20)),
        ((0, 4), "trtllm_mha", 8_192, 1, 0),
    ],
)
def test_what_the_gammas_take_is_added_up(
    gammas: tuple[int, ...], backend: str, context_len: int, page_size: int, expected: int
) -> None:
    assert states_bytes(ServerConfig(gammas=gammas), _SIZES, context_len, page_size, backend) == expected


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
@pytest.mark.parametrize("sizes", [_SIZES, [1], [40, 48]])
def test_fewer_gammas_take_less(backend: str, sizes: Sequence[int]) -> None:
    taken = [
        states_bytes(ServerConfig(gammas=gammas), sizes, 40_960, 1, backend)
        for gammas in ((4,), (0, 4), (0, 2, 4), (0, 1, 2, 4, 8))
    ]
    assert taken == sorted(set(taken))


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


@pytest.mark.parametrize(("num_tokens", "said"), [(None, "65536 tokens"), (20_000, "20000 tokens")])
def test_the_drafts_pool_is_told_in_bytes(num_tokens: int | None, said: str) -> None:
    note = pool_note(ServerConfig(draft_pool_tokens=num_tokens), 114_688)
    assert note.startswith(f"{said} of 114688 bytes, {(num_tokens or 65_536) * 114_688 / 1e9:.2f} GB on each rank")
    assert ("a tenth of the memory" in note) == (num_tokens is None)
