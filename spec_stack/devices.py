"""What a GPU needs to be told: the attention kernel by its name, copies that nobody waits for, and when to wait."""

from __future__ import annotations

import torch

# Of one head, in the flash kernel.
_MOST_DIMS, _DIMS_STEP = 256, 8


def has_flash(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Return whether PyTorch's flash kernel, which aligns a causal mask with the last key, runs there."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def fits_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether `flash` takes queries and values of these heads."""
    num_dims = query.shape[-1]
    fits = num_dims == value.shape[-1] and num_dims <= _MOST_DIMS and num_dims % _DIMS_STEP == 0
    return fits and has_flash(query.device, query.dtype)


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention without a mask or a score matrix, the last query at the last key.

    Parameters
    ----------
    query
        (batch, num_heads, n, head_dim), in half precision on CUDA.
    key, value
        (batch, num_kv_heads, num_tokens, head_dim), n or more tokens.
    scale
        Of the scores.

    Returns
    -------
    torch.Tensor
        (batch, num_heads, n, head_dim).

    Notes
    -----
    The kernel is called by its name. `scaled_dot_product_attention` leaves it for a slower one wherever it is given a
    mask, and on recent GPUs prefers cuDNN, which builds a plan of tens of milliseconds for every new length.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    output: torch.Tensor = kernel(query, key, value, 0.0, True, scale=scale)[0]
    return output


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, without the host waiting for what runs there."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched on the device; nothing on a CPU, which has done it by then."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
