"""The serving plugin's parts that need no SGLang: positions, options, settings, gamma for a batch."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord
from spec_stack.controller.registry import make_batch_policy
from spec_stack.sglang import plugin, support
from spec_stack.sglang.batch_policy import BatchPolicy
from spec_stack.sglang.launch_notes import pruning_note
from spec_stack.sglang.positions import BatchMap, BatchOffsets, PositionMap, protect_kv_lengths
from spec_stack.sglang.reports import ReplyBooks, ReplyInfo, correct_acceptance, vllm_metrics, with_report
from spec_stack.sglang.request_state import (
    STATE,
    PrefillReport,
    RequestOptions,
    RequestState,
    attach,
    dense_reason,
    note_step,
)
from spec_stack.sglang.server_args import BATCH_POLICIES, ENVIRONMENT, ServerConfig, add_flags
from tests.support import controller_data
from tests.support.sampling_settings import asked

CPU = torch.device("cpu")


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[int], int]:
    num_prompt_tokens = draw(st.integers(1, 40))
    kept = draw(st.sets(st.integers(0, num_prompt_tokens - 1)))
    # What comes back of an earlier turn stands behind what was written after it; the last token is always the last.
    order = draw(st.permutations(sorted(kept - {num_prompt_tokens - 1}))) if draw(st.booleans()) else sorted(kept)
    return [*(at for at in order if at != num_prompt_tokens - 1), num_prompt_tokens - 1], num_prompt_tokens


@given(selections(), st.integers(0, 12))
def test_slots_stand_where_their_tokens_stood(selection: tuple[list[int], int], num_generated: int) -> None:
    kept, num_prompt_tokens = selection
    whole = [*kept, *range(num_prompt_tokens, num_prompt_tokens + num_generated)]
    target = BatchMap([PositionMap(kept, num_prompt_tokens)], is_draft=False, device=CPU)
    assert target(torch.arange(len(whole)), [len(whole)]).tolist() == whole


@given(selections(), st.integers(1, 12))
def test_the_drafts_slots_stand_one_before_the_token_they_hold(
    selection: tuple[list[int], int], num_generated: int
) -> None:
    """Slot j of SGLang's draft holds token j + 1."""
    kept, num_prompt_tokens = selection
    whole = [*kept, *range(num_prompt_tokens, num_prompt_tokens + num_generated)]
    draft = BatchMap([PositionMap(kept, num_prompt_tokens)], is_draft=True, device=CPU)
    mapped = draft(torch.arange(len(whole) - 1), [len(whole) - 1])
    assert mapped.tolist() == [max(0, position - 1) for position in whole[1:]]


@given(
    st.lists(st.none() | selections(), min_size=1, max_size=5).filter(any), st.booleans(), st.integers(1, 6), st.data()
)
def test_behind_the_prompt_one_offset_per_request_says_the_same(
    requests: list[tuple[list[int], int] | None], is_draft: bool, width: int, data: st.DataObject
) -> None:
    maps = [None if it is None else PositionMap(*it) for it in requests]
    first = [0 if it is None else len(it[0]) - is_draft + data.draw(st.integers(0, 9)) for it in requests]
    slots = torch.tensor([start + at for start in first for at in range(width)], dtype=torch.int32)
    by_table = BatchMap(maps, is_draft, CPU)(slots, [width] * len(maps))
    by_offset = BatchOffsets(maps, CPU)(slots)
    assert by_offset.tolist() == by_table.tolist()
    assert by_offset.dtype == slots.dtype


def test_slots_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(RuntimeError, match="shared evenly"):
        BatchOffsets([None, PositionMap([0], 1)], CPU)(torch.arange(5))


def test_a_batch_is_mapped_request_by_request() -> None:
    pruned, other = PositionMap([0, 4, 9], 10), PositionMap([5, 6], 7)
    slots = torch.tensor([0, 1, 2, 7, 8, 1, 2, 3], dtype=torch.int32)
    mapped = BatchMap([pruned, None, other], is_draft=False, device=CPU)(slots, [3, 2, 3])
    assert mapped.tolist() == [0, 4, 9, 7, 8, 6, 7, 8]
    assert mapped.dtype == torch.int32


def test_lengths_that_do_not_fit_a_batch_are_refused() -> None:
    with pytest.raises(RuntimeError, match="nothing is mapped"):
        BatchMap([None, PositionMap([0], 1)], is_draft=False, device=CPU)(torch.arange(5), [2, 2])


def test_a_protected_draft_backend_sees_lengths_only_while_it_builds() -> None:
    seen: list[list[int]] = []

    class Backend:
        topk = 1

        def common_template(self, forward_batch: Any) -> None:
            seen.append(forward_batch.positions.tolist())
            raise ValueError("from within")

    batch = SimpleNamespace(positions=torch.tensor([90, 7]), seq_lens=torch.tensor([30, 7]))
    backend = protect_kv_lengths(Backend())
    with pytest.raises(ValueError, match="from within"):
        backend.common_template(batch)
    assert seen == [[30, 7]]
    assert batch.positions.tolist() == [90, 7]


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
        {"keep_rate": 0.2, "spec_stack": {"keep_rate": 0.3}},
        {"spec_stack": {"specprefil": True}},
        {"spec_stack": 3},
    ],
)
def test_an_option_out_of_range_is_refused_by_name(custom: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(custom))):
        RequestOptions.parse(custom, CONFIG)


def test_the_launch_says_what_a_longer_prompt_keeps_where_a_curve_says_less() -> None:
    curve = replace(CONFIG.prefill, keep_rate=((2048, 0.2), (8192, 0.1)), min_prompt_tokens=2048)
    assert "about 20 % (10 % at 8192)." in pruning_note(replace(CONFIG, prefill=curve), None, "")
    assert "about 20 %." in pruning_note(CONFIG, None, "")


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


@pytest.mark.parametrize("policy", BATCH_POLICIES)
@pytest.mark.parametrize("gammas", [(0, 1, 2, 4, 8), (3,), (0, 2), (16,)])
def test_every_policy_for_batches_is_made_from_any_gammas(policy: str, gammas: tuple[int, ...]) -> None:
    made = ServerConfig(policy=policy, gammas=gammas).make_policy(policy)
    context = StepContext(0, gammas[-1], None, "fp32", batch_size=2)
    assert 0 <= made.choose(context) <= gammas[-1]
    assert policy in made.name


def test_flags_reach_another_process_through_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ENVIRONMENT, "{}")
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"keep_rate": 0.5, "policy": "ema", "prefill": {"chunk_size": 16}}))
    parser = argparse.ArgumentParser()
    add_flags(parser)
    namespace = parser.parse_args(["--spec-stack-config", str(path), "--spec-stack-keep-rate", "0.1"])
    assert vars(namespace) == {}
    parser.parse_args(["--spec-stack-gammas", "0", "4", "--spec-stack-min-prompt-tokens", "77"])
    config = ServerConfig.from_environment()
    assert (config.prefill.keep_rate, config.prefill.chunk_size, config.prefill.min_prompt_tokens) == (0.1, 16, 77)
    assert (config.policy, config.gammas) == ("ema", (0, 4))


def test_a_curve_of_keep_rates_comes_from_a_file() -> None:
    config = ServerConfig.from_mapping({"keep_rate": [[1000, 0.5], [4000, 0.1]]})
    assert config.prefill.rate_for(500) == 0.5
    assert config.prefill.rate_for(9000) == 0.1


@pytest.mark.parametrize("value", ["{", "[]", "3"])
def test_a_broken_environment_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(ENVIRONMENT, value)
    with pytest.raises(ValueError, match=ENVIRONMENT):
        ServerConfig.from_environment()


@pytest.mark.parametrize("found", ["0.5.19", "0.6.0", "0.5.24", "1.0", "0.5.post1"])
def test_a_version_of_sglang_out_of_range_ends_a_launch_that_asks_for_the_algorithm(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(support, "version", lambda name: found)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--speculative-algorithm", "spec_stack"])
    with pytest.raises(SystemExit, match=f"0.5.20 to 0.5.23, and this is {found}"):
        plugin.register()
    monkeypatch.setattr(sys, "argv", ["launch_server", "--speculative-algorithm=SPEC_STACK"])
    with pytest.raises(SystemExit):
        plugin.register()
    monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "spec_stack/assets/target"])
    with pytest.raises(RuntimeError, match="install one of those"):
        plugin.register()


@pytest.mark.parametrize("found", ["0.5.20", "0.5.21", "0.5.22.post1", "0.5.23"])
def test_the_versions_in_range_pass(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(support, "version", lambda name: found)
    support.check_version()


def _state(options: RequestOptions | None = None) -> RequestState:
    report = PrefillReport(
        num_prompt_tokens=9,
        num_kept_tokens=4,
        num_scored_tokens=9,
        num_draft_tokens=9,
        num_protected_tokens=0,
        num_cached_tokens=0,
        num_recalled_tokens=0,
        follow_up="recall",
        specprefill=True,
        specprefill_reason="on",
        outcome="pruned",
        keep_rate=4 / 9,
        scoring_s=0.1,
        policy="fixed",
    )
    return RequestState(options or RequestOptions(), report)


def _request(rid: str, options: RequestOptions | None = None) -> Any:
    request = SimpleNamespace(
        rid=rid,
        output_ids=[1],
        customized_info=None,
        is_retracted=False,
        finished=lambda: False,
        sampling_params=asked(),
    )
    attach(request, _state(options))
    return request


def test_what_travels_with_tokens_adds_up_to_the_reply() -> None:
    request = _request("a")
    for gamma, num_accepted in ((4, 2), (0, 0), (8, 8)):
        note_step(request, controller_data.step(gamma, num_accepted))
        request.output_ids += [0] * (num_accepted + 1)
    carried = request.customized_info[STATE]
    assert len(carried) == len(request.output_ids)
    reply = ReplyInfo()
    assert reply.meta_info(is_finished=False) is None
    # SGLang hands over slices of it, as the tokens go out.
    for start in range(0, len(carried), 3):
        reply.add(carried[start : start + 3])
    unfinished, info = reply.meta_info(is_finished=False), reply.meta_info(is_finished=True)
    assert info is not None
    assert unfinished == {key: value for key, value in info.items() if key not in ("gamma_trace", "accepted_trace")}
    assert (info["num_prompt_tokens"], info["num_kept_tokens"], info["specprefill"]) == (9, 4, True)
    assert (info["gamma_trace"], info["num_proposed"], info["num_accepted"]) == ([4, 0, 8], 12, 10)


def test_a_moving_gammas_acceptance_is_of_what_was_proposed() -> None:
    """SGLang takes the widest gamma for every step's: eight proposed in each of three."""
    report = {"num_proposed": 12, "num_accepted": 9, "gamma_trace": [4, 0, 8], "accepted_trace": [1, 0, 8]}
    meta_info = {"spec_accept_rate": 9 / 24, "spec_num_proposed_drafts": 24, "spec_verify_ct": 3}
    correct_acceptance(meta_info, report)
    assert meta_info["spec_accept_rate"] == 0.75
    assert (meta_info["spec_num_proposed_drafts"], meta_info["spec_num_correct_drafts"]) == (12, 9)
    shape = vllm_metrics(report)["speculative_decoding"]
    assert shape["mean_acceptance_length"] == 4
    assert shape["draft_acceptance_rate"] == 0.75
    assert shape["acceptance_histogram"] == [1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert (shape["num_spec_steps"], shape["num_draft_tokens"], shape["num_spec_tokens"]) == (3, 12, 8)
    nothing = {"num_proposed": 0, "num_accepted": 0, "gamma_trace": [], "accepted_trace": []}
    correct_acceptance(meta_info, nothing)
    assert meta_info["spec_accept_rate"] == 0
    assert vllm_metrics(nothing)["speculative_decoding"]["mean_acceptance_length"] == 1


def test_an_openai_stream_carries_the_report_in_its_usage_chunk_alone() -> None:
    report = {"num_proposed": 4, "num_accepted": 2, "gamma_trace": [4], "accepted_trace": [2], "outcome": "pruned"}
    books = ReplyBooks(None)
    events = [
        'data: {"choices":[{"delta":{"content":"\\"choices\\":[] \\"usage\\":{"}}]}\n\n',
        'data: {"id":"a","choices":[],"usage":{"prompt_tokens":9}}\n\n',
        "data: [DONE]\n\n",
    ]

    async def stream() -> Any:
        for number, event in enumerate(events):
            if number == 1:
                books.close({"id": "a"}, report, is_counted=True)
            yield event

    async def collect() -> list[str]:
        return [event async for event in with_report(stream(), lambda: books)]

    first, last, done = asyncio.run(collect())
    assert (first, done) == (events[0], events[2])
    chunk = json.loads(last.removeprefix("data: "))
    assert (chunk["id"], chunk["usage"], chunk["spec_stack"]) == ("a", {"prompt_tokens": 9}, report)
    assert chunk["metrics"]["speculative_decoding"]["num_draft_tokens"] == 4


def test_a_step_after_a_retraction_is_noted_at_its_own_token() -> None:
    request = _request("a")
    note_step(request, controller_data.step(4, 3))
    request.output_ids = [1, 1]
    note_step(request, controller_data.step(2, 0))
    assert request.customized_info[STATE][1:] == [[4, 3], [2, 0]]
    request.output_ids = [1, 1, 1, 1, 1]
    note_step(request, controller_data.step(1, 1))
    assert request.customized_info[STATE][5] == [1, 1]


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _run(gamma: BatchPolicy, clock: _Clock, requests: list[Any], accepted: int, seconds: Any) -> int:
    gamma.begin_step(requests)
    chosen = gamma.get_steps_for_batch(len(requests))
    clock.now += seconds(chosen)
    gamma.on_verify_complete([min(accepted, chosen)] * len(requests), len(requests))
    return chosen


@pytest.mark.parametrize(
    ("accepted", "per_token_s", "best"),
    [(8, 0.01, 8), (0, 0.2, 0), (2, 0.12, 2)],
)
def test_a_batch_settles_on_the_gamma_with_most_tokens_per_second(accepted: int, per_token_s: float, best: int) -> None:
    clock = _Clock()
    gamma = BatchPolicy(ServerConfig(), "fp32", clock=clock)
    requests = [_request(str(index)) for index in range(3)]
    chosen = [_run(gamma, clock, requests, accepted, lambda drafted: 1 + per_token_s * drafted) for _ in range(200)]
    assert chosen[100:].count(best) > 85


def test_a_prefill_between_steps_is_not_their_cost() -> None:
    clock = _Clock()
    gamma = BatchPolicy(ServerConfig(gammas=(1, 8)), "fp32", clock=clock)
    requests = [_request("a")]
    chosen = []
    for step in range(300):
        if step % 3 == 0:
            gamma.something_else_runs()
            clock.now += 500
        chosen.append(_run(gamma, clock, requests, 8, lambda drafted: 1 + 0.01 * drafted))
    assert chosen[150:].count(8) > 140


def test_where_every_step_follows_a_prefill_the_batch_still_drafts() -> None:
    """Short replies under load: no step's seconds are ever known, and plain decoding must not win by that."""
    clock = _Clock()
    gamma = BatchPolicy(ServerConfig(), "fp32", clock=clock)
    chosen = []
    for _ in range(80):
        gamma.something_else_runs()
        chosen.append(_run(gamma, clock, [_request("a")], 8, lambda drafted: 1))
    assert set(chosen[50:]) == {4}


def test_a_stall_between_steps_is_not_their_cost() -> None:
    """Under overlap, scoring may hold up a step that was begun before it."""
    clock = _Clock()
    gamma = BatchPolicy(ServerConfig(gammas=(1, 8)), "fp32", clock=clock)
    requests = [_request("a")]
    chosen = []
    for step in range(300):
        gamma.begin_step(requests)
        chosen.append(gamma.get_steps_for_batch(1))
        clock.now += 1 + 0.01 * chosen[-1]
        if step % 2 and chosen[-1] == 8:
            gamma.something_else_runs()
            clock.now += 500
        gamma.on_verify_complete([chosen[-1]], 1)
    assert chosen[150:].count(8) > 140


def test_a_late_result_is_charged_to_its_own_batch_size() -> None:
    """Eight requests, then one: the first step's cost comes in while the second runs."""
    policy = make_batch_policy("throughput", gammas=(1, 8), trials=1)

    def choose(step: int, batch_size: int) -> int:
        return policy.choose(StepContext(step, 8, None, "fp32", batch_size=batch_size))

    def observe(step: int, gamma: int, seconds: float) -> None:
        policy.observe(
            StepRecord(
                "a", step, "", "fp32", "", False, 1.0, gamma, gamma, gamma + 1, DraftSignals(), 0.0, seconds, 0.0
            )
        )

    assert choose(0, 8) == 1
    assert choose(1, 1) == 1
    observe(0, 1, 100.0)
    observe(1, 1, 1.0)
    # Both sizes have tried 1, so both now try 8.
    assert [choose(2, 1), choose(3, 8)] == [8, 8]


def test_tokens_of_a_request_that_is_gone_are_not_counted() -> None:
    gamma = BatchPolicy(ServerConfig(policy="fixed", policy_options={"gamma": 4}), "fp32")
    stays, gone = _request("a"), _request("b")
    gamma.begin_step([stays, gone])
    gamma.get_steps_for_batch(2)
    gone.is_retracted = True
    gamma.on_verify_complete([3, 3], 2)
    assert len(stays.customized_info[STATE]) == 5
    assert len(gone.customized_info[STATE]) == 1


def test_where_all_ask_for_a_gamma_the_batch_drafts_the_largest_and_each_has_its_own() -> None:
    gamma = BatchPolicy(ServerConfig(), "fp32")
    requests = [_request("a", RequestOptions(gamma=4)), _request("b", RequestOptions(gamma=0))]
    gamma.begin_step(requests)
    assert gamma.get_steps_for_batch(2) == 4
    assert gamma.caps == [4, 0]
    gamma.on_verify_complete([3, 0], 2)
    assert [request.customized_info[STATE][1] for request in requests] == [[4, 3], [0, 0]]
    assert (gamma.num_proposed, gamma.num_accepted) == (4, 3)


def test_a_gamma_asked_for_by_some_caps_them_alone() -> None:
    gamma = BatchPolicy(ServerConfig(policy="fixed", policy_options={"gamma": 8}), "fp32")
    requests = [_request("a", RequestOptions(gamma=2)), _request("b")]
    gamma.begin_step(requests)
    assert gamma.get_steps_for_batch(2) == 8
    gamma.on_verify_complete([2, 7], 2)
    assert [request.customized_info[STATE][1] for request in requests] == [[2, 2], [8, 7]]


def test_the_seconds_of_a_step_are_not_those_of_a_request_that_it_was_cut_for() -> None:
    """One that asks for no drafting beside one that is always right: the batch still learns what its gamma costs."""
    clock = _Clock()
    gamma = BatchPolicy(ServerConfig(), "fp32", clock=clock)
    requests = [_request("capped", RequestOptions(gamma=0)), _request("free")]
    chosen = []
    for _ in range(120):
        gamma.begin_step(requests)
        chosen.append(gamma.get_steps_for_batch(2))
        clock.now += 1 + 0.01 * chosen[-1]
        gamma.on_verify_complete([0, chosen[-1]], 2)
    assert chosen[60:].count(8) > 50


@pytest.mark.parametrize("num_pending", [1, 2, 3])
def test_a_step_says_how_old_its_newest_record_is(num_pending: int) -> None:
    seen: list[StepRecord] = []

    @dataclass
    class Watcher(Policy):
        lags: list[int] = field(default_factory=list)

        def choose(self, context: StepContext) -> int:
            self.lags.append(context.lag)
            assert [member.request_id for member in context.members] == ["a"]
            return 4

        def observe(self, record: StepRecord) -> None:
            seen.append(record)

    watcher = Watcher()
    gamma = BatchPolicy(ServerConfig(), "fp32")
    gamma._policies["throughput"] = watcher
    request = _request("a")
    gamma.begin_step([request])
    for step_number in range(8):
        gamma.get_steps_for_batch(1)
        if step_number >= num_pending - 1:
            gamma.on_verify_complete([1], 1)
    assert watcher.lags[num_pending - 1 :] == [num_pending] * (9 - num_pending)
    assert seen[-1].lag == num_pending


def test_the_drafts_signals_reach_their_own_request_and_step() -> None:
    """Requests end and join; what a proposal was measured with stays with it, cut to the request's own gamma."""
    seen: list[StepRecord] = []

    @dataclass
    class Watcher(Policy):
        def choose(self, context: StepContext) -> int:
            return 2

        def observe(self, record: StepRecord) -> None:
            seen.append(record)

    gamma = BatchPolicy(ServerConfig(), "fp32")
    gamma._policies["throughput"] = Watcher()
    a, b, c = _request("a"), _request("b", RequestOptions(gamma=1)), _request("c")
    for number, requests in enumerate(([a, b], [b, c])):
        gamma.begin_step(requests)
        assert gamma.get_steps_for_batch(2) == 2
        values = [[[0.9, number], [0.8, row], [0.7, 10 + row]] for row in range(2)]
        if number == 1:
            values[1][1] = [math.nan, math.nan]
        gamma.carry(torch.tensor(values))
        gamma.on_verify_complete([0, 0], 2)
    found = [
        (record.request_id, record.signals.entropy, record.upcoming and record.upcoming.entropy) for record in seen
    ]
    assert found == [("a", [0, 0], [10]), ("b", [0], [11]), ("b", [1], [10]), ("c", [], [11])]


def test_signals_are_in_the_report_where_they_were_asked_for() -> None:
    request = _request("a", RequestOptions(signals=True))
    note_step(request, controller_data.step(3, 1, confidence=0.5))
    reply = ReplyInfo()
    reply.add(request.customized_info[STATE])
    info = reply.meta_info(is_finished=True)
    assert info is not None
    assert (info["lag_trace"], info["confidence_trace"]) == ([1], [[0.5] * 3])
    assert len(info["entropy_trace"][0]) == 3


def test_a_server_without_signals_refuses_what_needs_them() -> None:
    config = ServerConfig(policy="ema")
    assert RequestOptions.parse({"policy": "throughput"}, config).policy == "throughput"
    for custom in ({"policy": "speckv"}, {"policy": "confidence"}, {"signals": True}):
        with pytest.raises(ValueError, match="does not"):
            RequestOptions.parse(custom, config)


def test_a_large_batch_drafts_no_further_than_its_graphs_were_captured_for() -> None:
    config = ServerConfig.from_mapping({"max_gamma_by_batch_size": {"3": 4, "9": 1}})
    policy = BatchPolicy(config, "fp32")
    policy.set_cuda_graph_bs([1, 2, 4, 8, 16])
    captured = {gamma: policy.cuda_graph_bs_for_step(gamma) for gamma in config.gammas}
    assert captured == {0: [1, 2, 4, 8, 16], 1: [1, 2, 4, 8, 16], 2: [1, 2, 4, 8], 4: [1, 2, 4, 8], 8: [1, 2]}
    for num_requests in (1, 2, 3, 4, 8, 9, 16, 30):
        requests = [_request(str(index), RequestOptions(gamma=8)) for index in range(num_requests)]
        policy.begin_step(requests)
        gamma = policy.get_steps_for_batch(num_requests)
        padded = min((size for size in (1, 2, 4, 8, 16) if size >= num_requests), default=None)
        assert padded is None or padded in captured[gamma]
        assert gamma == (8 if num_requests < 3 else 4 if num_requests < 9 else 1)
        policy.on_verify_complete([0] * num_requests, num_requests)


def test_a_gamma_there_is_none_of_at_this_size_is_the_smallest() -> None:
    assert ServerConfig(gammas=(4, 8), max_gamma_by_batch_size={2: 1}).gammas_at(2) == (4,)


def test_a_policy_decides_only_where_all_that_ask_agree() -> None:
    config = ServerConfig(policy="fixed", policy_options={"gamma": 1})
    gamma = BatchPolicy(config, "fp32")
    ema = RequestOptions(policy="ema")
    gamma.begin_step([_request("a", ema), _request("b")])
    assert gamma.get_steps_for_batch(2) == 4
    gamma.begin_step([_request("a", ema), _request("b", RequestOptions(policy="heuristic"))])
    assert gamma.get_steps_for_batch(2) == 1


def test_a_rank_takes_the_gamma_it_is_given() -> None:
    gamma = BatchPolicy(ServerConfig(), "fp32", agree=lambda chosen: 8 - chosen)
    gamma.begin_step([_request("a", RequestOptions(gamma=8))])
    assert gamma.get_steps_for_batch(1) == 0


def test_a_result_that_comes_a_step_late_teaches_about_its_own_step() -> None:
    gamma = BatchPolicy(ServerConfig(policy="heuristic", gammas=(1, 2, 4, 8)), "fp32")
    request = _request("a")
    gamma.begin_step([request])
    first = gamma.get_steps_for_batch(1)
    second = gamma.get_steps_for_batch(1)
    gamma.on_verify_complete([first], 1)
    gamma.on_verify_complete([0], 1)
    assert request.customized_info[STATE][-1] is not None
    assert (first, second) == (4, 4)
    # Four, two more for all accepted, one less for none: five, and the largest candidate under it is four.
    assert gamma.get_steps_for_batch(1) == 4
    assert math.isclose(sum(item[1] for item in request.customized_info[STATE] if isinstance(item, list)), 0)


def test_an_fp4_cache_keeps_prompts_whole_and_an_fp8_one_does_not() -> None:
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]), hf_text_config=SimpleNamespace()
    )
    args = {dtype: SimpleNamespace(kv_cache_dtype=dtype) for dtype in ("auto", "fp8_e4m3", "fp4_e2m1")}
    assert support.pruning_refusal(args["auto"], model, model) is None
    assert support.pruning_refusal(args["fp8_e4m3"], model, model) is None
    assert "FP4" in (support.pruning_refusal(args["fp4_e2m1"], model, model) or "")
