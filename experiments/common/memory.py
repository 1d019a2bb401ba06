"""Peak memory of a piece of work in this process: of the device where there is one, else resident memory."""

from __future__ import annotations

from pathlib import Path

import torch


def reset_peak(device: torch.device) -> int:
    """Set the peak back to what is held now; that many bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    # Sets the peak back to what is held now (man 5 proc).
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_bytes("VmRSS")


def peak_over(device: torch.device, before: int) -> int:
    """Bytes that were held at most since `reset_peak`, over what it returned."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - before
    return _resident_bytes("VmHWM") - before


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
