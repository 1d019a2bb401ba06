"""Causal attention of the last tokens of one text over all of it, in bounded memory. Pure tensors, no SGLang."""

from __future__ import annotations

import torch

# Scores of one tile of queries over all heads: a quarter of a gigabyte in fp32, whatever the text's length.
MOST_SCORES = 1 << 26


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, most_scores: int = MOST_SCORES
) -> torch.Tensor:
    """Attention of each query over the keys up to its own, tile by tile of queries.

    Parameters
    ----------
    queries
        (num_heads, n, head_dim).
    keys, values
        (num_kv_heads, num_tokens, head_dim), the last n of them the queries' own. May be views of a larger buffer.
    scaling
        Of the scores.
    most_scores
        Bounds the scores, over all heads, that are held at once.

    Returns
    -------
    torch.Tensor
        (num_heads, n, head_dim).
    """
    num_heads, num_queries, _ = queries.shape
    num_tokens = keys.shape[1]
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
