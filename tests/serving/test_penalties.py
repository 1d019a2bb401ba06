"""Greedy text with penalties is that of no speculation, for whoever asks for them and for who runs beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.support.nightly import others_nightly
from tests.support.sampling_settings import sampling_params
from tests.support.sglang_requests import request_of

from .conftest import Reference, Server, generate_body

KINDS: tuple[dict[str, float], ...] = (
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.1},
)


def expected_tokens(
    reference: Reference, prompt: Sequence[int], num_new: int, penalties: Mapping[str, float]
) -> list[int]:
    """Plain Transformers, token by token, and a count of what was said."""
    ids, said, cache = list(prompt), Counter[int](), DynamicCache()
    for _ in range(num_new):
        asks = torch.tensor([ids[cache.get_seq_length() :]])
        with torch.no_grad():
            logits = reference.generator.target(asks, past_key_values=cache, use_cache=True).logits[0, -1].double()
        for token, times in said.items():
            logits[token] -= penalties.get("frequency_penalty", 0) * times + penalties.get("presence_penalty", 0)
            repetition = penalties.get("repetition_penalty", 1)
            logits[token] = logits[token] * repetition if logits[token] < 0 else logits[token] / repetition
        ids.append(int(logits.argmax()))
        said[ids[-1]] += 1
    return ids[len(prompt) :]


def ask_penalised(
    server: Server, prompt: Sequence[int], num_new: int, penalties: Mapping[str, float]
) -> dict[str, Any]:
    body = generate_body(prompt, num_new)
    body["sampling_params"] |= penalties
    status, reply = server.post("/generate", body)
    assert status == 200, reply
    return dict(reply)


@pytest.mark.parametrize(
    "penalties", others_nightly(KINDS, usual=[KINDS[0], KINDS[2]]), ids=lambda penalties: next(iter(penalties))
)
def test_penalties_give_the_text_of_no_speculation(
    server: Server, reference: Reference, penalties: dict[str, float]
) -> None:
    changed = 0
    for seed in range(2):
        prompt = reference.prompt(120 + 20 * seed, seed=900 + seed)
        reply = ask_penalised(server, prompt, 32, penalties)
        assert reply["output_ids"] == expected_tokens(reference, prompt, 32, penalties), seed
        assert not reply["meta_info"]["spec_stack"]["num_proposed"]
        changed += reply["output_ids"] != reference.tokens(prompt, max_new_tokens=32)
    assert changed


@pytest.mark.parametrize("penalties", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.5}, {"min_new_tokens": 6}])
def test_a_reply_that_was_retracted_is_penalised_as_one_that_was_not(penalties: dict[str, float]) -> None:
    """SGLang's own penalizers, which begin anew with the prefill that repeats the reply; no server."""
    from sglang.srt.sampling import penaltylib

    from spec_stack.sglang.penalties import Penalties

    end, request = 5, request_of("a")
    request.sampling_params = sampling_params(stop_token_ids=None, **penalties)
    request.origin_input_ids, request.output_ids = [1, 2], [3, 3, 4, 3]
    request.eos_token_ids, request.tokenizer = {end}, SimpleNamespace(additional_stop_token_ids=None, eos_token_id=end)
    batch = type("Batch", (), {"reqs": [request], "device": "cpu"})()
    kinds = ("Frequency", "MinNewTokens", "Presence", "Repetition")
    penalizers = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=8, batch=batch, penalizers={getattr(penaltylib, f"Batched{kind}Penalizer") for kind in kinds}
    )
    exact = Penalties()
    for step in range(5):
        if step:
            penalizers.cumulate_output_tokens(torch.tensor(request.output_ids[-1:]))
        additive = torch.zeros(1, 8)
        penalizers.accumulate_additive_penalties(additive)
        scaling = penalizers.accumulate_scaling_penalties()
        info = SimpleNamespace(acc_additive_penalties=additive, acc_scaling_penalties=scaling)
        if step:
            said = torch.tensor(request.output_ids)
            exact.correct_step([request], info, said[-1:], torch.tensor([2 + len(said) - 1]))
        else:
            exact.correct_prefill([request], info, torch.device("cpu"))
        for token in range(8):
            times = request.output_ids.count(token)
            is_forbidden = token == end and len(request.output_ids) < penalties.get("min_new_tokens", 0)
            assert additive[0, token] == (
                -torch.inf if is_forbidden else -penalties.get("frequency_penalty", 0) * times
            )
            assert scaling is None or scaling[0, token] == (penalties.get("repetition_penalty", 1) if times else 1)
        request.output_ids.append(step)


def test_who_asks_for_penalties_slows_nobody_beside_them(server: Server, reference: Reference) -> None:
    prompts = [reference.prompt(150, seed=920 + at) for at in range(3)]
    penalties: list[dict[str, float]] = [{"frequency_penalty": 0.5}, {}, {}]
    with ThreadPoolExecutor(3) as pool:
        replies = list(
            pool.map(lambda pair: ask_penalised(server, pair[0], 60, pair[1]), zip(prompts, penalties, strict=True))
        )
    for prompt, it, reply in zip(prompts, penalties, replies, strict=True):
        assert reply["output_ids"] == expected_tokens(reference, prompt, 60, it)
    assert [bool(reply["meta_info"]["spec_stack"]["num_proposed"]) for reply in replies] == [False, True, True]
