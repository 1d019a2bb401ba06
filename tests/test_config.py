from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from spec_stack import DecodeConfig, PrefillConfig, SamplingParams, Selection, SessionConfig
from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.config import DEFAULT_MAX_TOKENS, HubConfig, LoadConfig
from spec_stack.settings.options import meaning

NAN, INF = float("nan"), float("inf")
CURVES = ([], [0.3], ["ab"], [(8000, 0.1), (2000, 0.3)], [(2000, 0.3), (2000, 0.1)], {2000: 0.3})
BAD: dict[type, dict[str, Sequence[Any]]] = {
    PrefillConfig: {
        "keep_rate": (0.0, 1.01, NAN, *CURVES),
        "look_ahead": [-1],
        "pool_kernel": (12, 0),
        "chunk_size": [0],
        "keep_first": [-1],
        "keep_last": [0],
        "min_prompt_tokens": [-1],
        "prefill_chunk": [0],
        "scoring_heads": ([0, 1], "01", 3),
        "draft_window": ([8192], [8192, 0]),
    },
    DecodeConfig: {"gamma": (-1, 17), "policy": ("nope", 3, None)},
    SamplingParams: {
        "max_tokens": [0],
        "temperature": (-0.1, NAN),
        "top_k": [-2],
        "top_p": (0.0, 1.5),
        "min_p": (-0.1, 1.1),
        "stop": [("",)],
        "max_time": (0, -1, INF, NAN, "1", True),
        # What fp32 cannot hold.
        "logit_bias": [{5: 1e40}],
        "repetition_penalty": (1e-44, 1e300),
    },
    SessionConfig: {
        "recall": [1],
        "recall_threshold": (-1, "4"),
        "max_recalled_chunks": [0],
        "recall_word_threshold": (0, "1"),
    },
    LoadConfig: {"precision": ["int3"], "draft_precision": ["fp64"], "draft_step": ["graph"]},
    HubConfig: {"revision": [""], "token": [3], "trust_remote_code": ["yes"]},
    CalibrateConfig: {"lengths": ([], 2048, "2048", [0], [2048.5])},
}


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [(config, field, value) for config, bad in BAD.items() for field, values in bad.items() for value in values],
)
def test_a_bad_value_is_refused_by_name(config: type, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        config(**{field: value})


def test_the_three_variants_of_the_paper_are_configurations() -> None:
    raw, full, ahead = PrefillConfig.raw(0.1), PrefillConfig.full(0.1), PrefillConfig.full_look_ahead(0.1)
    assert (raw.look_ahead, raw.pool_kernel, raw.chunk_size) == (0, 1, 1)
    assert (full.look_ahead, full.pool_kernel, full.chunk_size) == (0, 13, 32)
    assert (ahead.look_ahead, ahead.pool_kernel, ahead.chunk_size) == (8, 13, 32)
    assert raw.keep_rate == full.keep_rate == ahead.keep_rate == 0.1
    for variant in (raw, full, ahead):
        assert (variant.granularity, variant.scoring_queries, variant.head_reduction) == ("chunks", "look_ahead", "max")
        assert (variant.scorer, variant.first_scoring_layer, variant.scoring_heads) == ("attention", 0, None)
    assert PrefillConfig.raw().keep_rate == PrefillConfig.full().keep_rate == PrefillConfig().keep_rate


@pytest.mark.parametrize("positions", [[0, 2], [2, 1, 3], [1, 1, 2], [-1, 0, 1], [0, 1, 9]])
def test_a_selection_is_sorted_unique_and_inside_the_prompt(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="positions"):
        Selection([5, 6, 7], positions, num_prompt_tokens=9)


def test_the_help_of_max_tokens_names_the_default() -> None:
    """The site reads it as a literal, so it cannot be put in."""
    assert f"None is {DEFAULT_MAX_TOKENS}," in meaning(SamplingParams, "max_tokens")


def test_numbers_and_lists_of_other_kinds_are_taken() -> None:
    assert CalibrateConfig([2048, 4096]).lengths == (2048, 4096)
    for four in (torch.tensor(4), np.int64(4), np.array(4)):
        assert type(SamplingParams(max_tokens=four).max_tokens) is int
    for half in (torch.tensor(0.5), np.float64(0.5)):
        assert type(SamplingParams(temperature=half).temperature) is float
    assert SamplingParams(stop="ab").stop_strings == SamplingParams(stop=["ab"]).stop_strings == ("ab",)


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("keep_rate", [(2000, 0.3), (8000, 0.1)], ((2000, 0.3), (8000, 0.1))),
        ("keep_rate", ([2000, 0.3], [8000, 0.1]), ((2000, 0.3), (8000, 0.1))),
        ("keep_rate", [(np.int64(2000), np.float64(0.3))], ((2000, 0.3),)),
        ("scoring_heads", [(0, 1)], ((0, 1),)),
        ("scoring_heads", np.array([[0, 1], [2, 3]]), ((0, 1), (2, 3))),
        ("draft_window", [8192, 512], (8192, 512)),
    ],
)
def test_lists_are_taken_where_a_configuration_holds_tuples(field: str, given: Any, kept: Any) -> None:
    config = PrefillConfig(**{field: given})
    assert getattr(config, field) == kept
    assert (config, hash(config)) == (PrefillConfig(**{field: kept}), hash(PrefillConfig(**{field: kept})))


def test_a_list_that_is_changed_later_changes_no_configuration() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop, bad_words_ids=[[1, 2]], stop_token_ids=np.array([3]))
    stop.append("b")
    assert (params.stop_strings, params.bad_words_ids, params.stop_token_ids) == (("a",), ((1, 2),), (3,))


def test_a_window_of_long_prompts_begins_at_their_length() -> None:
    config = PrefillConfig(draft_window=(8192, 512))
    assert [config.window_for(length) for length in (8191, 8192, 8193)] == [None, 512, 512]
    assert PrefillConfig(draft_window=512).window_for(1) == 512
    assert PrefillConfig().window_for(100_000) is None


def test_a_changed_configuration_is_checked_without_reading_its_types_again() -> None:
    config, num_calls = PrefillConfig(), 0

    def count(frame: FrameType, event: str, value: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        replace(config, keep_rate=0.3)
    finally:
        sys.setprofile(None)
    # Every request changes it, on a server in the scheduler's loop.
    assert num_calls < 300
