"""One gamma for a batch. No SGLang here."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from spec_stack.controller.base import Policy, StepContext
from spec_stack.controller.registry import BATCH_POLICIES, make_batch_policy
from spec_stack.sglang import batch_policy
from spec_stack.sglang.batch_policy import BatchPolicy
from spec_stack.sglang.request import (
    KEY,
    RequestOptions,
)
from spec_stack.sglang.server_args import ServerConfig
from tests.support import controller_data
from tests.support.sglang_requests import request_of


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
    requests = [request_of(str(index)) for index in range(3)]
    chosen = [_run(gamma, clock, requests, accepted, lambda drafted: 1 + per_token_s * drafted) for _ in range(200)]
    assert chosen[100:].count(best) > 85


@pytest.mark.parametrize("during_a_step", [False, True])
def test_a_stall_is_no_steps_cost(during_a_step: bool) -> None:
    """A prefill between two steps, or under overlap a scoring that holds up a step that was begun before it."""
    clock = _Clock()
    gamma = BatchPolicy(ServerConfig(gammas=(1, 8)), "fp32", clock=clock)
    requests, chosen = [request_of("a")], []

    def stall() -> None:
        gamma.invalidate_step_timing()
        clock.now += 500

    for step in range(300):
        if not during_a_step and step % 3 == 0:
            stall()
        gamma.begin_step(requests)
        chosen.append(gamma.get_steps_for_batch(1))
        clock.now += 1 + 0.01 * chosen[-1]
        if during_a_step and step % 2 and chosen[-1] == 8:
            stall()
        gamma.on_verify_complete([chosen[-1]], 1)
    assert chosen[150:].count(8) > 140


def test_where_every_step_follows_a_prefill_the_batch_still_drafts() -> None:
    """Short replies under load: no step's seconds are ever known, and plain decoding must not win by that."""
    clock = _Clock()
    gamma = BatchPolicy(ServerConfig(), "fp32", clock=clock)
    chosen = []
    for _ in range(80):
        gamma.invalidate_step_timing()
        chosen.append(_run(gamma, clock, [request_of("a")], 8, lambda drafted: 1))
    assert set(chosen[50:]) == {4}


def test_a_late_result_is_charged_to_its_own_batch_size() -> None:
    """Eight requests, then one: a step's cost comes in while the next one runs."""
    policy = make_batch_policy("throughput", gammas=(1, 8))
    gammas: list[int] = []
    for step in range(40):
        gammas.append(policy.choose(StepContext(step, 8, None, "fp32", batch_size=8 if step % 2 else 1)))
        if step:
            seconds = 1.0 if step % 2 else 0.5
            late = controller_data.step(*gammas[-2:-1] * 2, draft_s=0.0, verify_s=seconds, precision="fp32")
            policy.observe(replace(late, step=step - 1))
    seconds = policy.step_seconds((1, 8))
    assert gammas[20:] == [8] * 20
    assert (seconds[8][8], seconds[1][8]) == (pytest.approx(4, rel=0.1), pytest.approx(1, rel=0.1))


@pytest.mark.parametrize(("policy", "requested"), [("throughput", None), ("throughput", 4), ("fixed", None)])
@pytest.mark.parametrize("fails", [False, True])
def test_ranks_ask_each_other_once_in_every_step(
    monkeypatch: pytest.MonkeyPatch, policy: str, requested: int | None, fails: bool
) -> None:
    """Also where one cannot read its requests: else the other ranks would wait for it for ever."""
    asks: list[bool] = []

    def agree(gamma: int, knows: bool) -> tuple[int, bool]:
        asks.append(knows)
        return gamma, knows

    def fail(*args: object) -> int:
        raise RuntimeError("broken")

    if fails:
        monkeypatch.setattr(batch_policy, "_cap", fail)
    gamma = BatchPolicy(ServerConfig(policy=policy), "fp32", agree=agree)
    for _ in range(5):
        gamma.begin_step([request_of("a", RequestOptions(gamma=requested))])
        gamma.get_steps_for_batch(1)
        gamma.on_verify_complete([0], 1)
    assert asks == [not fails] * 5


def test_where_one_rank_cannot_read_its_requests_none_accepts_any_proposal() -> None:
    """The others have chosen a gamma, and the failing one has its own caps of 0."""
    gamma = BatchPolicy(ServerConfig(gammas=(1, 4)), "fp32", agree=lambda chosen, knows: (4, False))
    gamma.begin_step([request_of("a"), request_of("b")])
    assert gamma.get_steps_for_batch(2) == 1
    assert gamma.caps == [0, 0]


@pytest.mark.parametrize("choice", [None, "4", 2.5])
def test_a_policy_that_gives_no_number_drafts_the_least(monkeypatch: pytest.MonkeyPatch, choice: Any) -> None:
    class Forgetful(Policy):
        def choose(self, context: StepContext) -> int:
            return choice  # type: ignore[no-any-return]

    monkeypatch.setitem(BATCH_POLICIES, "forgetful", Forgetful)
    gamma = BatchPolicy(ServerConfig(policy="forgetful", gammas=(1, 4)), "fp32")
    gamma.begin_step([request_of("a")])
    assert gamma.get_steps_for_batch(1) == 1
    assert gamma.caps == [0]


def test_tokens_of_a_request_that_is_gone_are_not_counted() -> None:
    gamma = BatchPolicy(ServerConfig(policy="fixed", policy_options={"gamma": 4}), "fp32")
    stays, gone = request_of("a"), request_of("b")
    gamma.begin_step([stays, gone])
    gamma.get_steps_for_batch(2)
    gone.is_retracted = True
    gamma.on_verify_complete([3, 3], 2)
    assert len(stays.customized_info[KEY]) == 5
    assert len(gone.customized_info[KEY]) == 1


@pytest.mark.parametrize(
    ("requested", "drafted", "accepted", "noted"),
    [
        # Where all ask, the largest holds, and each has its own.
        ((4, 0), 4, [3, 0], [[4, 3], [0, 0]]),
        # Where some do, it caps them alone.
        ((2, None), 8, [2, 7], [[2, 2], [8, 7]]),
    ],
)
def test_a_gamma_asked_for_is_its_requests_cap(
    requested: tuple[int | None, int | None], drafted: int, accepted: list[int], noted: list[list[int]]
) -> None:
    gamma = BatchPolicy(ServerConfig(policy="fixed", policy_options={"gamma": 8}), "fp32")
    requests = [request_of(str(number), RequestOptions(gamma=own)) for number, own in enumerate(requested)]
    gamma.begin_step(requests)
    assert gamma.get_steps_for_batch(2) == drafted
    gamma.on_verify_complete(accepted, 2)
    assert [request.customized_info[KEY][1] for request in requests] == noted
    assert (gamma.num_proposed, gamma.num_accepted) == tuple(map(sum, zip(*noted, strict=True)))


def test_the_seconds_of_a_step_are_not_those_of_a_request_that_it_was_cut_for() -> None:
    """One that asks for no drafting beside one that is always right: the batch still learns what its gamma costs."""
    clock = _Clock()
    gamma = BatchPolicy(ServerConfig(), "fp32", clock=clock)
    requests = [request_of("capped", RequestOptions(gamma=0)), request_of("free")]
    chosen = []
    for _ in range(120):
        gamma.begin_step(requests)
        chosen.append(gamma.get_steps_for_batch(2))
        clock.now += 1 + 0.01 * chosen[-1]
        gamma.on_verify_complete([0, chosen[-1]], 2)
    # 8 and 4 bring nearly the same a second there, and the others far less.
    assert set(chosen[60:]) <= {4, 8}


@pytest.mark.parametrize("num_pending", [1, 2])
def test_a_step_says_its_newest_record_its_requests_and_their_mean_length(
    num_pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[StepContext] = []

    class Watcher(Policy):
        def choose(self, context: StepContext) -> int:
            seen.append(context)
            return 4

    monkeypatch.setitem(BATCH_POLICIES, "watcher", Watcher)
    gamma = BatchPolicy(ServerConfig(policy="watcher"), "fp32")
    gamma.begin_step([request_of("a", num_prompt_tokens=999), request_of("b", num_prompt_tokens=4_999)])
    for step_number in range(8):
        gamma.get_steps_for_batch(2)
        if step_number >= num_pending - 1:
            gamma.on_verify_complete([1, 1], 2)
    newest = [context.last and context.last.step for context in seen]
    assert newest == [None] * num_pending + list(range(8 - num_pending))
    assert [member.request_id for member in seen[0].members] == ["a", "b"]
    assert seen[0].num_target_slots == 3_000


def test_a_large_batch_drafts_no_further_than_its_graphs_were_captured_for() -> None:
    config = ServerConfig.from_mapping({"max_gamma_by_batch_size": {"3": 4, "9": 1}})
    policy = BatchPolicy(config, "fp32")
    policy.set_cuda_graph_bs([1, 2, 4, 8, 16])
    captured = {gamma: policy.cuda_graph_bs_for_step(gamma) for gamma in config.gammas}
    assert captured == {0: [1, 2, 4, 8, 16], 1: [1, 2, 4, 8, 16], 2: [1, 2, 4, 8], 4: [1, 2, 4, 8], 8: [1, 2]}
    for num_requests in (1, 2, 3, 4, 8, 9, 16, 30):
        requests = [request_of(str(index), RequestOptions(gamma=8)) for index in range(num_requests)]
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
    gamma.begin_step([request_of("a", ema), request_of("b")])
    assert gamma.get_steps_for_batch(2) == 4
    gamma.begin_step([request_of("a", ema), request_of("b", RequestOptions(policy="heuristic"))])
    assert gamma.get_steps_for_batch(2) == 1


def test_a_result_that_comes_a_step_late_teaches_about_its_own_step() -> None:
    gamma = BatchPolicy(ServerConfig(policy="heuristic", gammas=(1, 2, 4, 8)), "fp32")
    request = request_of("a")
    gamma.begin_step([request])
    first = gamma.get_steps_for_batch(1)
    second = gamma.get_steps_for_batch(1)
    gamma.on_verify_complete([first], 1)
    gamma.on_verify_complete([0], 1)
    assert request.customized_info[KEY][-1] is not None
    assert (first, second) == (4, 4)
    # Four, two more for all accepted, one less for none: five, and the largest candidate under it is four.
    assert gamma.get_steps_for_batch(1) == 4
    assert math.isclose(sum(item[1] for item in request.customized_info[KEY] if isinstance(item, list)), 0)


def test_what_the_first_step_of_a_shape_compiles_is_no_steps_cost() -> None:
    """Under overlap the host compiles for a gamma's first step while an earlier step's result waits; the draft is
    useless, so plain steps are the fastest."""
    clock = _Clock()
    gamma = BatchPolicy(ServerConfig(), "fp32", clock=clock)
    requests, ends, compiled, chosen = [request_of("a")], [0.0], set(), []
    for step in range(400):
        gamma.begin_step(requests)
        chosen.append(gamma.get_steps_for_batch(1))
        if chosen[-1] not in compiled:
            compiled.add(chosen[-1])
            clock.now += 0.4
        ends.append(max(clock.now, ends[-1]) + 0.004 * (1 + 0.2 * chosen[-1]))
        if step:
            clock.now = max(clock.now, ends[-2])
            gamma.on_verify_complete([0], 1)
    assert chosen[50:].count(0) > 320
    known = gamma.state()["step_seconds"][1]
    assert all(known[drafted] == pytest.approx(0.004 * (1 + 0.2 * drafted), rel=0.3) for drafted in (0, 1))


@pytest.mark.parametrize(
    ("gammas", "accepted", "told", "noted"),
    [
        # SGLang tells the result's gamma.
        ([4, 2], [2, 1, 0], 2, [[2, 2], [2, 1], [2, 0]]),
        ([4, 2], [2, 1, 0], 4, [[4, 2], [4, 1], [4, 0]]),
        # A result of more tokens than a step drafted is a later one's.
        ([2, 4], [3, 1, 0], None, [[4, 3], [4, 1], [4, 0]]),
        # None is more than one step behind.
        ([1, 4, 8], [1, 1, 0], None, [[4, 1], [4, 1], [4, 0]]),
        # One that fits no step teaches nothing.
        ([4, 2], [1, 1, 1], 8, []),
    ],
)
def test_after_a_lost_result_a_step_gets_its_own_figures(
    gammas: list[int], accepted: list[int], told: int | None, noted: list[list[int]]
) -> None:
    left = iter(gammas)
    policy = BatchPolicy(ServerConfig(), "fp32", agree=lambda chosen, knows: (next(left), knows))
    requests = [request_of(str(number)) for number in range(3)]
    for _ in gammas:
        policy.begin_step(requests)
        policy.get_steps_for_batch(3)
    policy.on_verify_complete(accepted, 3, told)
    heard = [item for request in requests for item in request.customized_info[KEY] if isinstance(item, list)]
    assert (heard, policy.num_steps) == (noted, 1 if noted else 0)
    if not noted:
        policy.on_verify_complete(accepted, 3, gammas[0])
        assert policy.num_steps == 1
