"""Gammas that policies and requests choose, and that no token changes by them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from spec_stack.controller.tuning import TUNING
from tests.support.nightly import others_nightly

from .conftest import Reference, Server


@pytest.mark.parametrize(
    ("policy", "num_requests"),
    # By day tests/serving/test_serving.py has one of `ema`.
    others_nightly(product(("throughput", "ema"), (1, 4, 8)), usual=[("throughput", 8)]),
)
def test_policies_change_gamma_and_no_token(
    server: Server, reference: Reference, policy: str, num_requests: int
) -> None:
    """`throughput` tries another gamma than the best once in so many steps, whatever they take on this machine."""
    gammas, num_steps, seed = set[int](), 0, 50
    while len(gammas) < 2 and num_steps <= 2 * TUNING.check_every:
        prompts = [reference.prompt(100 + 30 * index, seed=seed + index) for index in range(num_requests)]
        replies = server.generate_all([(prompt, {"max_new_tokens": 48, "policy": policy}) for prompt in prompts])
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=48)
        traces = [reply["meta_info"]["spec_stack"]["gamma_trace"] for reply in replies]
        gammas.update(*traces)
        num_steps += max(map(len, traces))
        seed += num_requests
    assert len(gammas) > 1


def test_a_request_that_caps_its_gamma_slows_nobody_and_keeps_its_cap(server: Server, reference: Reference) -> None:
    prompts = [reference.prompt(120 + 40 * index, seed=90 + index) for index in range(4)]
    gammas = (0, 1, 2, 8)
    asked = [{"max_new_tokens": 60, "gamma": gamma} for gamma in gammas]
    replies = server.generate_all(list(zip(prompts, asked, strict=True)))
    for prompt, gamma, reply in zip(prompts, gammas, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=60)
        info = reply["meta_info"]["spec_stack"]
        assert set(info["gamma_trace"]) == {gamma}
        assert max(info["accepted_trace"]) <= gamma
    assert max(replies[-1]["meta_info"]["spec_stack"]["accepted_trace"]) > 2


@pytest.mark.parametrize("others", others_nightly([{}, {"gamma": 4}], usual=[{"gamma": 4}]), ids=["free", "longer"])
def test_a_capped_request_beside_others_changes_no_token(
    server: Server, reference: Reference, others: dict[str, Any]
) -> None:
    prompts = [reference.prompt(100 + 40 * index, seed=50 + index) for index in range(4)]
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 80, **own} for own in ({"gamma": 0}, {"gamma": 1}, others, others)
    ]
    replies = server.generate_all(list(zip(prompts, asked, strict=True)))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=80)
    traces = [reply["meta_info"]["spec_stack"]["gamma_trace"] for reply in replies]
    assert (set(traces[0]), set(traces[1]) <= {0, 1}) == ({0}, True)
    # What free ones draft is for the policy to choose by what steps cost; those who ask for more are not held back.
    assert others == {} or max(traces[2]) == 4
