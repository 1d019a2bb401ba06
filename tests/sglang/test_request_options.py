"""A request's own options. No SGLang here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spec_stack.sglang.launch_notes import pruning_note
from spec_stack.sglang.request_state import (
    RequestOptions,
    dense_reason,
)
from spec_stack.sglang.server_args import ServerConfig

CONFIG = ServerConfig()


@pytest.mark.parametrize(
    "custom",
    [
        {"specprefill": 1},
        {"specprefill": "on"},
        {"keep_rate": 0},
        {"keep_rate": 1.1},
        {"keep_rate": True},
        {"keep_rate": [0.2]},
        {"gamma": 3},
        {"gamma": 4.0},
        {"gamma": True},
        {"gamma": [4]},
        {"policy": "oracle"},
        {"policy": {}},
        {"gamma": 4, "policy": "ema"},
        {"protect": 3},
        {"protect": [3, 4]},
        {"protect": [[4, 3]]},
        {"protect": [[-1, 3]]},
        {"protect": [[0, 1.5]]},
        {"protect": [[0, 10**9]]},
        {"prune": "draft"},
        {"prune": "target"},
        {"specprefill": True, "prune": "none"},
        {"keep_rate": 0.2, "spec_stack": {"keep_rate": 0.3}},
        {"spec_stack": {"specprefil": True}},
        {"spec_stack": 3},
    ],
)
def test_an_option_out_of_range_is_refused_by_name(custom: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(custom))):
        RequestOptions.parse(custom, CONFIG)


def test_nobody_sets_drafts_that_are_not_ours() -> None:
    beside = ServerConfig(scoring_model="draft")
    for name, value in {"gamma": 0, "policy": "ema", "signals": True}.items():
        with pytest.raises(ValueError, match=f"{name} set how SPEC_STACK drafts"):
            RequestOptions.parse({name: value}, beside)
    assert RequestOptions.parse({"signals": False}, beside).signals is False
    assert RequestOptions.parse({"keep_rate": 0.3}, beside).keep_rate == 0.3


def test_the_launch_says_what_a_longer_prompt_keeps_where_a_curve_says_less() -> None:
    curve = replace(CONFIG.prefill, keep_rate=((2048, 0.2), (8192, 0.1)), min_prompt_tokens=2048)
    assert "about 20 % (10 % at 8192)." in pruning_note(replace(CONFIG, prefill=curve), None, "")
    assert "about 20 %." in pruning_note(CONFIG, None, "")


@pytest.mark.parametrize("asked", [{}, {"prune": "draft"}, {"specprefill": False}, {"protect": [[0, 3]]}])
def test_a_draft_with_slots_of_its_own_leaves_the_target_dense(asked: dict[str, Any]) -> None:
    config = ServerConfig.from_mapping({"prune": "draft", "draft_slots": 256})
    assert "of prompts of over 256 tokens the draft has 256 slots" in pruning_note(config, None, "")
    assert RequestOptions.parse(asked, config).prefill(config).prune == "draft"
    for other in ({"prune": "both"}, {"prune": "none"}, {"specprefill": True}):
        with pytest.raises(ValueError, match="prune"):
            RequestOptions.parse(other, config)
    for name, value in {"keep_rate": 0.3, "follow_up": "afresh"}.items():
        with pytest.raises(ValueError, match=f"{name} set how prompts are pruned"):
            RequestOptions.parse({name: value}, config)


def test_who_asks_for_a_pruned_prompt_is_told_what_stands_against_it() -> None:
    for custom, config, named in (
        ({"specprefill": True}, ServerConfig.from_mapping({"prune": "none"}), "this server's is 'none'"),
        ({"specprefill": True, "prune": "none"}, CONFIG, "yours is 'none'"),
    ):
        with pytest.raises(ValueError, match=named):
            RequestOptions.parse(custom, config)
    prunes_none = ServerConfig.from_mapping({"prune": "none"})
    assert RequestOptions.parse({"specprefill": True, "prune": "both"}, prunes_none).specprefill


@pytest.mark.parametrize("custom", [None, {}, {"mine": 3}, "text", {"keep_rate": None}])
def test_what_is_not_an_option_is_left_alone(custom: Any) -> None:
    assert RequestOptions.parse(custom, CONFIG) == RequestOptions()


def test_options_are_read() -> None:
    options = RequestOptions.parse({"specprefill": True, "keep_rate": 0.3, "gamma": 8, "protect": [[0, 4]]}, CONFIG)
    assert options == RequestOptions(specprefill=True, keep_rate=0.3, gamma=8, protect=((0, 4),))
    assert options == RequestOptions.parse(
        {"keep_rate": 0.3, "spec_stack": {"specprefill": True, "keep_rate": 0.3, "gamma": 8, "protect": [[0, 4]]}},
        CONFIG,
    )
    assert options.prefill(CONFIG).keep_rate == 0.3
    assert RequestOptions().prefill(CONFIG) == CONFIG.prefill


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"return_logprob": True, "logprob_start_len": 0}, "logprobs"),
        ({"session": object()}, "session"),
        ({"multimodal_inputs": object()}, "multimodal"),
        ({"bootstrap_room": 5}, "different servers"),
        ({"return_hidden_states": True}, "hidden states"),
        ({"beam_group": object()}, "beams"),
    ],
)
def test_a_request_that_needs_the_whole_prompt_says_why(asked: dict[str, Any], named: str) -> None:
    reason = dense_reason(SimpleNamespace(origin_input_ids=[1, 2, 3], **asked))
    assert reason is not None
    assert named in reason


@pytest.mark.parametrize("start", [-1, 3])
def test_output_logprobs_and_nothing_special_need_no_whole_prompt(start: int) -> None:
    request = SimpleNamespace(origin_input_ids=[1, 2, 3], return_logprob=True, logprob_start_len=start, session=None)
    assert dense_reason(request) is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"keep_rate": 3}, "keep_rate"),
        ({"min_prompt_tokens": -1}, "min_prompt_tokens"),
        ({"threshold": 9}, "threshold"),
        ({"prefill": {"on_scoring_error": 1}}, "on_scoring_error"),
        ({"follow_up": "thaw"}, "follow_up"),
        ({"draft_pool_tokens": 0}, "draft_pool_tokens"),
        ({"recall": {"restore_threshold": -1}}, "restore_threshold"),
        ({"recall": {"max_cached_tokens": 9}}, "recall.max_cached_tokens"),
        ({"recall": {"chunks": 9}}, "recall.chunks"),
        ({"max_gamma_by_batch_size": {"0": 2}}, "max_gamma_by_batch_size"),
        ({"max_gamma_by_batch_size": {"many": 2}}, "max_gamma_by_batch_size"),
        ({"max_gamma_by_batch_size": [2]}, "max_gamma_by_batch_size"),
        ({"policy": "bandit"}, "policy"),
        ({"policy": "batch-throughput"}, "policy"),
        ({"gammas": []}, "gammas"),
        ({"gammas": [0]}, "gammas"),
        ({"gammas": [2, 99]}, "gammas"),
        ({"gammas": [2.5]}, "gammas"),
        ({"gammas": 4}, "gammas"),
        ({"prefill": {"keep": 1}}, "prefill.keep"),
        ({"prefill": {"draft_window": 0}}, "draft_window"),
        ({"prefill": {"scoring_layers": 0}}, "scoring_layers"),
        ({"prefill": {"scoring_heads": [[1]]}}, "scoring_heads"),
        ({"calibration": 3}, "calibration"),
        ({"scoring_model": ""}, "scoring_model"),
        ({"scoring_model": "draft", "gammas": [2], "policy": "ema"}, "policy, gammas set how SPEC_STACK drafts"),
        ({"scoring_model": "draft", "prune": "draft"}, "prune 'draft' is of SPEC_STACK's own draft"),
        ({"scoring_model": "draft", "draft_slots": 256}, "draft_slots set how SPEC_STACK drafts"),
        ({"draft_slots": 256}, "draft_slots are those of prune 'draft'"),
        ({"keep_rate": [[0, 0.5]]}, "keep_rate"),
        ({"prefill": 3}, "prefill"),
        ({"colour": "red"}, "colour"),
        ({"policy": "fixed", "policy_options": {"gamma": 3}}, "gamma 3"),
        ({"policy_options": {"speed": 3}}, "speed"),
    ],
)
def test_a_bad_setting_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        ServerConfig.from_mapping(values)
