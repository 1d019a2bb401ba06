"""The check on a server: what Python's finds, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spec_stack.config import PrefillConfig

from .conftest import Reference, Server, generate_body, kept_positions, report_of
from .test_device_copies import launch_of, runner_of_layers

RATES = [0.1, *PrefillConfig.check_rates]


def _checked(server: Server, prompt: Sequence[int], max_dropped_attention: float, num_tokens: int = 16) -> Any:
    options = {
        "sparse_prefill": "on",
        "keep_rate": RATES[0],
        "explain": True,
        "max_dropped_attention": max_dropped_attention,
    }
    return server.generate(prompt, num_tokens, **options)


@pytest.mark.parametrize(
    ("num_tokens", "seed"), [(420, 201), (600, 202), pytest.param(900, 203, marks=pytest.mark.nightly)]
)
def test_the_share_and_the_kept_rate_are_pythons(
    server: Server, reference: Reference, num_tokens: int, seed: int
) -> None:
    prompt = reference.prompt(num_tokens, seed=seed)
    options: Any = {"sparse_prefill": "on", "keep_rate": RATES[0], "ignore_eos": True, "gamma": 0, "max_tokens": 16}
    best = 1.0
    for name in ("reports alone", "none passes", "the best one passes"):
        limit = {"reports alone": 1.0, "none passes": 0.0}.get(name, 1.001 * best)
        reply = _checked(server, prompt, limit)
        report, kept = report_of(reply), kept_positions(reply)
        expected = reference.generator.generate(input_ids=prompt, max_dropped_attention=limit, **options).metrics
        tried = [each["dropped_attention"] for each in report["tried_rates"]]
        assert [each["keep_rate"] for each in report["tried_rates"]] == RATES[: len(tried)]
        assert tried == pytest.approx([each.dropped_attention for each in expected.tried_rates], rel=2e-3)
        assert report["num_kept_tokens"] == len(kept) == expected.num_kept_tokens
        assert report["sparse_prefill_reason"] == expected.sparse_prefill_reason
        assert report["dropped_attention"] == tried[-1]
        assert reply["output_ids"] == reference.tokens([prompt[at] for at in kept], max_new_tokens=16)
        if limit:
            assert report["outcome"] == "pruned"
            assert tried[-1] <= limit
        else:
            assert (report["outcome"], report["sparse_prefill"], len(tried)) == ("too_much_dropped", False, len(RATES))
            assert report["sparse_prefill_reason"].startswith("off: too much of the draft's attention")
        best = tried[-1]


def test_a_checked_turn_gets_back_what_was_dropped(server: Server, reference: Reference) -> None:
    prompt = reference.prompt(900, seed=205)
    first = server.generate(prompt, 8, sparse_prefill="on", keep_rate=0.1, follow_up="recall")
    history = [*prompt, *first["output_ids"], *reference.user_turn(40, seed=206)]
    reply = server.generate(history, 8, max_dropped_attention=0.0)
    report = report_of(reply)
    # Nothing of its own is pruned, so it has no keep rate, and all that recall leaves is tried.
    assert (report["outcome"], len(report["tried_rates"])) == ("too_much_dropped", 1)
    assert report["num_kept_tokens"] == len(history)
    assert reply["output_ids"] == reference.tokens(history, max_new_tokens=8)


def test_a_repeated_prompt_is_not_checked_again_and_metrics_count_it(server: Server, reference: Reference) -> None:
    prompt, before = reference.prompt(700, seed=207), server.metrics()
    for _ in range(2):
        report = report_of(_checked(server, prompt, 0.0, 2))
        assert (report["outcome"], len(report["tried_rates"])) == ("too_much_dropped", len(RATES))
    assert report["num_draft_tokens"] == 0
    after = server.metrics()
    assert after["spec_stack:dropped_attention_count"] - before["spec_stack:dropped_attention_count"] == 2


def test_a_server_survives_aborts_of_checked_requests(server: Server, reference: Reference) -> None:
    for number in range(4):
        body = generate_body(
            reference.prompt(1200, seed=210 + number), 4, sparse_prefill="on", max_dropped_attention=0.0
        )
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(server.post, "/generate", {**body, "rid": f"checked {number}"})
            while not future.done():
                time.sleep(0.05 * number)
                server.post("/abort_request", {"rid": f"checked {number}"})
        assert future.result()[0] == 200
    pool_state = server.state()["draft_pool"]
    assert (pool_state["num_pinned"], pool_state["num_used"] + pool_state["num_free"]) == (0, pool_state["num_tokens"])
    prompt = reference.prompt(500, seed=201)
    assert report_of(_checked(server, prompt, 1.0, 2))["outcome"] == "pruned"


def test_a_pool_of_the_first_layers_checks_nothing() -> None:
    from spec_stack.sglang.draft_pool import DraftScoringRunner
    from spec_stack.sglang.scoring import DraftScorer

    scorer = DraftScorer(launch_of(1000), DraftScoringRunner(runner_of_layers("cpu"), 100, num_layers=2))
    assert scorer.check_refusal(PrefillConfig()) is None
    refusal = scorer.check_refusal(PrefillConfig(max_dropped_attention=0.1)) or ""
    assert "--spec-stack-max-dropped-attention" in refusal
