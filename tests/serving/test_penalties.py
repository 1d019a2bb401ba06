"""Greedy text with penalties is that of no speculation, for whoever asks for them and for who runs beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from .conftest import Reference, Server, generate_body

KINDS: tuple[dict[str, float], ...] = (
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.1},
)


def expected_tokens(reference: Reference, prompt: Sequence[int], num_new: int, asked: Mapping[str, float]) -> list[int]:
    """Plain Transformers, token by token, and a count of what was said."""
    ids, said, cache = list(prompt), Counter[int](), DynamicCache()
    for _ in range(num_new):
        asks = torch.tensor([ids[cache.get_seq_length() :]])
        with torch.no_grad():
            logits = reference.generator.target(asks, past_key_values=cache, use_cache=True).logits[0, -1].double()
        for token, times in said.items():
            logits[token] -= asked.get("frequency_penalty", 0) * times + asked.get("presence_penalty", 0)
            repetition = asked.get("repetition_penalty", 1)
            logits[token] = logits[token] * repetition if logits[token] < 0 else logits[token] / repetition
        ids.append(int(logits.argmax()))
        said[ids[-1]] += 1
    return ids[len(prompt) :]


def ask_penalised(server: Server, prompt: Sequence[int], num_new: int, asked: Mapping[str, float]) -> dict[str, Any]:
    body = generate_body(prompt, num_new)
    body["sampling_params"] |= asked
    status, reply = server.post("/generate", body)
    assert status == 200, reply
    return dict(reply)


@pytest.mark.parametrize("asked", KINDS, ids=lambda asked: next(iter(asked)))
def test_penalties_give_the_text_of_no_speculation(
    server: Server, reference: Reference, asked: dict[str, float]
) -> None:
    changed = 0
    for seed in range(6):
        prompt = reference.prompt(120 + 20 * seed, seed=900 + seed)
        reply = ask_penalised(server, prompt, 40, asked)
        assert reply["output_ids"] == expected_tokens(reference, prompt, 40, asked), seed
        assert not reply["meta_info"]["spec_stack"]["num_proposed"]
        changed += reply["output_ids"] != reference.tokens(prompt, max_new_tokens=40)
    assert changed


def test_who_asks_for_penalties_slows_nobody_beside_them(server: Server, reference: Reference) -> None:
    prompts = [reference.prompt(150, seed=920 + at) for at in range(3)]
    asked: list[dict[str, float]] = [{"frequency_penalty": 0.5}, {}, {}]
    with ThreadPoolExecutor(3) as pool:
        replies = list(
            pool.map(lambda pair: ask_penalised(server, pair[0], 60, pair[1]), zip(prompts, asked, strict=True))
        )
    for prompt, it, reply in zip(prompts, asked, replies, strict=True):
        assert reply["output_ids"] == expected_tokens(reference, prompt, 60, it)
    assert [bool(reply["meta_info"]["spec_stack"]["num_proposed"]) for reply in replies] == [False, True, True]
