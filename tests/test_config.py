from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from spec_stack import DecodeConfig, PrefillConfig, SamplingParams, Selection
from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.config import DEFAULT_MAX_TOKENS
from spec_stack.settings.options import meaning


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keep_rate", 0.0),
        ("keep_rate", 1.01),
        ("keep_rate", float("nan")),
        ("look_ahead", -1),
        ("pool_kernel", 12),
        ("pool_kernel", 0),
        ("chunk_size", 0),
        ("keep_first", -1),
        ("keep_last", 0),
        ("min_prompt_tokens", -1),
        ("prefill_chunk", 0),
    ],
)
def test_a_bad_prefill_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        PrefillConfig(**{field: value})


@pytest.mark.parametrize("gamma", [-1, 17])
def test_gamma_stays_between_0_and_16(gamma: int) -> None:
    with pytest.raises(ValueError, match="gamma"):
        DecodeConfig(gamma=gamma)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("stop", ("",)),
    ],
)
def test_a_bad_sampling_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


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


def test_an_unknown_policy_is_refused_where_it_is_configured() -> None:
    for junk in ("nope", 3, None):
        wrong: Any = junk
        with pytest.raises(ValueError, match="unknown policy"):
            DecodeConfig(policy=wrong)
    assert DecodeConfig(policy="fixed").policy == "fixed"


def test_numbers_of_other_libraries_are_taken() -> None:
    torch = pytest.importorskip("torch")
    for four in (torch.tensor(4), np.int64(4), np.array(4)):
        assert SamplingParams(max_tokens=four).max_tokens == 4
    assert SamplingParams(temperature=torch.tensor(0.5)).temperature == 0.5


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


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("keep_rate", []),
        ("keep_rate", [0.3]),
        ("keep_rate", ["ab"]),
        ("keep_rate", [(8000, 0.1), (2000, 0.3)]),
        ("keep_rate", [(2000, 0.3), (2000, 0.1)]),
        ("keep_rate", {2000: 0.3}),
        ("scoring_heads", [0, 1]),
        ("scoring_heads", "01"),
        ("scoring_heads", 3),
        ("draft_window", [8192]),
        ("draft_window", [8192, 0]),
    ],
)
def test_a_list_of_something_else_is_refused_by_name(field: str, given: Any) -> None:
    with pytest.raises(ValueError, match=field):
        PrefillConfig(**{field: given})


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


@pytest.mark.parametrize("lengths", [[], 2048, "2048", [0], [2048.5]])
def test_a_calibrations_lengths_are_checked(lengths: Any) -> None:
    with pytest.raises(ValueError, match="lengths"):
        CalibrateConfig(lengths)
    assert CalibrateConfig([2048, 4096]).lengths == (2048, 4096)


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
