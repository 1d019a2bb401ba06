"""A request's own options. No SGLang here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spec_stack.sglang.launch import pruning_note
from spec_stack.sglang.request import (
    RequestOptions,
    dense_reason,
    entry_text,
)
from spec_stack.sglang.server_args import ServerConfig

CONFIG = ServerConfig()
ASKS_NOTHING = SimpleNamespace(max_new_tokens=0)


def _parse(requested: dict[str, Any], config: ServerConfig) -> RequestOptions:
    return RequestOptions.parse({"spec_stack": requested}, config)


@pytest.mark.parametrize(
    "custom",
    [
        {"sparse_prefill": True},
        {"keep_rate": 1.1},
        {"keep_rate": "most"},
        {"gamma": 3},
        {"gamma": 4.0},
        {"gamma": True},
        {"policy": "speckv"},
        {"policy": {}},
        {"gamma": 4, "policy": "ema"},
        {"protect": 3},
        {"protect": [3, 4]},
        {"protect": [[4, 3]]},
        {"protect": [[-1, 3]]},
        {"protect": [[0, 1.5]]},
        {"protect": [[0, 10**9]]},
        {"protect": [[0, 1]] * 4097},
        {"protect": "0-5"},
        {"sparse_prefill": "draft_only"},
        {"sparse_prefill": "target"},
        {"specprefil": True},
    ],
)
def test_an_option_out_of_range_is_refused_by_name(custom: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(custom))):
        _parse(custom, CONFIG)


@pytest.mark.parametrize("requested", ["on", "[1]", "3", 3, ["on"]])
def test_options_are_an_object(requested: object) -> None:
    with pytest.raises(ValueError, match="must be an object of options"):
        RequestOptions.parse({"spec_stack": requested}, CONFIG)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"keep_rate": ' * 10_000, f'{{"question": {"[" * 5000}{"]" * 5000}}}']
)
def test_a_text_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"custom_params.spec_stack is nested too deeply"):
        RequestOptions.parse({"spec_stack": text}, CONFIG)


def test_an_object_nested_too_deeply_is_refused() -> None:
    entry: list[Any] = []
    for _ in range(5000):
        entry = [entry]
    for asked in (entry, {"gamma": entry}, {"protect": entry}):
        with pytest.raises(ValueError, match="nested too deeply"):
            entry_text(asked)
        with pytest.raises(ValueError, match="nested too deeply"):
            RequestOptions.parse({"spec_stack": asked}, CONFIG)


@pytest.mark.parametrize("name", ["sparse_prefill", "keep_rate", "max_dropped_attention", "follow_up"])
def test_an_option_beside_its_entry_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} belongs in custom_params\.spec_stack"):
        RequestOptions.parse({name: "off", "spec_stack": {"gamma": 4}}, CONFIG)


def test_nobody_sets_drafts_that_are_not_ours() -> None:
    scoring_only = ServerConfig(scoring_model="draft")
    for name, value in {"gamma": 0, "policy": "ema"}.items():
        with pytest.raises(ValueError, match=f"{name} set how SPEC_STACK drafts"):
            _parse({name: value}, scoring_only)
    assert _parse({"keep_rate": 0.3}, scoring_only).keep_rate == 0.3


def test_the_launch_says_what_a_longer_prompt_keeps_where_a_curve_says_less() -> None:
    curve = replace(CONFIG.prefill, keep_rate=((2048, 0.2), (8192, 0.1)), min_prompt_tokens=2048)
    assert "about 20 % (10 % at 8192)." in pruning_note(replace(CONFIG, prefill=curve), None, "")
    assert "about 20 %." in pruning_note(CONFIG, None, "")


@pytest.mark.parametrize(
    "requested", [{}, {"sparse_prefill": "draft_only"}, {"sparse_prefill": "off"}, {"protect": [[0, 3]]}]
)
def test_a_draft_with_slots_of_its_own_leaves_the_target_dense(requested: dict[str, Any]) -> None:
    config = ServerConfig.from_mapping({"sparse_prefill": "draft_only", "draft_kv_budget": 256})
    assert "of prompts of over 256 tokens the draft has 256 slots" in pruning_note(config, None, "")
    assert _parse(requested, config).prefill(config).sparse_prefill == requested.get("sparse_prefill", "draft_only")
    for other in ({"sparse_prefill": "auto"}, {"sparse_prefill": "on"}):
        with pytest.raises(ValueError, match="sparse_prefill"):
            _parse(other, config)
    for name, value in {"keep_rate": 0.3, "max_dropped_attention": 0.1, "follow_up": "afresh"}.items():
        with pytest.raises(ValueError, match=f"{name} set how prompts are pruned"):
            _parse({name: value}, config)


def test_a_request_may_ask_for_a_pruned_prompt_where_the_server_prunes_none() -> None:
    prunes_none = ServerConfig.from_mapping({"sparse_prefill": "off"})
    assert _parse({"sparse_prefill": "on"}, prunes_none).sparse_prefill == "on"


@pytest.mark.parametrize(
    "custom", [None, {}, {"mine": 3}, "text", {"gamma": 3}, {"keep_rate": None}, {"spec_stack": {"keep_rate": None}}]
)
def test_what_is_not_an_option_is_left_alone(custom: Any) -> None:
    assert RequestOptions.parse(custom, CONFIG) == RequestOptions()


def test_options_are_read() -> None:
    options = _parse({"sparse_prefill": "on", "keep_rate": 0.3, "gamma": 8, "protect": [[0, 4]]}, CONFIG)
    assert options == RequestOptions(sparse_prefill="on", keep_rate=0.3, gamma=8, protect=((0, 4),))
    assert options.prefill(CONFIG).keep_rate == 0.3
    assert _parse({"max_dropped_attention": 0.1}, CONFIG).prefill(CONFIG) == replace(
        CONFIG.prefill, max_dropped_attention=0.1
    )
    assert RequestOptions().prefill(CONFIG) == CONFIG.prefill


def test_protected_spans_are_sorted_and_do_not_overlap_and_many_are_refused_unread() -> None:
    requested = [[9, 12], [0, 4], [2, 5], [5, 6], [7, 7], [9, 10]]
    assert _parse({"protect": requested}, CONFIG).protect == ((0, 6), (9, 12))
    with pytest.raises(ValueError, match=r"at most 4096 token spans .* got 500000 entries"):
        _parse({"protect": [[0, 1]] * 500_000}, CONFIG)


@pytest.mark.parametrize(
    "requested",
    [
        {},
        {"protect": []},
        {"protect": [[4, 9], [0, 3]], "keep_rate": 0.3, "sparse_prefill": "on", "explain": True},
        {"gamma": 4, "follow_up": "freeze", "keep_rate": [[2048, 0.3], [8192, 0.1]]},
    ],
)
def test_options_travel_as_one_string(requested: dict[str, Any]) -> None:
    """SGLang's msgpack reads no nested lists in `custom_params`."""
    options = _parse(requested, CONFIG)
    sent = options.on_wire()
    assert isinstance(sent, str)
    assert RequestOptions.parse({"spec_stack": sent}, CONFIG) == options


@pytest.mark.parametrize(
    ("requested", "named"),
    [
        ({"return_logprob": True, "logprob_start_len": 0}, "logprobs"),
        ({"session": object()}, "session"),
        ({"multimodal_inputs": object()}, "multimodal"),
        ({"bootstrap_room": 5}, "different servers"),
        ({"return_hidden_states": True}, "hidden states"),
        ({"beam_group": object()}, "beams"),
        ({"logprob": SimpleNamespace(token_ids_logprob=[5]), "sampling_params": ASKS_NOTHING}, "its labels"),
    ],
)
def test_a_request_that_needs_the_whole_prompt_says_why(requested: dict[str, Any], named: str) -> None:
    reason = dense_reason(SimpleNamespace(origin_input_ids=[1, 2, 3], **requested))
    assert reason is not None
    assert named in reason


def test_an_id_of_a_session_matters_where_the_radix_cache_has_sessions() -> None:
    request = SimpleNamespace(origin_input_ids=[1, 2, 3], session_id="a")
    assert dense_reason(request) is None
    assert "session" in (dense_reason(request, has_sessions=True) or "")


@pytest.mark.parametrize("start", [-1, 3])
def test_output_logprobs_and_nothing_special_need_no_whole_prompt(start: int) -> None:
    request = SimpleNamespace(origin_input_ids=[1, 2, 3], return_logprob=True, logprob_start_len=start, session=None)
    assert dense_reason(request) is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"keep_rate": 3}, "keep_rate"),
        ({"prefill": {"on_scoring_failure": 1}}, "on_scoring_failure"),
        ({"follow_up": "thaw"}, "follow_up"),
        ({"draft_pool_tokens": 0}, "draft_pool_tokens"),
        ({"recall": {"recall_threshold": -1}}, "recall_threshold"),
        ({"recall": {"max_cached_tokens": 9}}, "recall.max_cached_tokens"),
        ({"max_gamma_by_batch_size": {"0": 2}}, "max_gamma_by_batch_size"),
        ({"max_gamma_by_batch_size": {"many": 2}}, "max_gamma_by_batch_size"),
        ({"max_gamma_by_batch_size": [2]}, "max_gamma_by_batch_size"),
        ({"policy": "bandit"}, "policy"),
        ({"gammas": [0]}, "gammas"),
        ({"gammas": [2, 99]}, "gammas"),
        ({"gammas": 4}, "gammas"),
        ({"prefill": {"positions": "original"}}, "unknown setting prefill.positions"),
        ({"prefill": {"draft_window": [8192, 512]}}, "draft_window is for Python"),
        (
            {"max_dropped_attention": 0.1, "sparse_prefill": "draft_only"},
            "max_dropped_attention checks pruned prompts",
        ),
        ({"prefill": {"num_scoring_layers": 1}}, "unknown setting prefill.num_scoring_layers"),
        ({"calibration": 3}, "calibration"),
        ({"scoring_model": ""}, "scoring_model"),
        ({"scoring_model": "draft", "gammas": [2], "policy": "ema"}, "policy, gammas set how SPEC_STACK drafts"),
        ({"scoring_model": "draft", "sparse_prefill": "draft_only"}, "needs SPEC_STACK's own draft"),
        ({"scoring_model": "draft", "draft_kv_budget": 256}, "draft_kv_budget set how SPEC_STACK drafts"),
        ({"draft_kv_budget": 256}, "draft_kv_budget are those of sparse_prefill 'draft_only'"),
        ({"prefill": 3}, "prefill"),
        ({"colour": "red"}, "colour"),
        ({"policy": "fixed", "policy_options": {"gamma": 3}}, "gamma 3"),
        ({"policy_options": {"speed": 3}}, "speed"),
    ],
)
def test_a_bad_setting_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        ServerConfig.from_mapping(values)
