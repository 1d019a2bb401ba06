"""The attention function that spec_stack's models run on: transformers' SDPA, plus what it lacks.

- It can hand the post-rotary queries and keys of a forward to whoever is capturing (the draft's scoring).
- Under a `CachedModel` it masks by the original position of every cache slot. transformers slides its windows over
  cache slots, so over a pruned cache they would span more of the text than they were made for.
- It takes the kernel that fits the call (`_route` says which, and why).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# The name must avoid "sdpa", "flash", "flex_attention" and "/": transformers gives those substrings a meaning.
NAME = "spec_stack"
_MAX_FOLDED_QUERIES = 64
# Scores of attention with sinks held at once.
_MAX_SINK_SCORES = 1 << 26


@dataclass
class LayerCapture:
    """Queries and keys of one attention layer, rotary positions applied.

    Attributes
    ----------
    scaling
        Of the scores.
    queries
        One (num_heads, n, head_dim) tensor per forward.
    keys
        (num_kv_heads, num_cached, head_dim), the latest, or None once a sliding window hides some of them from the
        newest queries.
    sinks
        (num_heads,): logits that take part in the softmax beside the keys', for a model that has them.
    """

    scaling: float
    queries: list[torch.Tensor] = field(default_factory=list)
    keys: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class SlotPositions:
    """The original positions of all cache slots during one forward, and the masks that follow from them.

    Parameters
    ----------
    positions
        Strictly increasing, one per slot, the forward's own tokens last. Not copied.
    """

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions
        self._masks: dict[tuple[int, int, int], torch.Tensor | None] = {}

    def first_visible(self, num_queries: int, window: int | None) -> int:
        """The oldest slot that any of the newest num_queries tokens sees."""
        if window is None:
            return 0
        return bisect_left(self.positions, self.positions[-num_queries] - window + 1)

    def mask(self, query: torch.Tensor, window: int | None, first: int) -> torch.Tensor | None:
        """What the queries (…, num_queries, dim), the newest tokens', see of the slots from `first` on: bool
        (1, 1, num_queries, num_slots). None where `attend` needs none for causal attention."""
        num_queries, num_slots = query.shape[2], len(self.positions) - first
        slides = window is not None and self.positions[-1] - self.positions[first] >= window
        if not slides and (num_queries in (1, num_slots) or _has_flash(query.device, query.dtype)):
            return None
        key = (num_queries, first, window if window is not None and slides else 0)
        if key not in self._masks:
            self._masks[key] = self._build(num_queries, window if slides else None, first, query.device)
        return self._masks[key]

    def _build(self, num_queries: int, window: int | None, first: int, device: torch.device) -> torch.Tensor:
        num_slots = len(self.positions) - first
        if window is None:
            causal = torch.ones(num_queries, num_slots, dtype=torch.bool, device=device)
            return causal.tril(num_slots - num_queries)[None, None]
        keys = torch.tensor(self.positions[first:], device=device)
        distance = keys[-num_queries:, None] - keys[None, :]
        return ((distance >= 0) & (distance < window))[None, None]


_thread = threading.local()


@contextmanager
def capture_attention() -> Iterator[dict[int, LayerCapture]]:
    """Collect the queries and keys of every attention layer run by this thread inside the block, by layer index.

    Raises
    ------
    RuntimeError
        Inside another such block of the same thread.
    """
    if getattr(_thread, "captured", None) is not None:
        raise RuntimeError("attention is being captured already in this thread")
    layers: dict[int, LayerCapture] = {}
    _thread.captured = layers
    try:
        yield layers
    finally:
        _thread.captured = None


@contextmanager
def attend_by_position(positions: Sequence[int]) -> Iterator[None]:
    """Inside the block this thread's attention masks by the positions of the cache slots.

    Parameters
    ----------
    positions
        One for every slot that the cache holds with the forward's own tokens, in the order of the slots.
    """
    _thread.slots = SlotPositions(positions)
    try:
        yield
    finally:
        _thread.slots = None


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
    """A transformers mask function.

    Returns
    -------
    torch.Tensor or None
        transformers' SDPA mask (batch, 1, q_length, kv_length), or None where that means to `attend` what is asked for,
        or where `attend` masks by position anyway.
    """
    if getattr(_thread, "slots", None) is not None:
        return None
    # Not so in a cache allocated for longer than what it holds, nor where a window hides keys.
    local_size = kwargs.get("local_size")
    is_aligned = allow_is_causal_skip and bool(q_offset + q_length == kv_length)
    if is_aligned and attention_mask is None and local_size is None and _has_flash(torch.device(device), dtype):
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


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A transformers attention function.

    Parameters
    ----------
    module
        The attention layer.
    query
        (1, num_heads, n, head_dim), rotary positions applied.
    key, value
        (1, num_kv_heads, num_cached, head_dim), the newest n are the queries' own.
    attention_mask
        (1, 1, n, num_cached), bool or additive. None is causal with the last query at the last key, however many
        keys come before the queries. Under `attend_by_position` the mask of the positions takes its place.
    scaling
        Of the scores; None is head_dim ** -0.5.

    Returns
    -------
    tuple
        The output (1, n, num_heads, head_dim), and None for the weights.
    """
    window, sinks = kwargs.get("sliding_window"), kwargs.get("s_aux")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    _capture(module, query, key, scale, window, sinks)
    key, value, mask = _visible(query, key, value, attention_mask, window)
    kernel = _route(query, key, mask, sinks)
    if kernel == "library":
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scale, **kwargs)[0], None
    if kernel == "sinks":
        output = _attend_with_sinks(query, key, value, mask, scale, sinks)  # type: ignore[arg-type]
    elif kernel == "lower right":
        output = _attend_lower_right(query, key, value, scale)
    else:
        output = _attend_folded(query, key, value, mask, scale)
    return output.transpose(1, 2).contiguous(), None


def _capture(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """Hand queries and keys to whoever captures in this thread, if anybody does."""
    captured: dict[int, LayerCapture] | None = getattr(_thread, "captured", None)
    if captured is None:
        return
    index = int(module.layer_idx)  # type: ignore[arg-type]
    layer = captured.setdefault(index, LayerCapture(scaling, sinks=None if sinks is None else sinks.detach()))
    layer.queries.append(query[0])
    layer.keys = key[0] if window is None or key.shape[2] <= window else None


def _visible(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The keys and values from the first that any query sees, and the mask over them."""
    slots: SlotPositions | None = getattr(_thread, "slots", None)
    if slots is None:
        return key, value, attention_mask
    if key.shape[2] != len(slots.positions):
        raise RuntimeError(f"{key.shape[2]} cached keys for {len(slots.positions)} positions")
    first = slots.first_visible(query.shape[2], window)
    return key[:, :, first:], value[:, :, first:], slots.mask(query, window, first)


def _route(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None
) -> Literal["sinks", "lower right", "folded", "library"]:
    """Which kernel computes this attention."""
    num_queries, groups = query.shape[2], query.shape[1] // key.shape[1]
    # GPT-OSS's sinks are no business of SDPA's.
    if sinks is not None:
        return "sinks"
    # On CUDA no mask is made for a block that meets a cache, where transformers makes one (1 GB, and 2 GB more once
    # added to the scores in 16 bits, for an 8,192-token chunk at 128K): a mask also keeps SDPA off its flash kernel.
    if mask is None and 1 < num_queries < key.shape[2]:
        return "lower right"
    # For a short block over a long cache transformers copies the whole KV cache once per step to repeat its heads (half
    # of the time of a 5-token verification at 8K cached tokens on a CPU). A single query on CUDA goes to SDPA's own
    # grouped kernel, which needs no copy.
    is_short = num_queries <= _MAX_FOLDED_QUERIES and num_queries < key.shape[2]
    if groups > 1 and is_short and (num_queries > 1 or query.device.type == "cpu"):
        return "folded"
    return "library"


def _attend_lower_right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal, the last query at the last key; (1, num_heads, n, head_dim)."""
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(
        query, key, value, bias, scale=scale, enable_gqa=query.shape[1] > key.shape[1]
    )


def _attend_folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The query heads that share a key head folded into the query length; (1, num_heads, n, head_dim)."""
    batch, num_heads, num_queries, head_dim = query.shape
    groups = num_heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * num_queries, head_dim)
    if mask is not None:
        mask = mask.expand(batch, 1, num_queries, -1).repeat(1, 1, groups, 1)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return output.reshape(batch, num_heads, num_queries, head_dim)


def _attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention whose softmax has one more column per head, the sink's, which brings no value; (1, num_heads, n,
    head_dim). The mask is bool; None is causal."""
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads, num_slots = key.shape[1], key.shape[2]
    groups = num_heads // num_kv_heads
    if mask is None and num_queries > 1:
        mask = torch.ones(num_queries, num_slots, dtype=torch.bool, device=query.device)
        mask = mask.tril(num_slots - num_queries)[None, None]
    grouped = query.reshape(batch, num_kv_heads, groups, num_queries, head_dim) * scaling
    outputs = []
    size = max(1, _MAX_SINK_SCORES // (batch * num_heads * num_slots))
    for start in range(0, num_queries, size):
        scores = torch.matmul(grouped[:, :, :, start : start + size], key[:, :, None].transpose(-1, -2))
        if mask is not None:
            hidden = ~mask[:, :, start : start + size, :num_slots]
            scores = scores.masked_fill(hidden[:, :, None], torch.finfo(scores.dtype).min)
        sink = sinks.to(scores.dtype).reshape(1, num_kv_heads, groups, 1, 1).expand(*scores.shape[:4], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]
        outputs.append(torch.matmul(weights.to(value.dtype), value[:, :, None]))
    return torch.cat(outputs, dim=3).reshape(batch, num_heads, num_queries, head_dim)


def install(model: PreTrainedModel) -> None:
    """Run the model's attention through `attend`; the model is changed in place, once.

    Raises
    ------
    ValueError
        For a model that was not loaded with SDPA, or with eager attention where transformers has no SDPA for it.
    """
    loaded = model.config._attn_implementation
    if loaded == NAME:
        return
    expected = "sdpa" if model._supports_sdpa else "eager"
    if loaded != expected:
        raise ValueError(
            f"{type(model).__name__} was loaded with attn_implementation={loaded!r}; load it with {expected!r}"
        )
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, causal_mask)
    model.set_attn_implementation(NAME)
