"""The serving benchmark's own arithmetic and prompts; its servers need SGLang."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from experiments.serving import bench, parts
from experiments.serving.client import Answer, Client, Prompts
from experiments.serving.load import NOT_ANSWERED, Reply, arrival_times, figures, highest_rate, percentile, send_all
from experiments.serving.server import SglangServer

ASSETS = Path(__file__).resolve().parents[2] / "spec_stack" / "assets"
MOMENTS = st.integers(0, 1000)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ASSETS / "target")


class Parrot(Client):
    """A server that answers with so many tokens at once, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def ask(self, input_ids: Sequence[int], num_new: int, *_: Any, **__: Any) -> Answer:
        self.asked.append(list(input_ids))
        meta = {"cached_tokens": 0, "finish_reason": {"type": "length"}}
        return Answer(1.0, [1.5, 3.0], list(range(70, 70 + num_new)), meta_info=meta)

    def forget(self) -> None:
        pass


def test_arrivals_start_at_once_keep_their_rate_and_follow_the_seed_alone() -> None:
    times = arrival_times(2.0, 4000, seed=1)
    assert times[0] == 0
    assert times == sorted(times)
    assert times == arrival_times(2.0, 4000, seed=1) != arrival_times(2.0, 4000, seed=2)
    assert times[-1] / 4000 == pytest.approx(0.5, rel=0.05)


def test_a_request_that_fails_or_stops_short_was_never_answered() -> None:
    def ask(ids: list[int]) -> Answer:
        if ids == [0]:
            raise TimeoutError
        return Answer(1.0, [1.5, 3.0], [5, 6][: ids[0]])

    replies = send_all([([0], "a"), ([1], "a"), ([2], "56")], [0.0] * 3, ask, 2, lambda ids: "".join(map(str, ids)))
    assert replies == [NOT_ANSWERED, NOT_ANSWERED, Reply(0.5, 2.0, True)]
    found = figures(replies, timeout_s=2.0)
    assert (found["share_in_time"], found["num_answered"], found["num_right"]) == (1 / 3, 1, 1)
    assert (found["latency_s_p50"], figures(replies, 1.9)["share_in_time"]) == (math.inf, 0)


@given(st.lists(st.floats(0, 1e6) | st.just(math.inf), min_size=1, max_size=60), st.floats(1, 100))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    covered = [value for value in values if mean(other <= value for other in values) * 100 >= percent - 1e-9]
    assert found == min(covered)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({1: 1.0, 2: 0.99, 4: 0.5}, 2),
        ({4: 0.5, 1: 1.0, 2: 1.0}, 2),
        ({1: 0.98, 2: 1.0}, 0),
        ({1: 1.0, 2: 0.9, 4: 1.0}, 1),
        ({1: 1.0, 2: 1.0}, 2),
        ({}, 0),
    ],
)
def test_the_highest_rate_comes_before_the_first_failure(shares: dict[float, float], expected: float) -> None:
    assert highest_rate(shares) == expected


@given(st.lists(MOMENTS, unique=True), MOMENTS, MOMENTS)
def test_the_longest_gap_is_the_longest_time_without_a_chunk(times: list[int], since: int, until: int) -> None:
    since, until = min(since, until), max(since, until)
    gap = Answer(0.0, [float(at) for at in sorted(times)]).longest_gap_s(since, until)
    assert gap <= until - since
    for start in range(since, until, 7):
        # A window without a chunk is no longer than the gap.
        end = next((at for at in range(start + 1, until) if at in times), until)
        assert end - start <= gap


def test_a_document_and_a_text_have_the_tokens_asked_for(tokenizer: Any) -> None:
    prompts = Prompts(tokenizer)
    assert abs(len(prompts.document(500, seed=1)) - 500) < 60
    assert len(tokenizer(prompts.text(300, seed=1), add_special_tokens=False).input_ids) == 300


def test_every_arm_is_the_first_one_equally_often_and_none_is_left_out() -> None:
    arms = parts.Arms({name: Client(0) for name in ("off", "dense", "SPEC_STACK")})
    orders = [[name for name, _ in arms.in_turn()] for _ in range(6)]
    assert all(sorted(order) == sorted(arms.clients) for order in orders)
    assert sorted(order[0] for order in orders) == sorted([*arms.clients] * 2)


def test_every_turn_goes_on_from_its_arms_own_replies(tokenizer: Any) -> None:
    clients = {"off": Parrot(), "SPEC_STACK": Parrot()}
    found = parts.conversations(parts.Arms(clients), tokenizer, [300], 2, 3, 4)
    told = parts.turns_told(found)
    assert set(told) == {f"300 {arm}, turn {turn}" for arm in clients for turn in (1, 2, 3)}
    assert all(row["n"] == 2 and row["ttft_s"] == 0.5 for row in told.values())
    for client in clients.values():
        first, second, third = client.asked[:3]
        assert len(first) < len(second) < len(third)
        assert tokenizer.decode(first)[:200] == tokenizer.decode(third)[:200]


@pytest.mark.parametrize("part", ["rates", "lengths", "growing"])
def test_every_part_tells_of_every_arm(part: str, tokenizer: Any) -> None:
    options = bench.parse_args(f"--parts {part} --lengths 300 --repeats 1 --turns 2 --rates 50 --seconds 0.1".split())
    ((name, found),) = bench.measure(options, parts.Arms({"off": Parrot(), "dense": Parrot()}), tokenizer)
    assert (name, set(found)) == (part, {"off", "dense"})


@pytest.mark.parametrize("name", bench.ARMS)
def test_an_arm_has_a_draft_where_it_speculates_and_our_plugin_where_it_is_ours(name: str, tmp_path: Path) -> None:
    server: SglangServer = bench.server_of(bench.ARMS[name], name, bench.parse_args([]), tmp_path)
    assert ("--speculative-draft-model-path" in server._command) == (name != "off")
    assert ("SGLANG_PLUGINS" in server._environment) == (name in ("off", "STANDALONE"))


def test_an_arm_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="NAME="):
        bench.parse_args(["--arm", "--tp-size 2"])
