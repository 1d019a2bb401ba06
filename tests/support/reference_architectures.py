"""Slow oracles for every architecture: explicit masks by position, no cache. Imports nothing from spec_stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel


def visible(positions: Sequence[int], window: int | None) -> list[list[bool]]:
    """Which key each query sees: none after it, and none as far back as the window is wide."""
    return [[key <= query and (window is None or query - key < window) for key in positions] for query in positions]


@dataclass(frozen=True)
class WindowedPrefill:
    """The first num_tokens tokens see, in layers without a window of their own, only the `window` positions up to
    themselves and the positions below num_sinks; in the others the smaller window."""

    num_tokens: int
    window: int
    num_sinks: int

    def hides(self, query: int, key: int, window: int | None) -> bool:
        if window is not None:
            return query - key >= min(window, self.window)
        return query - key >= self.window and key >= self.num_sinks


def masks(config: Any, positions: Sequence[int], dtype: torch.dtype, prefill: WindowedPrefill | None = None) -> Any:
    """Additive masks in the form the model takes them: by layer type, or one for all layers."""

    def additive(window: int | None) -> torch.Tensor:
        seen = torch.tensor(visible(positions, window))
        for row, query in enumerate(positions[: prefill.num_tokens] if prefill else []):
            for column, key in enumerate(positions):
                seen[row, column] &= not prefill.hides(query, key, window)  # type: ignore[union-attr]
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]

    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None) is None:
        return additive(window)
    return {
        "full_attention": additive(None),
        "sliding_attention": additive(window),
        "linear_attention": None,
    }


def logits(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    positions: Sequence[int],
    prefill: WindowedPrefill | None = None,
) -> torch.Tensor:
    """One forward without a cache, at explicit positions, every window in positions. (num_tokens, vocab)."""
    with torch.no_grad():
        output = model(
            torch.tensor([list(token_ids)]),
            attention_mask=masks(model.config, positions, model.dtype, prefill),
            position_ids=torch.tensor([list(positions)]),
            use_cache=False,
        )
    return output.logits[0]


def attention_layers(config: Any) -> list[str]:
    """The kind of every attention layer, in order: the layers that output_attentions shows."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return ["full" if window is None else "sliding"] * config.num_hidden_layers
    kinds = {"full_attention": "full", "hybrid": "full", "sliding_attention": "sliding"}
    return [kinds[name] for name in types if name in kinds]
