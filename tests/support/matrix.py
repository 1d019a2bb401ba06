"""What the support table claims, measured: one function per column, on the tiny model of an architecture.

The tests assert on these figures, and `tests/support/support_table.py` prints them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.decode.proposer import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.attention import scored_layers
from tests.support import reference, reference_architectures
from tests.support.controller_data import RandomGamma
from tests.support.forwards import forwards_of, positions_of
from tests.support.scoring import token_importance
from tests.support.tiny_architectures import CONFIGS, VOCAB, make_model, random_prompt

# Longer than the sliding windows.
NUM_PROMPT = 60
KEPT = sorted({*range(0, 30, 3), *range(40, 47), 58, 59})


@dataclass(frozen=True)
class Decoded:
    """Greedy speculative decoding against the reference: how many tokens are equal, and what was proposed."""

    num_equal: int
    num_tokens: int
    num_accepted: int
    num_rejected: int


def cached(name: str, prefill_chunk: int = 4096, **options: Any) -> CachedModel:
    model = make_model(name, **options)
    install(model)
    return CachedModel(model, prefill_chunk)


def score_error(name: str, num_prompt: int = NUM_PROMPT, pool_kernel: int = 5) -> float:
    """Largest difference of importance from loops over eager attention, over the layers that see the whole prompt."""
    prompt = random_prompt(num_prompt)
    draft = cached(name, prefill_chunk=24)
    draft.forward(prompt[:-1], range(num_prompt - 1), 1)
    with draft.capture() as captured:
        proposal = propose(draft, prompt, 4, Sampler(), ())
        draft.forward(proposal.token_ids[-1:], [draft.next_position], 1)
    importance = token_importance(scored_layers(captured, num_prompt).values(), pool_kernel)
    kinds = reference_architectures.attention_layers(CONFIGS[name])
    window = getattr(CONFIGS[name], "sliding_window", None)
    seen_whole = [i for i, kind in enumerate(kinds) if kind == "full" or num_prompt + 4 <= window]
    eager = make_model(name, eager=True)
    expected = reference.importance(eager, prompt, proposal.token_ids, pool_kernel, seen_whole)
    return float(np.abs(importance.numpy() - expected).max())


def sparse_error(name: str, prefill_chunk: int = 4096) -> float:
    """Largest difference of logits after a sparse prefill, and of a block and of single tokens decoded behind it, from
    one forward without a cache over the same tokens at their original positions."""
    prompt, follow = random_prompt(NUM_PROMPT), random_prompt(8, seed=9)
    kept = [prompt[position] for position in KEPT]
    model = cached(name, prefill_chunk)
    got = [model.forward(kept, KEPT, 1), model.forward(follow[:5], range(NUM_PROMPT, NUM_PROMPT + 5), 5)]
    for index in range(5, 8):
        got.append(model.forward(follow[index : index + 1], [NUM_PROMPT + index], 1))
    positions = [*KEPT, *range(NUM_PROMPT, NUM_PROMPT + 8)]
    expected = reference_architectures.logits(make_model(name), kept + follow, positions)[len(KEPT) - 1 :]
    return _relative(torch.cat(got), expected)


def windowed_error(
    name: str, window: int, num_sinks: int, prefill_chunk: int = 4096, kept: Sequence[int] = range(NUM_PROMPT)
) -> float:
    """Largest difference of logits behind a prompt prefilled with a window and sinks, of which a little was rolled
    back, from one forward without a cache under an explicit mask."""
    prompt, follow = random_prompt(NUM_PROMPT), random_prompt(8, seed=9)
    token_ids = [prompt[position] for position in kept]
    model = cached(name, prefill_chunk)
    model.prefill(token_ids, kept, window, num_sinks)
    model.forward(random_prompt(3, seed=5), range(NUM_PROMPT, NUM_PROMPT + 3), 3)
    model.rollback(3)
    got = [model.forward(follow[:5], range(NUM_PROMPT, NUM_PROMPT + 5), 5)]
    got += [model.forward(follow[index : index + 1], [NUM_PROMPT + index], 1) for index in range(5, 8)]
    positions = [*kept, *range(NUM_PROMPT, NUM_PROMPT + 8)]
    prefill = reference_architectures.WindowedPrefill(len(kept), window, num_sinks)
    expected = reference_architectures.logits(make_model(name), token_ids + follow, positions, prefill)
    return _relative(torch.cat(got), expected[len(kept) :])


def decoded(name: str, seed: int = 0, num_tokens: int = 48) -> Decoded:
    """Greedy tokens of random gamma sequences, with a draft that agrees in part, against `generate`."""
    prompt = random_prompt(NUM_PROMPT, seed)
    generator = SpecStackGenerator(make_model(name), make_model(name, disturbed=True))
    result = generator.generate(input_ids=prompt, max_tokens=num_tokens, policy=RandomGamma(seed))
    expected = reference.greedy(make_model(name), prompt, num_tokens)
    return _compare(result, expected)


def decoded_sparsely(name: str, draft: str, seed: int = 0, num_tokens: int = 32) -> Decoded:
    """The same behind a sparse prefill, against uncached forwards over the kept tokens."""
    prompt = random_prompt(NUM_PROMPT + 60, seed)
    config = SpecStackConfig(PrefillConfig(granularity="chunks", keep_rate=0.3, look_ahead=6, chunk_size=8))
    generator = SpecStackGenerator(make_model(name), make_model(draft, disturbed=True), config=config)
    options: dict[str, Any] = {"max_tokens": num_tokens, "sparse_prefill": "on", "policy": RandomGamma(seed)}
    with forwards_of(generator.target) as fed:
        result = generator.generate(input_ids=prompt, **options)
    # A recurrent state goes over some of them again after a rollback.
    kept = sorted({position for position in positions_of(fed) if position < len(prompt)})
    assert len(kept) < len(prompt)
    kept_ids = [prompt[position] for position in kept]
    forward = reference_architectures.logits
    expected = reference.sparse_greedy(make_model(name), kept_ids, kept, len(prompt), num_tokens, forward)
    return _compare(result, expected)


def _compare(result: Any, expected: list[int]) -> Decoded:
    metrics = result.metrics
    return Decoded(
        num_equal=sum(got == want for got, want in zip(result.token_ids, expected, strict=True)),
        num_tokens=len(expected),
        num_accepted=metrics.num_accepted,
        num_rejected=metrics.num_proposed - metrics.num_accepted,
    )


def rollback_error(name: str, seed: int = 0, num_steps: int = 30) -> float:
    """Largest difference of keys, values, states and logits from a fresh prefill, after random blocks, single tokens
    and rollbacks, and one more token."""
    rng = random.Random(seed)
    model = cached(name)
    tokens = random_prompt(NUM_PROMPT, seed)
    model.forward(tokens, range(NUM_PROMPT), 1)
    for _ in range(num_steps):
        block = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 6))]
        start = len(tokens)
        if rng.random() < 0.5:
            model.forward(block, range(start, start + len(block)), len(block))
        else:
            for index, token in enumerate(block):
                model.forward([token], [start + index], 1)
        # Now and then further back than the block.
        back = rng.randint(0, len(block)) if rng.random() < 0.9 else rng.randint(0, 20)
        model.rollback(back)
        tokens = (tokens + block)[: start + len(block) - back]
        assert (model.num_cached, model.next_position) == (len(tokens), len(tokens))
    fresh = cached(name)
    fresh.forward(tokens, range(len(tokens)), 1)
    after = [each.forward([7], [len(tokens)], 1) for each in (model, fresh)]
    pairs = zip([after[0], *_tensors(model)], [after[1], *_tensors(fresh)], strict=True)
    return max(_relative(one, other) for one, other in pairs)


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, in segments of the largest expected value."""
    return float((got - expected).abs().max() / expected.abs().max())


def _tensors(model: CachedModel) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for layer in model._cache.layers:
        if getattr(layer, "keys", None) is not None:
            tensors += [layer.keys, layer.values]
        tensors += getattr(layer, "conv_states", {}).values()
        tensors += getattr(layer, "recurrent_states", {}).values()
    return tensors
