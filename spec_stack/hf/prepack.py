"""Linear layers with oneDNN-prepacked weights for CPUs: in fp32, verifying 4 tokens takes 1.06 of a plain step, with
`F.linear` 1.42. The operators are private to torch and tested first."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_PRECISIONS = (torch.float32, torch.bfloat16)
# The batch size that oneDNN packs for: a typical verification.
_TYPICAL_TOKENS = 8
# Below this number of weights oneDNN's call overhead exceeds the gain.
_SMALLEST_LAYER = 1 << 16
# Below this number one token is slower in fp32, so the plain weights are kept too.
_SMALL_LAYER = 1 << 20
# In bf16 these many rows take less time than one, two or three.
_FILLED_ROWS = 4
_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "arm_bf16", "sve_bf16")


def has_bf16_instructions() -> bool:
    """Whether the CPU multiplies in bf16 (AVX512-BF16, AMX, Arm's BF16)."""
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in _BF16_INSTRUCTIONS)


class PrepackedLinear(nn.Module):
    """A drop-in nn.Linear for CPU inference. Its weights can be saved as a plain layer's, but not trained."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_TOKENS)
        # The plain weights, for single rows.
        self.plain = weight if weight.dtype == torch.float32 and weight.numel() < _SMALL_LAYER else None
        # Inputs with fewer rows are zero-padded.
        self.least_rows = _FILLED_ROWS if weight.dtype == torch.bfloat16 and has_bf16_instructions() else 1

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = self._packed.to_dense() if self.plain is None else self.plain
        destination[f"{prefix}weight"] = weight.detach()

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a model with prepacked linear layers can be neither copied nor pickled; load it with "
            "prepack_linears=False for that, or save it with save_pretrained"
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        num_rows = inputs.numel() // self.in_features
        if self.plain is not None and num_rows == 1:
            return F.linear(inputs, self.plain, self.bias)
        rows = inputs
        if num_rows < self.least_rows:
            rows = F.pad(inputs.reshape(num_rows, -1), (0, 0, 0, self.least_rows - num_rows))
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output if rows is inputs else output[:num_rows].view(*inputs.shape[:-1], -1)


@cache
def _works(dtype: torch.dtype) -> bool:
    """Whether the operators exist and are correct here."""
    linear = nn.Linear(32, 48, bias=False).to(dtype)
    inputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        with torch.inference_mode():
            got, expected = PrepackedLinear(linear)(inputs), linear(inputs)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(got, expected, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-4)


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device and dtype support prepacking."""
    return device.type == "cpu" and dtype in _PRECISIONS and _works(dtype)


def prepack(model: nn.Module) -> int:
    """Replace every nn.Linear that gains from prepacking, in place; returns their number."""
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.numel() >= _SMALLEST_LAYER
    ]
    for parent, name in places:
        setattr(parent, name, PrepackedLinear(getattr(parent, name)))
    return len(places)
