"""Causal attention of a text's last tokens over all of it, in bounded memory. Pure tensors, no SGLang.

On CUDA in half precision one flash kernel, which stores no scores; else, and under a window, tiles of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from spec_stack import devices

# Scores of one tile of queries over all heads: a quarter of a gigabyte in fp32, whatever the text's length.
MOST_SCORES = 1 << 26
# Queries in a tile under a window: fewer waste launches, more waste masked scores.
_WINDOW_TILE = 128


@dataclass(frozen=True)
class Window:
    """A token attends to the last num_tokens up to itself, and to the first num_sinks of the text."""

    num_tokens: int
    num_sinks: int


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    most_scores: int = MOST_SCORES,
    window: Window | None = None,
) -> torch.Tensor:
    """Attention of each query over the keys up to its own: (num_heads, n, head_dim).

    queries (num_heads, n, head_dim); keys, values (num_kv_heads, num_tokens, head_dim), the last n the queries' own.
    most_scores: bound on the stored scores, over all heads. window: None is all keys.
    """
    num_heads, num_queries, _ = queries.shape
    num_tokens = keys.shape[1]
    if window is not None and window.num_tokens + window.num_sinks < num_tokens:
        return _attend_in_a_window(queries, keys, values, scaling, window)
    if devices.fits_flash(queries, values):
        return devices.flash(queries[None], keys[None], values[None], scaling)[0]
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


def _attend_in_a_window(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: Window
) -> torch.Tensor:
    """Tiles of queries, each over the sinks and the reach of its own window.

    Heads that share a key head are folded into the queries: CUDA has no fast kernel for grouped heads with a mask.
    """
    num_heads, num_queries, head_dim = queries.shape
    groups = num_heads // keys.shape[0]
    first = keys.shape[1] - num_queries
    # At multiples of a tile's size in the text, so that prompts of any length have the same few shapes.
    inner = range((first // _WINDOW_TILE + 1) * _WINDOW_TILE, keys.shape[1], _WINDOW_TILE)
    tiles = []
    for begin, end in pairwise([first, *inner, keys.shape[1]]):
        # The window may reach into the sinks, which count once.
        reach = max(0, begin - window.num_tokens + 1)
        num_front = min(window.num_sinks, reach)
        seen_keys, seen_values = (
            torch.cat([each[:, :num_front], each[:, reach:end]], dim=1) if num_front else each[:, reach:end]
            for each in (keys, values)
        )
        own = torch.arange(begin, end, device=queries.device)[:, None]
        at = torch.cat([torch.arange(*span, device=queries.device) for span in ((0, num_front), (reach, end))])[None]
        mask = (at <= own) & ((at > own - window.num_tokens) | (at < window.num_sinks))
        folded = queries[:, begin - first : end - first].reshape(keys.shape[0], -1, head_dim)
        output = torch.nn.functional.scaled_dot_product_attention(
            folded[None], seen_keys[None], seen_values[None], attn_mask=mask.repeat(groups, 1), scale=scaling
        )
        tiles.append(output.reshape(num_heads, end - begin, -1))
    return torch.cat(tiles, dim=1)
