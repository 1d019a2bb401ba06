"""The attention function that spec_stack's models run on: transformers' SDPA, plus two things it lacks.

It can hand the post-rotary queries and keys of a forward to whoever is capturing (the draft's scoring), and it
folds the query heads that share a key head into the query length for short blocks over a long cache, where
transformers' SDPA copies the whole KV cache once per step to repeat its heads (measured: half of the time of
a 5-token verification at 8K cached tokens on a CPU).

On CUDA no mask is made for a block that meets a cache, where transformers makes one (1 GB, and 2 GB more once added to
the scores in 16 bits, for an 8,192-token chunk at 128K): a mask also keeps SDPA off its flash kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# The name must avoid "sdpa", "flash", "flex_attention" and "/": transformers gives those substrings a meaning.
NAME = "spec_stack"
_MAX_FOLDED_QUERIES = 64


@dataclass
class LayerCapture:
    """Queries and keys of one attention layer, rotary positions applied.

    queries: one (num_heads, n, head_dim) tensor per forward; keys (num_kv_heads, num_cached, head_dim), the latest.
    """

    scaling: float
    queries: list[torch.Tensor] = field(default_factory=list)
    keys: torch.Tensor | None = None


_captures = threading.local()


@contextmanager
def capture_attention() -> Iterator[dict[int, LayerCapture]]:
    """Collect the queries and keys of every attention layer run by this thread inside the block, by layer index."""
    if getattr(_captures, "layers", None) is not None:
        raise RuntimeError("attention is being captured already in this thread")
    layers: dict[int, LayerCapture] = {}
    _captures.layers = layers
    try:
        yield layers
    finally:
        _captures.layers = None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A transformers attention function: query (1, heads, n, dim), key and value (1, kv_heads, cached, dim).

    attention_mask None is causal with the last query at the last key, however many keys come before the queries.
    """
    layers: dict[int, LayerCapture] | None = getattr(_captures, "layers", None)
    if layers is not None:
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        layer = layers.setdefault(int(module.layer_idx), LayerCapture(scale))  # type: ignore[arg-type]
        layer.queries.append(query[0])
        layer.keys = key[0]
    batch, num_heads, num_queries, head_dim = query.shape
    groups = num_heads // key.shape[1]
    if attention_mask is None and 1 < num_queries < key.shape[2]:
        bias = causal_lower_right(num_queries, key.shape[2])
        output = F.scaled_dot_product_attention(query, key, value, bias, scale=scaling, enable_gqa=groups > 1)
        return output.transpose(1, 2).contiguous(), None
    # On CUDA a single query goes to SDPA's own grouped kernel, which needs no copy.
    folds = num_queries > 1 or query.device.type == "cpu"
    if groups == 1 or not folds or num_queries > _MAX_FOLDED_QUERIES or key.shape[2] == num_queries:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    folded = query.reshape(batch, num_heads // groups, groups * num_queries, head_dim)
    mask = None
    if attention_mask is not None:
        mask = attention_mask.expand(batch, 1, num_queries, -1).repeat(1, 1, groups, 1)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, num_heads, num_queries, head_dim).transpose(1, 2).contiguous(), None


def _has_flash(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether SDPA's flash kernel, which aligns a causal mask with the last key, runs there."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def causal_mask(
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """A transformers mask function: its SDPA mask, or None only where that means to `attend` what is asked for."""
    # Not so in a cache allocated for longer than what was read.
    is_aligned = allow_is_causal_skip and bool(q_offset + q_length == kv_length)
    if is_aligned and attention_mask is None and _has_flash(torch.device(device), dtype):
        return None
    mask: torch.Tensor | None = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=is_aligned,
        device=device,
        **kwargs,
    )
    return mask


def install(model: PreTrainedModel) -> None:
    """Run the model's attention through `attend`. Raises ValueError for a model that was not loaded with SDPA."""
    if model.config._attn_implementation == NAME:
        return
    if model.config._attn_implementation != "sdpa":
        raise ValueError(
            f"{type(model).__name__} was loaded with attn_implementation={model.config._attn_implementation!r}; "
            "load it with 'sdpa'"
        )
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, causal_mask)
    model.set_attn_implementation(NAME)
