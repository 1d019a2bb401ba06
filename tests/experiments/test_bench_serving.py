"""The serving benchmark's own arithmetic: what is sent, what counts as answered, and which rate is carried."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from experiments.serving.load import (
    Question,
    Reply,
    Workload,
    arrival_times,
    figures,
    highest_rate,
    parse_replies,
    percentile,
)
from spec_stack.hf.loading import resolve_pair

WORKLOAD = Workload(lengths=(300, 500), short_share=0.3, seconds=10, fewest=3, seed=0)
QUESTION = Question([{"role": "user", "content": "?"}], answer="12345", num_tokens=1, max_tokens=4)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_pair(None, None)[0])


def reported(*replies: dict[str, Any]) -> dict[str, list[Any]]:
    """A line of SGLang's output file with these requests; what is not said is a good answer's."""
    whole = {"ttfts": 0.5, "itls": [0.1, 0.2, 0.3], "output_lens": 4, "generated_texts": "It is 12345.", "errors": ""}
    return {name: [reply.get(name, value) for reply in replies] for name, value in whole.items()}


def test_arrivals_start_at_once_and_follow_the_seed_alone() -> None:
    times = arrival_times(2.0, 5, seed=1)
    assert times[0] == 0
    assert times == sorted(times)
    assert times == arrival_times(2.0, 5, seed=1) != arrival_times(2.0, 5, seed=2)
    assert arrival_times(math.inf, 3, seed=1) == [0, 0, 0]


def test_arrivals_keep_the_rate_and_scale_with_it() -> None:
    slow, fast = arrival_times(1.0, 4000, seed=0), arrival_times(4.0, 4000, seed=0)
    assert slow[-1] / 4000 == pytest.approx(1.0, rel=0.05)
    assert [4 * time for time in fast] == pytest.approx(slow)


def test_every_variant_has_the_same_lengths_and_no_two_share_a_prefix_or_a_fact(tokenizer: Any) -> None:
    first, second = (WORKLOAD.questions(tokenizer, 6, variant) for variant in (0, 1))
    assert [(q.num_tokens, q.max_tokens) for q in first] == [(q.num_tokens, q.max_tokens) for q in second]
    assert WORKLOAD.questions(tokenizer, 6, 0) == first
    assert WORKLOAD.questions(tokenizer, 3, 0) == first[:3]
    contents = [str(question.messages[0]["content"]) for question in first + second]
    assert len({content.split("\n", 1)[0] for content in contents}) == len(contents)
    assert all(question.answer in content for question, content in zip(first + second, contents, strict=True))


def test_a_load_has_as_many_requests_as_its_rate_and_time_ask_for() -> None:
    assert [WORKLOAD.count(rate) for rate in (0.1, 1.25, math.inf)] == [3, 13, 3]


def test_a_whole_answer_takes_the_first_tokens_time_and_all_gaps() -> None:
    (reply,) = parse_replies(reported({}), [QUESTION])
    assert (reply.ttft_s, reply.latency_s, reply.right) == (0.5, pytest.approx(1.1), True)
    assert reply.seconds_per_token == pytest.approx(0.2)


@pytest.mark.parametrize(
    "flaw", [{"errors": "Internal Server Error"}, {"ttfts": 0.0, "itls": []}, {"output_lens": 3, "itls": [0.1, 0.2]}]
)
def test_what_failed_or_was_cut_short_was_never_answered(flaw: dict[str, Any]) -> None:
    failed, answered = parse_replies(reported(flaw, {}), [QUESTION, QUESTION])
    assert (failed.latency_s, failed.seconds_per_token, failed.right) == (math.inf, math.inf, False)
    found = figures([failed, answered], timeout_s=2)
    assert (found["share_in_time"], found["num_answered"], found["num_right"]) == (0.5, 1, 1)
    assert (found["latency_s_p50"], found["latency_s_p99"]) == (pytest.approx(1.1), math.inf)


def test_a_wrong_answer_is_in_time_and_not_right() -> None:
    found = figures(parse_replies(reported({"generated_texts": "It is 54321."}), [QUESTION]), timeout_s=2)
    assert (found["share_in_time"], found["num_answered"], found["num_right"]) == (1, 1, 0)


def test_a_report_about_other_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="2 requests, 1 were sent"):
        parse_replies(reported({}, {}), [QUESTION])


def test_the_timeout_is_the_last_moment_in_time() -> None:
    replies = [Reply(0.1, latency_s, 4, True) for latency_s in (1.0, 2.0, 2.1, 9.0)]
    assert figures(replies, timeout_s=2.0)["share_in_time"] == 0.5


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


@pytest.mark.parametrize("flaw", [{"lengths": (5, 4)}, {"short_share": 1.0}, {"seconds": 0}, {"fewest": 0}])
def test_a_workload_that_cannot_be_is_refused(flaw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Workload(**{**vars(WORKLOAD), **flaw})
