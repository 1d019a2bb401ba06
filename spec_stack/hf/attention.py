"""Attention function of all models: transformers' SDPA plus capture, and masks by the original positions of the cache
slots. A long block over a long cache never materializes its mask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_stack import devices
from spec_stack.hf.slots import KeysCached, Seen, SlotPositions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The name must not contain "sdpa", "flash", "flex_attention" or "/", which transformers matches on.
NAME = "spec_stack"
_MAX_FOLDED_QUERIES = 64
# Most scores or mask entries held at once, for kernels that materialize them.
_MAX_SCORES = 1 << 26
# Queries per block of windowed attention: small blocks add launches, large ones masked scores.
_WINDOW_BLOCK = 128
# Widest window plus sinks whose blocks run as one batch.
_MAX_COPIED = 1024


@dataclass
class LayerCapture:
    """A layer's post-rotary queries (num_heads, n, head_dim) per forward; keys (num_kv_heads, num_cached, head_dim),
    None once a sliding window hides some. sinks: (num_heads,) logits that join the softmax."""

    scaling: float
    queries: list[Tensor] = field(default_factory=list)
    keys: Tensor | None = None
    sinks: Tensor | None = None


class _Running(threading.local):
    """What forwards of this thread capture and where their tokens stand. Set from the start: a compiled forward guards
    that an attribute exists."""

    def __init__(self) -> None:
        self.captured: dict[int, LayerCapture] | None = None
        self.captured_from = 0
        self.slots: SlotPositions | None = None


_thread = _Running()


@contextmanager
def capture_attention(first: int = 0) -> Iterator[dict[int, LayerCapture]]:
    """Collect keys, and queries of the tokens from position `first` on, by layer index from this thread's forwards
    inside the block."""
    if is_capturing():
        raise RuntimeError("attention is being captured already in this thread")
    layers: dict[int, LayerCapture] = {}
    _thread.captured, _thread.captured_from = layers, first
    try:
        yield layers
    finally:
        _thread.captured = None


def is_capturing() -> bool:
    """Whether this thread is inside `capture_attention`."""
    return _thread.captured is not None


@contextmanager
def attend_by_position(slots: SlotPositions) -> Iterator[None]:
    """Inside the block this thread masks by slot position, in slot order, the forward's own tokens included."""
    _thread.slots = slots
    try:
        yield
    finally:
        _thread.slots = None


def causal_mask(allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """A transformers mask function: the SDPA mask (batch, 1, q_length, kv_length). None where `attend` is causal
    without a mask or masks by position."""
    if _thread.slots is not None:
        return None
    from transformers.masking_utils import sdpa_mask

    # A cache that is allocated beyond its contents needs a mask.
    is_aligned = bool(kwargs.get("q_offset", 0) + kwargs["q_length"] == kwargs["kv_length"])
    mask: Tensor | None = sdpa_mask(allow_is_causal_skip=allow_is_causal_skip and is_aligned, **kwargs)
    return mask


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A transformers attention function: (1, n, num_heads, head_dim) and no weights, of queries (1, num_heads, n,
    head_dim) and keys and values (1, num_kv_heads, num_cached, head_dim). Under `attend_by_position` positions replace
    the mask (1, 1, n, num_cached), and None is bottom-right causal."""
    window, sinks = kwargs.get("sliding_window"), kwargs.get("s_aux")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    slots: SlotPositions | None = _thread.slots
    if slots is not None and slots.on_piece is not None:
        slots.on_piece(query.shape[2], int(module.layer_idx) / slots.num_layers)  # type: ignore[arg-type]
    if _thread.captured is not None:
        _capture(_thread.captured, module, query, key, scale, window, sinks)
    if slots is not None and slots.last_layer == module.layer_idx:
        raise KeysCached
    if slots is not None:
        if key.shape[2] != len(slots.positions):
            raise RuntimeError(f"{key.shape[2]} cached keys for {len(slots.positions)} positions")
        seen = slots.seen(query.shape[2], window)
        output = _attend_by_position(query, key, value, scale, sinks, slots, seen)
        if output is not None:
            return output.transpose(1, 2).contiguous(), None
        key, value, attention_mask = key[:, :, seen.first :], value[:, :, seen.first :], None
    # Encoder layers are bidirectional; transformers handles them.
    told = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if told is None else told
    output = None
    if is_causal and sinks is not None:
        # SDPA has no sinks (GPT-OSS).
        output = _attend_with_sinks(query, key, value, attention_mask, scale, sinks)
    elif is_causal:
        output = _attend_causally(query, key, value, attention_mask, scale)
    if output is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale, **kwargs)[0], None
    return output.transpose(1, 2).contiguous(), None


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
    """Attention (1, num_heads, n, head_dim) under a mask, or bottom-right causal; None leaves it to transformers."""
    num_queries, num_keys, is_grouped = query.shape[2], key.shape[2], query.shape[1] > key.shape[1]
    # The mask that transformers builds on CUDA takes 1 GB for an 8,192-token chunk at 128K.
    if mask is None and devices.fits_flash(query, value):
        return devices.flash(query, key, value, scale)
    if mask is None and 1 < num_queries < num_keys:
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(num_queries, num_keys)
        return F.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=is_grouped)
    # transformers repeats the KV heads by copying the whole cache in every step.
    is_short = num_queries <= _MAX_FOLDED_QUERIES and num_queries < num_keys
    return _attend_folded(query, key, value, mask, scale) if is_grouped and is_short else None


def _attend_by_position(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None, slots: SlotPositions, seen: Seen
) -> Tensor | None:
    """Attention masked by position; None where plain causal attention from `seen.first` on is enough."""
    num_queries, num_keys = query.shape[2], key.shape[2] - seen.first
    if sinks is not None:
        return _attend_in_blocks(query, key, value, scale, slots, seen, partial(_attend_with_sinks, sinks=sinks))
    if seen.window is not None:
        return _attend_in_windows(query, key, value, scale, slots, seen)
    if slots.hides_older(num_queries):
        return _attend_in_blocks(query, key, value, scale, slots, seen, _attend_folded)
    if num_queries in (1, num_keys) or devices.has_flash(query.device, query.dtype):
        return None
    if num_queries > _MAX_FOLDED_QUERIES and query.device.type == "cpu":
        return _attend_past_and_present(query, key[:, :, seen.first :], value[:, :, seen.first :], scale)
    return _attend_in_blocks(query, key, value, scale, slots, seen, _attend_folded)


def _capture(
    captured: dict[int, LayerCapture],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
) -> None:
    """Record queries and keys."""
    index = int(module.layer_idx)  # type: ignore[arg-type]
    layer = captured.setdefault(index, LayerCapture(scaling, sinks=None if sinks is None else sinks.detach()))
    num_queries, slots = query.shape[2], _thread.slots
    num_wanted = num_queries if slots is None else slots.num_from(_thread.captured_from, num_queries)
    if num_wanted:
        # A part is copied, so that the rest is freed.
        layer.queries.append(query[0] if num_wanted == num_queries else query[0, :, -num_wanted:].clone())
    layer.keys = key[0] if window is None or key.shape[2] <= window else None


def _attend_folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Grouped-query attention with the group folded into the query length; (1, num_heads, n, head_dim)."""
    batch, num_heads, num_queries, head_dim = query.shape
    groups = num_heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * num_queries, head_dim)
    if mask is not None:
        mask = mask.expand(batch, 1, num_queries, -1)
        mask = mask if num_queries == 1 else mask.repeat(1, 1, groups, 1)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return output.reshape(batch, num_heads, num_queries, head_dim)


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """Attention with a valueless softmax column per head, the sink. mask: bool; None is bottom-right causal."""
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    groups = num_heads // num_kv_heads
    if mask is None:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(num_keys - num_queries)[None, None]
    grouped = query.reshape(batch, num_kv_heads, groups, num_queries, head_dim) * scale
    outputs = []
    size = max(1, _MAX_SCORES // (batch * num_heads * num_keys))
    for start in range(0, num_queries, size):
        scores = torch.matmul(grouped[:, :, :, start : start + size], key[:, :, None].transpose(-1, -2))
        hidden = ~mask[:, :, None, start : start + size, :num_keys]
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        sink = sinks.to(scores.dtype).reshape(1, num_kv_heads, groups, 1, 1).expand(*scores.shape[:4], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]
        outputs.append(torch.matmul(weights.to(value.dtype), value[:, :, None]))
    return torch.cat(outputs, dim=3).reshape(batch, num_heads, num_queries, head_dim)


def _attend_past_and_present(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention on the cache and causal attention on the block, merged by log-sum-exp: faster than a mask."""
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads, past = key.shape[1], key.shape[2] - num_queries
    groups = num_heads // num_kv_heads
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own = [each[:, :, past:].repeat_interleave(groups, 1) for each in (key, value)]
    output, log_sum = kernel(query, *own, 0.0, True, scale=scale)
    folded = query.reshape(batch, num_kv_heads, groups * num_queries, head_dim)
    before, log_sum_before = kernel(folded, key[:, :, :past], value[:, :, :past], 0.0, False, scale=scale)
    share = torch.sigmoid(log_sum_before.reshape(log_sum.shape) - log_sum)[..., None].to(output.dtype)
    merged: Tensor = torch.lerp(output, before.reshape(output.shape), share)
    return merged


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def _attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    slots: SlotPositions,
    seen: Seen,
    kernel: Kernel,
    begin: int | None = None,
) -> Tensor:
    """Attention in query blocks, each masked over its visible slots. begin: slot of the first query."""
    num_queries = query.shape[2]
    begin = key.shape[2] - num_queries if begin is None else begin
    size = max(1, min(_MAX_SCORES // (query.shape[1] * key.shape[2]), num_queries))
    if seen.window is not None:
        size = min(size, max(_WINDOW_BLOCK, seen.window))
    outputs = []
    for start in range(begin, begin + num_queries, size):
        stop = min(start + size, begin + num_queries)
        num_front, first = slots.shown(start, seen)
        keys, values = key[:, :, first:stop], value[:, :, first:stop]
        if num_front:
            keys = torch.cat([key[:, :, :num_front], keys], 2)
            values = torch.cat([value[:, :, :num_front], values], 2)
        mask = slots.mask(start, stop, seen, key.device)
        outputs.append(kernel(query[:, :, start - begin : stop - begin], keys, values, mask, scale))
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]


def _attend_in_windows(
    query: Tensor, key: Tensor, value: Tensor, scale: float, slots: SlotPositions, seen: Seen
) -> Tensor:
    """Windowed attention with sinks, linear in the queries: regular blocks run as one batch."""
    begin = key.shape[2] - query.shape[2]
    start = max(begin, slots.regular_from(seen))
    num_blocks = max(0, key.shape[2] - start) // _WINDOW_BLOCK
    blocks = partial(
        _attend_in_blocks, key=key, value=value, scale=scale, slots=slots, seen=seen, kernel=_attend_folded
    )
    # The batch duplicates overlapping keys: too many for a wide window.
    if seen.window is None or seen.window + seen.num_sinks > _MAX_COPIED or num_blocks < 2:
        return blocks(query)
    stop = start + num_blocks * _WINDOW_BLOCK
    parts = [_attend_in_alike_blocks(query[:, :, start - begin : stop - begin], key, value, scale, seen, start)]
    if start > begin:
        parts.insert(0, blocks(query[:, :, : start - begin], begin=begin))
    if stop < key.shape[2]:
        parts.append(blocks(query[:, :, stop - begin :]))
    return torch.cat(parts, 2)


def _attend_in_alike_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Seen, start: int) -> Tensor:
    """Query blocks from slot `start` on, each over all sinks and a full window."""
    _, num_heads, num_queries, head_dim = query.shape
    num_kv_heads, size, window = key.shape[1], _WINDOW_BLOCK, seen.window or 0
    groups, num_blocks = num_heads // num_kv_heads, num_queries // size

    def by_block(cached: Tensor) -> Tensor:
        """(num_blocks, num_kv_heads, sinks + window - 1 + size, head_dim)"""
        local = cached[0, :, start - window + 1 : start + num_queries].unfold(1, window - 1 + size, size)
        sinks = cached[0, :, : seen.num_sinks].expand(num_blocks, -1, -1, -1)
        return torch.cat([sinks, local.permute(1, 0, 3, 2)], 2)

    rows = torch.arange(size, device=query.device)[:, None]
    columns = torch.arange(-seen.num_sinks, window - 1 + size, device=query.device)[None]
    mask = (columns < 0) | ((columns >= rows) & (columns < rows + window))
    folded = query.reshape(num_kv_heads, groups, num_blocks, size, head_dim).permute(2, 0, 1, 3, 4)
    folded = folded.reshape(num_blocks, num_kv_heads, groups * size, head_dim)
    output = F.scaled_dot_product_attention(
        folded, by_block(key), by_block(value), attn_mask=mask.repeat(groups, 1)[None, None], scale=scale
    )
    output = output.reshape(num_blocks, num_kv_heads, groups, size, head_dim).permute(1, 2, 0, 3, 4)
    return output.reshape(1, num_heads, num_queries, head_dim)


def is_installed(model: PreTrainedModel) -> bool:
    """Whether the model's attention runs through `attend`."""
    return bool(model.config._attn_implementation == NAME)


def install(model: PreTrainedModel) -> None:
    """Route the model's attention through `attend`, in place; repeated calls do nothing."""
    if is_installed(model):
        return
    loaded = model.config._attn_implementation
    expected = "sdpa" if model._supports_sdpa else "eager"
    if loaded != expected:
        raise ValueError(
            f"{type(model).__name__} was loaded with attn_implementation={loaded!r}; load it with {expected!r}"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, causal_mask)
    model.set_attn_implementation(NAME)
