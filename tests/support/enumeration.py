"""Laws of sampled requests: a sampler that takes every way through its draws in turn, tiny models with round or flat
distributions, and the test of draws against a law."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.controller.base import Policy
from spec_stack.controller.ngram import NgramPolicy
from spec_stack.decode.clock import Clock, Phase
from spec_stack.decode.loop import decode
from spec_stack.decode.proposer import DecodeRequest, Proposer
from spec_stack.decode.sampler import Sampler
from spec_stack.decode.stopping import StopChecker
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel
from spec_stack.types import Proposal, Selection
from tests.support.models import make_model, make_tokenizer

_NEGLIGIBLE = 1e-6


class EveryWay(Sampler):
    """Draws that are chosen, not random: of uniform numbers only the middles of `grid` equal parts of [0, 1] come, so
    acceptance probabilities must be multiples of 1 / grid."""

    def __init__(self, path: list[int], grid: int) -> None:
        super().__init__(warp=lambda logits: logits)
        self._path, self._grid = path, grid
        self.num_options: list[int] = []
        self.chance = 1.0

    def _choose(self, chances: Sequence[float]) -> int:
        place = len(self.num_options)
        self.num_options.append(len(chances))
        if place == len(self._path):
            self._path.append(0)
        self.chance *= chances[self._path[place]]
        return self._path[place]

    def pick(self, weights: torch.Tensor) -> int:
        shares = (weights / weights.sum()).tolist()
        tokens = [token for token, share in enumerate(shares) if share > _NEGLIGIBLE]
        return tokens[self._choose([shares[token] for token in tokens])]

    def uniform(self, num: int, device: torch.device) -> torch.Tensor:
        parts = [self._choose([1 / self._grid] * self._grid) for _ in range(num)]
        return torch.tensor([(part + 0.5) / self._grid for part in parts], device=device)


def exact_law(run: Callable[[Sampler], Sequence[int]], grid: int) -> dict[tuple[int, ...], float]:
    """The probability of every outcome of a run, which must decide by its draws alone."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    path: list[int] = []
    while True:
        sampler = EveryWay(path, grid)
        law[tuple(run(sampler))] += sampler.chance
        while path and path[-1] + 1 == sampler.num_options[len(path) - 1]:
            path.pop()
        if not path:
            return dict(law)
        path[-1] += 1


class StoppedClock(Clock):
    """No phase takes any time, so that nothing is decided by it."""

    def take(self, phase: Phase) -> float:
        super().take(phase)
        return 0.0


def chain_model(table: Sequence[Sequence[float]]) -> LlamaForCausalLM:
    """A transformer that is a Markov chain: layers that add nothing, and a head that holds the table's logarithms."""
    size = len(table)
    hidden = 4 * math.ceil(size / 4)
    config = LlamaConfig(
        vocab_size=size, hidden_size=hidden, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        rms_norm_eps=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, hidden))
        logs = torch.tensor([[math.log(share) if share else -60.0 for share in row] for row in table])
        # The last norm brings the one-hot state to the length sqrt(hidden).
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :size] = logs.T / math.sqrt(hidden)
    return model


def chain_tokens(
    tables: Sequence[Sequence[Sequence[float]]],
    source: str,
    prompt: Sequence[int],
    num_tokens: int,
    policy: Policy,
    sampler: Sampler,
) -> Iterator[int]:
    """The real loop over two chains, the target's table first. source: who proposes."""
    models = [chain_model(table) for table in tables]
    for model in models:
        install(model)
    target, draft = (CachedModel(model, 64) for model in models)
    request = DecodeRequest(
        prompt_ids=prompt, sampler=sampler, stopper=StopChecker(num_tokens, ()), end_ids=(), proposer=source,
        precision="fp32", clock=StoppedClock(),
    )  # fmt: skip
    whole, drafts = Selection(prompt, range(len(prompt)), len(prompt)), Proposer(request, draft, NgramPolicy())
    for output in decode(request, target, whole, Proposal(), policy, drafts):
        yield from output.token_ids


def tiny_pair(kind: str = "same") -> tuple[SpecStackGenerator, list[int]]:
    """Two models of next to no words, and a prompt of 40 tokens for them. kind: of the draft's vocabulary."""
    tokenizer = make_tokenizer("a b c ab ca")
    # b, c and a are common; of its proposals none can be ab or ca.
    other = make_tokenizer("c a cb b") if kind == "other" else tokenizer
    sizes = (5, {"same": 5, "narrower": 4, "wider": 7, "other": 4}[kind])
    models = [make_model(seed=seed, vocab=vocab) for seed, vocab in zip((1, 2), sizes, strict=True)]
    for model in models:
        model.lm_head.weight.data.mul_(0.25)
    config = SpecStackConfig(
        PrefillConfig(keep_rate=0.4, look_ahead=3, chunk_size=4, keep_last=1, granularity="chunks")
    )
    letters = "".join("abc"[index] for index in np.random.default_rng(0).integers(3, size=80))
    return SpecStackGenerator(*models, tokenizer, config=config, draft_tokenizer=other), tokenizer(letters).input_ids[
        :40
    ]


def assert_law(counts: Counter[Any], law: Mapping[Any, float]) -> None:
    """Draws against the law of their outcomes: chi-square over the outcomes expected five times, and all others."""
    num_draws = counts.total()
    assert {outcome for outcome in counts if not law.get(outcome)} == set()
    common = [outcome for outcome, chance in law.items() if chance * num_draws >= 5]
    observed = np.array([counts[outcome] for outcome in common], dtype=float)
    expected = np.array([law[outcome] for outcome in common]) * num_draws
    rest = num_draws - observed.sum(), num_draws - expected.sum()
    if rest[1] > 1:
        observed, expected = np.append(observed, rest[0]), np.append(expected, rest[1])
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3
