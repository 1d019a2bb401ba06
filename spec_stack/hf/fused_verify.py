"""The acceptance test as one CUDA kernel, flashinfer's, where the device really runs it.

That flashinfer can be imported says nothing: it imports on machines without a GPU and builds its kernels at the first
call. So the kernel is tried on a case with one answer before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch

from spec_stack.config import how_to_install
from spec_stack.decode.sampler import Sampler
from spec_stack.types import Verification

_LEAST_CAPABILITY = (7, 5)


def accept_fused(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, token_ids: Sequence[int], sampler: Sampler
) -> Verification:
    """`decode.verify.accept`, of the same distribution and from other random numbers."""
    from flashinfer.sampling import chain_speculative_sampling

    tokens = torch.tensor([list(token_ids)], dtype=torch.int32, device=target_probs.device)
    # A seed of our own: given a generator, flashinfer 0.6 reads random numbers that torch's next draw reads again.
    output, _, num_emitted = chain_speculative_sampling(
        draft_probs[None].contiguous(),
        tokens,
        target_probs[None].contiguous(),
        seed=sampler.draw_seed(),
        offset=0,
    )
    # The second result counts tokens that would have been accepted one by one; the third is the accepted prefix.
    *emitted, num_accepted = torch.cat([output[0], num_emitted]).tolist()
    next_token = emitted[num_accepted]
    # Where rounding leaves no residual to draw from, the kernel names no token.
    if not 0 <= next_token < target_probs.shape[-1]:
        next_token = sampler.pick(target_probs[num_accepted])
    return Verification(num_accepted, next_token)


@cache
def fused_problem(device: torch.device) -> str | None:
    """Why `accept_fused` cannot be used on a device; None where it can. The first call for a CUDA device may take
    minutes, since flashinfer builds the kernel in it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "it needs a CUDA device"
    if find_spec("flashinfer") is None:
        return f"flashinfer is not installed: {how_to_install('flashinfer')}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"the device's capability {capability} is under {_LEAST_CAPABILITY}"
    return try_fused(device)


def try_fused(device: torch.device) -> str | None:
    """Run a case with one answer; the reason where that fails."""
    certain = torch.eye(8, device=device)
    sampler = Sampler(generator=torch.Generator(device).manual_seed(0))
    try:
        verification = accept_fused(certain[[1, 2, 3]], certain[[1, 5]], [1, 5], sampler)
    except Exception as error:
        # Building a kernel can fail in as many ways as there are compilers; the other route is there for all of them.
        return f"flashinfer fails here: {type(error).__name__}: {error}"
    return None if verification == Verification(1, 2) else f"flashinfer gives a wrong answer here: {verification}"
