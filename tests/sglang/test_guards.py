"""A failure of the plugin's own is logged with its traceback and counted, and its second way says the same."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.sglang.batch_positions import positions_of, positions_one_by_one
from spec_stack.sglang.guards import harmless, num_failures
from spec_stack.sglang.positions import PositionMap
from spec_stack.sglang.radix_keys import PlacedKey
from spec_stack.sglang.request_state import STATE


def test_a_failure_ends_its_block_alone_and_leaves_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    before = num_failures().get("a test", 0)
    with caplog.at_level(logging.ERROR), harmless("a test", "nothing is lost"):
        raise KeyError("from within")
    assert num_failures()["a test"] == before + 1
    assert "a test failed; nothing is lost" in caplog.text
    assert "KeyError: 'from within'" in caplog.text


def test_tracebacks_that_differ_by_a_number_alone_do_not_fill_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for number in range(50):
            with harmless("a test of many", "nothing is lost"):
                raise KeyError(number)
    assert caplog.text.count("a test of many failed") == 20
    assert num_failures()["a test of many"] == 50
    with caplog.at_level(logging.ERROR), harmless("a test of many", "nothing is lost"):
        raise KeyError("another failure")
    assert "another failure" in caplog.text


@given(st.sets(st.integers(0, 30), min_size=1).map(sorted), st.lists(st.integers(0, 4095), max_size=60))
def test_a_key_made_token_by_token_is_the_same_key(kept: list[int], token_ids: list[int]) -> None:
    key = PlacedKey.of(PositionMap(kept, 40), None)
    assert key.place_one_by_one(token_ids) == key.place(token_ids)


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("mode", ["decode", "verify", "extend"])
def test_positions_mapped_one_by_one_are_the_same_positions(mode: str, is_draft: bool) -> None:
    requests: list[Any] = [
        SimpleNamespace(**{STATE: SimpleNamespace(positions=PositionMap([0, 4, 9], 10))}),
        SimpleNamespace(),
        SimpleNamespace(**{STATE: SimpleNamespace(positions=PositionMap([5, 6], 7))}),
    ]
    slots = {"decode": [3, 7, 2], "verify": [3, 4, 5, 7, 8, 9, 2, 3, 4], "extend": [0, 1, 2, 7, 8, 1, 2, 3]}[mode]
    batch = SimpleNamespace(
        positions=torch.tensor(slots, dtype=torch.int32),
        extend_seq_lens_cpu=[3, 2, 3] if mode == "extend" else None,
        forward_mode=SimpleNamespace(
            is_idle=lambda: False, is_decode=lambda: mode == "decode", is_target_verify=lambda: mode == "verify"
        ),
    )
    runner: Any = SimpleNamespace(
        is_draft_worker=is_draft,
        server_args=SimpleNamespace(speculative_algorithm="SPEC_STACK", speculative_draft_attention_backend=None),
        decode_attention_backend_str="triton",
    )
    fast, slow = positions_of(batch, requests, runner), positions_one_by_one(batch, requests, runner)
    assert fast is not None
    assert slow is not None
    assert (slow.tolist(), slow.dtype) == (fast.tolist(), fast.dtype)
