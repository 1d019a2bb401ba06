"""Device specifics: attention in bounded memory, asynchronous copies and synchronization."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

# Head dimension limit of the flash kernel.
_MOST_DIMS, _DIMS_STEP = 256, 8
MOST_SCORES = 1 << 26
"""Scores of one tile of queries over all heads: a quarter of a gigabyte in fp32, whatever the text's length."""
# Captures of all threads share torch's capture stream.
_capturing = threading.Lock()


def has_flash(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether PyTorch's flash kernel, which aligns causal masks bottom-right, runs on this device and dtype."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def fits_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `flash` supports these head dimensions."""
    num_dims = query.shape[-1]
    fits = num_dims == value.shape[-1] and num_dims <= _MOST_DIMS and num_dims % _DIMS_STEP == 0
    return fits and has_flash(query.device, query.dtype)


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Bottom-right causal attention without a mask or score matrix; (batch, num_heads, n, head_dim).

    query: half precision on CUDA. key, value: (batch, num_kv_heads, num_tokens ≥ n, head_dim). The kernel is called
    directly: with a mask `scaled_dot_product_attention` picks a slower one, and on recent GPUs it prefers cuDNN, which
    plans tens of milliseconds for every new length.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    output: torch.Tensor = kernel(query, key, value, 0.0, True, scale=scale)[0]
    return output


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, most_scores: int = MOST_SCORES
) -> torch.Tensor:
    """Attention of each query over the keys up to its own: (num_heads, n, head_dim).

    queries (num_heads, n, head_dim); keys, values (num_kv_heads, num_tokens, head_dim), the last n the queries' own.
    most_scores: bound on the stored scores, over all heads.
    """
    num_heads, num_queries, _ = queries.shape
    num_tokens = keys.shape[1]
    if fits_flash(queries, values):
        return flash(queries[None], keys[None], values[None], scaling)[0]
    first = num_tokens - num_queries
    size = max(1, most_scores // (num_heads * num_tokens))
    tiles = []
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        end = first + stop
        # SDPA aligns its own causal mask with the first key.
        is_square = first + start == 0
        mask = None
        if not is_square and stop - start > 1:
            mask = torch.ones(stop - start, end, dtype=torch.bool, device=queries.device).tril(first + start)
        tiles.append(
            torch.nn.functional.scaled_dot_product_attention(
                queries[None, :, start:stop],
                keys[None, :, :end],
                values[None, :, :end],
                attn_mask=mask,
                is_causal=is_square and stop > 1,
                scale=scaling,
                enable_gqa=num_heads != keys.shape[0],
            )[0]
        )
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device without synchronizing."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work; a no-op on a CPU."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


class CapturedCall:
    """A call whose kernels a CUDA graph replays on the same tensors. Capturing runs none of them.

    call: reads and writes tensors that live as long as this object, and waits for nothing. shares_pool_with: a captured
    call that never runs at the same time; they share temporary memory.
    """

    def __init__(self, call: Callable[[], Any], shares_pool_with: CapturedCall | None = None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        pool = None if shares_pool_with is None else shares_pool_with._graph.pool()
        with _capturing, torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._result = call()

    def replay(self) -> Any:
        """Run the kernels; the same result tensors every time, overwritten by the next replay in this pool."""
        self._graph.replay()
        return self._result
