"""Linear layers for CPUs whose weights oneDNN has laid out beforehand.

A verification computes 2 to 17 tokens at once, and there `F.linear` in fp32 takes two to three times what it takes for
one token, which eats what speculation gains; laid out for oneDNN the same product hardly costs more than one token's,
and prefill is faster too (measured: `experiments/speed/bench_prepack.py`). The operators are private to torch, so they
are tried before anything is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_PRECISIONS = (torch.float32, torch.bfloat16)
# The batch that oneDNN lays the weights out for: a typical verification.
_TYPICAL_TOKENS = 8
# With fewer weights than the first, oneDNN's call costs more than it saves. With fewer than the second it does so for
# one token only, and keeping the weights twice costs little.
_SMALLEST_LAYER = 1 << 16
_SMALL_LAYER = 1 << 20


class PrepackedLinear(nn.Module):
    """A drop-in nn.Linear for inference on a CPU. Its weights can be saved, as the plain layer's, but not trained."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_TOKENS)
        self._plain = weight if weight.numel() < _SMALL_LAYER else None
        # The bias stays a parameter, counted with the others.
        self.num_bytes = weight.nbytes * (1 if self._plain is None else 2)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = self._packed.to_dense() if self._plain is None else self._plain
        destination[f"{prefix}weight"] = weight.detach()

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a model with prepacked linear layers can be neither copied nor pickled; load it with "
            "prepack_linears=False for that, or save it with save_pretrained"
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._plain is not None and inputs.numel() == self.in_features:
            return F.linear(inputs, self._plain, self.bias)
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return output


def _works(dtype: torch.dtype) -> bool:
    """Whether the operators exist here and give the right product."""
    linear = nn.Linear(32, 48, bias=False).to(dtype)
    inputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        with torch.inference_mode():
            got, expected = PrepackedLinear(linear)(inputs), linear(inputs)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(got, expected, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-4)


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether linear layers of this kind can be laid out beforehand here."""
    return device.type == "cpu" and dtype in _PRECISIONS and _works(dtype)


def prepack(model: nn.Module) -> int:
    """Replace every plain nn.Linear of the model that gains by it, in place; returns how many. Subclasses (quantized
    layers) stay."""
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.numel() >= _SMALLEST_LAYER
    ]
    for parent, name, linear in linears:
        setattr(parent, name, PrepackedLinear(linear))
    return len(linears)
