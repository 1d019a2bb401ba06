"""Pairs of random weights at real shapes, made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from spec_stack import PrefillConfig

_COMMON = {
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _config(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], head_dim: int, vocab: int, tied: bool = False
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        **_COMMON,
    )


@dataclass(frozen=True)
class Shape:
    """A pair's configurations and the grid to measure it on. lengths and cached: in tokens."""

    target: LlamaConfig
    draft: LlamaConfig
    lengths: tuple[int, ...] = (8192, 16384, 32768, 65536)
    keep_rates: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5)
    cached: tuple[int, ...] = (1024, 8192, 32768)
    prefill_chunk: int = PrefillConfig.prefill_chunk

    def num_tokens(self, length: int) -> int:
        """The prompt of a length: a little shorter where the first answers would run past the last position."""
        most: int = self.target.max_position_embeddings
        return min(length, most - 64)


def _llama_1b(vocab: int) -> LlamaConfig:
    return _config(2048, 8192, 16, (32, 8), 64, vocab, tied=True)


# The 32B target has Qwen2.5-32B's sizes; its draft Llama-3.2-1B's, with the target's vocabulary.
SHAPES = {
    "llama-8b": Shape(_config(4096, 14336, 32, (32, 8), 128, 128256), _llama_1b(128256)),
    "qwen-32b": Shape(_config(5120, 27648, 64, (40, 8), 128, 152064), _llama_1b(152064)),
    "tiny": Shape(
        _config(64, 96, 3, (8, 2), 16, 512),
        _config(32, 48, 2, (4, 2), 16, 512),
        lengths=(256, 512),
        keep_rates=(0.2, 0.5),
        cached=(64, 192),
        prefill_chunk=128,
    ),
}


def make_model(config: LlamaConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model of random weights, made where it will run."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def random_prompt(num_tokens: int, vocab: int) -> list[int]:
    return torch.randint(2, vocab, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()


class Models:
    """A shape's target and draft, made when they are asked for."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device

    @cached_property
    def draft(self) -> PreTrainedModel:
        return make_model(self.shape.draft, self.device, torch.bfloat16, seed=1)

    @cached_property
    def target(self) -> PreTrainedModel:
        return make_model(self.shape.target, self.device, torch.bfloat16)
