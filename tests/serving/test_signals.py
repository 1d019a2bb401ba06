"""What the server knows of its draft, what its policies make of it, and that no token changes by it."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import pytest

from .conftest import Reference, Server

POLICIES = ("throughput", "ema")


def _expected(reference: Reference, prompt: list[int], reply: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Confidence and entropy (bits) of every drafted token, by plain forwards of the draft over the whole context.

    SGLang's draft does not see a prompt's first token: its slot j holds token j + 1.
    """
    import torch

    info, outputs = reply["meta_info"]["spec_stack"], reply["output_ids"]
    confidences, entropies, at = [], [], 1
    for gamma, num_accepted in zip(info["gamma_trace"], info["accepted_trace"], strict=True):
        context, confidence, entropy = [*prompt[1:], *outputs[:at]], [], []
        for _ in range(gamma):
            with torch.no_grad():
                logits = reference.generator.draft(torch.tensor([context])).logits[0, -1].double()
            logs = torch.log_softmax(logits, dim=-1)
            confidence.append(float(logs.max().exp()))
            entropy.append(-float((logs.exp() * logs).sum()) / math.log(2))
            context.append(int(logits.argmax()))
        confidences.append(confidence)
        entropies.append(entropy)
        at += num_accepted + 1
    return confidences, entropies


def _prompts(reference: Reference, num_requests: int, seed: int) -> list[list[int]]:
    """Texts that begin with tokens of their own: what two drafts share in the cache holds another's next token."""
    texts = [reference.text_ids(60 + 25 * index, seed=seed + index) for index in range(num_requests)]
    return [[100 + seed + index, *text] for index, text in enumerate(texts)]


@pytest.mark.parametrize(("policy", "num_requests"), [("throughput", 1), ("throughput", 4), ("heuristic", 8)])
def test_the_drafts_signals_are_those_of_transformers_on_the_same_context(
    server: Server, reference: Reference, policy: str, num_requests: int
) -> None:
    """Requests come and go in a batch, and every one's signals are its own."""
    server.flush()
    prompts = _prompts(reference, num_requests, seed=400)
    options = [
        {"max_new_tokens": 16 + 8 * index, "signals": True, "policy": policy, "sparse_prefill": "off"}
        for index in range(num_requests)
    ]
    replies = server.generate_all(list(zip(prompts, options, strict=True)))
    differences: dict[str, list[float]] = {"confidence": [], "entropy": []}
    for prompt, asked, reply in zip(prompts, options, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=asked["max_new_tokens"])
        info = reply["meta_info"]["spec_stack"]
        assert set(info["lag_trace"]) == {1}
        for name, expected in zip(differences, _expected(reference, prompt, reply), strict=True):
            found = info[f"{name}_trace"]
            assert [len(step) for step in found] == info["gamma_trace"]
            differences[name] += [
                # A token's entropy may be several bits, and logits are rounded: by batch, and by what is cached.
                abs(mine - theirs) / max(1.0, theirs)
                for step, wanted in zip(found, expected, strict=True)
                for mine, theirs in zip(step, wanted, strict=True)
            ]
    assert len(differences["entropy"]) > 5
    assert max(median(each) for each in differences.values()) < 2e-6
    assert max(differences["confidence"]) < 1e-5
    # An error of a logit counts in the entropy by the logarithm of its probability: one token in 300 is 1e-5 off.
    assert max(differences["entropy"]) < 3e-5


@pytest.mark.parametrize("num_requests", [1, pytest.param(4, marks=pytest.mark.nightly), 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_that_follow_signals_change_gamma_and_no_token(
    server: Server, reference: Reference, policy: str, num_requests: int
) -> None:
    prompts = [reference.prompt(100 + 30 * index, seed=50 + index) for index in range(8)]
    gammas: set[int] = set()
    for start in range(0, len(prompts), num_requests):
        together = prompts[start : start + num_requests]
        replies = server.generate_all([(prompt, {"max_new_tokens": 80, "policy": policy}) for prompt in together])
        for prompt, reply in zip(together, replies, strict=True):
            assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=80)
            gammas.update(reply["meta_info"]["spec_stack"]["gamma_trace"])
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


@pytest.mark.parametrize("others", [{}, {"gamma": 4}], ids=["free", "longer"])
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
