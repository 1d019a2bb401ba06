"""What the scheduler does to requests behind their backs: retraction, pages, a namespace taken away, several ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import Reference, Server, generate_body
from .test_serving import kept_ids


def _mixed(reference: Reference, num_requests: int, max_new_tokens: int) -> list[tuple[list[int], dict[str, Any]]]:
    return [
        (
            reference.prompt(180 + 90 * index, seed=40 + index),
            {"specprefill": index % 3 != 1, "keep_rate": 0.3, "max_new_tokens": max_new_tokens},
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


def test_retracted_requests_go_on_at_their_original_positions(launch: Any, reference: Reference) -> None:
    """SGLang's own switch forces a retraction every few steps; what was pruned is prefilled again, outputs and all."""
    server = launch(
        "--max-total-tokens",
        "8000",
        "--max-running-requests",
        "6",
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "6"},
    )
    replies = _check(server, reference, _mixed(reference, 6, 40))
    retracted = [reply for reply in replies if reply["meta_info"]["num_retractions"]]
    assert any(reply["meta_info"]["spec_stack"]["specprefill"] for reply in retracted)
    server.stop()


@pytest.fixture(scope="module")
def small(launch: Any) -> Iterator[Server]:
    """Little room, and one radix namespace for all selections."""
    server = launch("--max-total-tokens", "1800", environment={"SPEC_STACK_TEST_NAMESPACE": "one for all"})
    yield server
    server.stop()


def test_a_prompt_that_there_is_no_room_to_score_is_read_densely(small: Server, reference: Reference) -> None:
    """A long request holds most of the pool when a second one arrives; both are answered, and nothing leaks."""
    first, second = reference.prompt(1100, seed=61), reference.prompt(900, seed=62)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(small.generate, first, 300, specprefill=False)
        deadline = time.monotonic() + 60
        while not small.get("/v1/loads")["loads"][0]["num_running_reqs"]:
            assert not running.done()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        reply = small.generate(second, specprefill=True)
        assert running.result()["output_ids"] == reference.tokens(first, max_new_tokens=300)
    report = reply["meta_info"]["spec_stack"]
    assert (report["specprefill"], report["num_scored_tokens"], report["num_kept_tokens"]) == (False, 0, len(second))
    assert "room for" in report["specprefill_reason"]
    assert reply["output_ids"] == reference.tokens(second)


def test_without_the_namespace_pruned_kv_would_serve_the_wrong_prompt(small: Server, reference: Reference) -> None:
    """The control for the radix cache's namespace: the test support takes it away, and the reply goes wrong."""
    server = small
    prompt = reference.prompt(800, seed=22)
    pruned = server.generate(prompt, specprefill=True)
    assert pruned["output_ids"] == reference.tokens(prompt, specprefill=True)
    compact = kept_ids(reference, prompt)
    status, wrong = server.post("/generate", {**generate_body(compact, 24), "extra_key": "one for all"})
    assert status == 200, wrong
    assert wrong["meta_info"]["cached_tokens"] >= len(compact) - 1
    assert wrong["output_ids"] != reference.tokens(compact)


def test_pages_of_sixteen_slots_change_no_token(launch: Any, reference: Reference) -> None:
    """Paged allocation has no CPU kernel: it runs in Triton's interpreter, slowly."""
    server = launch("--max-total-tokens", "8000", "--page-size", "16", environment={"TRITON_INTERPRET": "1"})
    requests = _mixed(reference, 3, 16)
    _check(server, reference, requests)
    prompt, options = requests[0]
    again = server.generate(prompt, **options)
    assert again["meta_info"]["cached_tokens"] >= 16
    assert again["output_ids"] == reference.tokens(prompt, **options)
    server.stop()


def test_two_ranks_agree_on_selection_and_gamma(launch: Any, reference: Reference) -> None:
    server = launch("--max-total-tokens", "8000", "--tp-size", "2", environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})
    replies = _check(server, reference, _mixed(reference, 4, 40))
    for reply, (prompt, options) in zip(replies, _mixed(reference, 4, 40), strict=True):
        kept = reply["meta_info"]["spec_stack"]["num_kept_tokens"]
        assert kept == reference.result(prompt, **options).metrics.num_kept_tokens
    server.stop()
