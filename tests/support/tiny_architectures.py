"""Tiny random models of every architecture in the support table. Nothing here touches the network."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Mamba2Config,
    MinistralConfig,
    MistralConfig,
    NemotronHConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

VOCAB = 64
WINDOW = 16
# What a draft differs by from its target: enough that both acceptances and rejections happen.
_NOISE = 0.015
_NOISE_OF = {"Gemma3": 0.05}
_TOKENS = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
_BASE = {**_TOKENS, **_HEADS, "head_dim": 16}
DENSE = {**_BASE, "intermediate_size": 48, "num_hidden_layers": 3}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "intermediate_size": 48,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_NEMOTRON_H = {
    **_BASE,
    # The letters are known to every transformers; of the layers' names some know only the older, some only the newer.
    "hybrid_override_pattern": "M*-ME*",
    "intermediate_size": 48,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}

CONFIGS: dict[str, Any] = {
    "Llama": LlamaConfig(**DENSE),
    "Mistral": MistralConfig(**DENSE, sliding_window=None),
    "Mistral, sliding": MistralConfig(**DENSE, sliding_window=WINDOW),
    "Ministral": MinistralConfig(**DENSE, sliding_window=WINDOW, layer_types=_SLIDING),
    "Qwen2": Qwen2Config(**DENSE, use_sliding_window=False),
    "Qwen2, sliding": Qwen2Config(**DENSE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "Qwen3": Qwen3Config(**DENSE),
    "Qwen3-MoE": Qwen3MoeConfig(**DENSE, **_EXPERTS),
    "Qwen3.5": Qwen3_5TextConfig(**_BASE, **_DELTA_NET, intermediate_size=48),
    "Qwen3.5-MoE": Qwen3_5MoeTextConfig(**_BASE, **_DELTA_NET, **_SHARED_EXPERT),
    "Qwen3-Next": Qwen3NextConfig(**_BASE, **_DELTA_NET, **_SHARED_EXPERT, intermediate_size=48),
    "Gemma3": Gemma3TextConfig(**DENSE, sliding_window=WINDOW, layer_types=_SLIDING, query_pre_attn_scalar=24),
    "GPT-OSS": GptOssConfig(
        **_BASE,
        intermediate_size=48,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "Nemotron-H": NemotronHConfig(**_NEMOTRON_H),
    # transformers bounds the time step from below in blocks, not in single tokens; here it does so in neither.
    "Nemotron-H, unbounded": NemotronHConfig(**_NEMOTRON_H, time_step_min=1e-9),
    "Falcon-H1": FalconH1Config(**_BASE, **_MAMBA, num_hidden_layers=3, mamba_d_ssm=64),
    "Bamba": BambaConfig(**_TOKENS, **_HEADS, **_MAMBA, num_hidden_layers=4, attn_layer_indices=[1, 3]),
}
REFUSED: dict[str, Any] = {
    "Mamba-2 alone": Mamba2Config(num_hidden_layers=2),
    "Bloom": BloomConfig(),
    "Gemma2": Gemma2Config(),
    "GPT-2": GPT2Config(),
    "Llama, dynamic RoPE": LlamaConfig(
        **DENSE, rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}
    ),
}


# Before 5.24 transformers keeps the recurrent states of its layers in a way that cannot be rolled back.
HAS_OLD_STATES = "state_idx" not in signature(LinearAttentionLayer.lazy_initialization).parameters


def has_states(config: Any) -> bool:
    return any(isinstance(layer, LinearAttentionLayer) for layer in DynamicCache(config=config).layers)


def make_model(name: str, seed: int = 0, disturbed: bool = False, eager: bool = False) -> PreTrainedModel:
    """A random model, the same for the same seed, whose attention and routing are far from uniform, so that mistakes
    in positions, masks or states show. Disturbed, it agrees with the undisturbed one only in part."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    if has_states(config) and HAS_OLD_STATES:
        pytest.skip(f"under this transformers, {name} is refused by name for the way its state is kept")
    implementation = {"attn_implementation": "eager"} if eager else {}
    model = AutoModelForCausalLM.from_config(config, **implementation).eval()
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "lm_head" in parameter_name else 0.3)
            elif "sinks" in parameter_name:
                weight.normal_()
        if disturbed:
            for weight in model.parameters():
                weight.add_(_NOISE_OF.get(name, _NOISE) * torch.randn_like(weight))
    return model


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
