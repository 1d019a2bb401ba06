"""What the scheduler does to requests behind their backs: retraction, pages, a namespace taken away, several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spec_stack.prefill.calibration import Calibration

from .conftest import ASSETS, MIN_PROMPT_TOKENS, Reference, Server
from .test_serving import kept_ids
from .test_traffic import NUM_REQUESTS, Traffic


def _mixed(reference: Reference, num_requests: int, max_new_tokens: int) -> list[tuple[list[int], dict[str, Any]]]:
    return [
        (
            reference.prompt(180 + 90 * index, seed=40 + index),
            {"sparse_prefill": "on" if index % 3 != 1 else "off", "keep_rate": 0.3, "max_new_tokens": max_new_tokens},
        )
        for index in range(num_requests)
    ]


def _check(
    server: Server, reference: Reference, requests: list[tuple[list[int], dict[str, Any]]]
) -> list[dict[str, Any]]:
    replies = server.generate_all(requests)
    for (prompt, options), reply in zip(requests, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt, **options), (len(prompt), options, reply["meta_info"])
    return replies


def test_retracted_requests_go_on_with_the_same_tokens(launch: Any, reference: Reference) -> None:
    """SGLang's own switch forces a retraction every few steps; what was pruned is prefilled again, outputs and all."""
    server = launch(
        "--max-total-tokens",
        "8000",
        "--max-running-requests",
        "6",
        "--enable-metrics",
        # As on every CPU server, said aloud: what a step leaves behind reaches the next one without a buffer between.
        "--disable-overlap-schedule",
        *("--spec-stack-min-prompt-tokens", str(MIN_PROMPT_TOKENS)),
        # So little that conversations push each other out of the draft's pool.
        *("--spec-stack-draft-pool-tokens", "3000"),
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "6"},
    )
    traffic = Traffic(server, reference, NUM_REQUESTS // 3, seed=5)
    before = server.metrics()
    traffic.run()
    assert not traffic.failures, traffic.failures[:3]
    traffic.check_tokens()
    traffic.check_numbers(before)
    replies = [*_check(server, reference, _mixed(reference, 6, 40)), *(reply for _, reply in traffic.replies)]
    retracted = [reply for reply in replies if reply["meta_info"]["num_retractions"]]
    assert any(reply["meta_info"]["spec_stack"]["sparse_prefill"] for reply in retracted)
    pool = server.state()["draft_pool"]
    assert (pool["num_used"] + pool["num_free"], pool["num_pinned"]) == (3000, 0)
    assert sum(reply["meta_info"]["spec_stack"]["num_draft_tokens"] for reply in replies) > 3000
    server.stop()


@pytest.fixture(scope="module")
def small(launch: Any) -> Iterator[Server]:
    """Little room for the target and for the draft."""
    server = launch(*("--max-total-tokens", "1800", "--spec-stack-draft-pool-tokens", "1000"))
    yield server
    server.stop()


def test_scoring_leaves_others_all_of_their_cache(small: Server, reference: Reference) -> None:
    small.flush()
    cached = reference.prompt(1200, seed=64)
    small.generate(cached, 2, sparse_prefill="off")
    prompt = reference.prompt(900, seed=65)
    assert (
        small.generate(prompt, 2, sparse_prefill="on")["output_ids"]
        == reference.tokens(prompt, sparse_prefill="on")[:2]
    )
    again = small.generate(cached, 2, sparse_prefill="off")
    assert again["meta_info"]["cached_tokens"] == len(cached) - 1
    assert again["output_ids"] == reference.tokens(cached)[:2]


def test_a_prompt_longer_than_the_drafts_pool_is_prefilled_densely(small: Server, reference: Reference) -> None:
    """And those that fit go on being pruned, however full the pool is."""
    for seed, num_tokens in ((66, 1300), (67, 700), (68, 800), (69, 900)):
        prompt = reference.prompt(num_tokens, seed=seed)
        reply = small.generate(prompt, 2, sparse_prefill="on")
        report = reply["meta_info"]["spec_stack"]
        fits = len(prompt) + 8 <= 1000
        assert report["outcome"] == ("pruned" if fits else "draft_pool_full")
        # All chats begin alike.
        assert len(prompt) - 10 < report["num_draft_tokens"] <= len(prompt) if fits else not report["num_draft_tokens"]
        assert fits or "the draft pool has room for" in report["sparse_prefill_reason"]
        assert reply["output_ids"] == reference.tokens(prompt, sparse_prefill="on" if fits else "off")[:2]
        assert small.state()["draft_pool"]["num_used"] <= 1000


@pytest.mark.nightly
def test_pages_of_sixteen_slots_change_no_token(launch: Any, reference: Reference) -> None:
    """Paged allocation has no CPU kernel: it runs in Triton's interpreter, slowly."""
    server = launch("--max-total-tokens", "8000", "--page-size", "16", environment={"TRITON_INTERPRET": "1"})
    requests = _mixed(reference, 3, 16)
    _check(server, reference, requests)
    traffic = Traffic(server, reference, 12, seed=6)
    traffic.run(5)
    assert not traffic.failures, traffic.failures[:3]
    traffic.check_tokens()
    prompt, options = requests[0]
    again = server.generate(prompt, **options)
    assert again["meta_info"]["cached_tokens"] >= 16
    assert again["output_ids"] == reference.tokens(prompt, **options)
    server.stop()


@pytest.mark.nightly
def test_two_ranks_agree_on_selection_and_gamma_and_on_the_failure_of_one(launch: Any, reference: Reference) -> None:
    """The test support lets one rank fail at prompts of over 600 tokens, while the other is well."""
    server = launch(
        *("--max-total-tokens", "8000", "--tp-size", "2"),
        environment={
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            "SPEC_STACK_TEST_FAIL_ON_RANK": "1",
            "SPEC_STACK_SGLANG": '{"calibration": "none"}',
        },
    )
    requests = _mixed(reference, 4, 40)
    replies = _check(server, reference, requests)
    for reply, (prompt, options) in zip(replies, requests, strict=True):
        kept = reply["meta_info"]["spec_stack"]["num_kept_tokens"]
        assert kept == reference.result(prompt, **options).metrics.num_kept_tokens
    for threshold in (0.0, 1.0):
        prompt = reference.prompt(450, seed=49)
        reply = server.generate(prompt, 8, sparse_prefill="on", keep_rate=0.2, max_dropped_attention=threshold)
        expected = reference.generator.generate(
            input_ids=prompt,
            sparse_prefill="on",
            keep_rate=0.2,
            max_dropped_attention=threshold,
            max_tokens=8,
            ignore_eos=True,
        )
        tried = reply["meta_info"]["spec_stack"]["tried_rates"]
        checked = [each.dropped_attention for each in expected.metrics.tried_rates]
        assert [each["dropped_attention"] for each in tried] == pytest.approx(checked, rel=2e-3)
        assert reply["output_ids"] == list(expected.token_ids)
    prompt = reference.prompt(900, seed=48)
    reply = server.generate(prompt, 8, sparse_prefill="on")
    report = reply["meta_info"]["spec_stack"]
    assert (report["outcome"], report["sparse_prefill"]) == ("failed", False)
    assert "on another rank" in report["sparse_prefill_reason"]
    assert reply["output_ids"] == reference.tokens(prompt)[:8]
    assert "put out of action by a test" in server.log.read_text(errors="replace"), "the traceback is in the log"
    server.stop()


@pytest.mark.nightly
def test_a_server_takes_the_calibration_that_lies_beside_its_draft(launch: Any, reference: Reference) -> None:
    server = launch("--max-total-tokens", "8000", environment={"SPEC_STACK_SGLANG": "{}"})
    prefill = Calibration.load(ASSETS / "draft").apply()
    assert prefill.scoring_heads is not None
    prompt = reference.prompt(2300, seed=70)
    reply = server.generate(prompt, 16, explain=True)
    spans = reply["meta_info"]["spec_stack"]["kept_spans"]
    kept = [prompt[position] for start, stop in spans for position in range(start, stop)]
    assert kept == kept_ids(reference, prompt, prefill)
    chosen = server.state()["settings"]["prefill"]["scoring_heads"]
    assert [tuple(head) for head in chosen] == list(prefill.scoring_heads)
    assert reply["output_ids"] == reference.tokens_over(prompt, spans, 16)
    assert server.state()["draft_pool"]["num_used"] == len(prompt)
    longer = [*prompt, *reference.user_turn(40, seed=72)]
    spans = server.generate(longer, 4, explain=True, follow_up="afresh")["meta_info"]["spec_stack"]["kept_spans"]
    kept = [longer[position] for start, stop in spans for position in range(start, stop)]
    assert kept == kept_ids(reference, longer, prefill)
    short = server.generate(prompt[-2000:], 4)["meta_info"]["spec_stack"]
    assert not short["sparse_prefill"]
    assert str(prefill.min_prompt_tokens) in short["sparse_prefill_reason"]
    server.stop()
