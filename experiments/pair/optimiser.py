"""torch's Muon, with its matrices orthogonalised in fp32: for processors that have no instructions for bf16."""

from __future__ import annotations

import math
from typing import Any

import torch

# https://kellerjordan.github.io/posts/muon/, as torch.optim.Muon has them
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix with singular values near 1: five Newton-Schulz iterations in the matrix's own type."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


class FullPrecisionMuon(torch.optim.Muon):
    """The same steps and the same state as `torch.optim.Muon`, which does them in bf16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalised(parameter.grad.lerp(momentum, group["momentum"]))
                rate = group["lr"] * math.sqrt(max(1.0, parameter.shape[0] / parameter.shape[1]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)
