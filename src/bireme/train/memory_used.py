"""How much memory a process has had in use, as the system or the device's allocator counts it."""

from pathlib import Path

import torch

__all__ = ["MemoryUsed"]

STATUS = Path("/proc/self/status")


class MemoryUsed:
    """Counts what is used beyond what was in use when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type != "cuda":
            _wake_up()
        self._before = 0 if device.type == "cuda" else _resident("VmRSS")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int | None:
        """The most there has been so far; None where nobody counts it."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        peak = _resident("VmHWM")
        return None if peak is None or self._before is None else max(0, peak - self._before)


def _wake_up() -> None:
    """Let torch load what it loads at its first backward, which is no part of what a model takes."""
    tokens = torch.randn(2, 8, 64, requires_grad=True)
    heads = (tokens @ torch.randn(64, 64)).view(2, 8, 4, 16).transpose(1, 2)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    torch.autograd.grad(torch.nn.functional.layer_norm(attended, (16,)).exp().sum(), tokens)


def _resident(what: str) -> int | None:
    """A line of the process's status, in bytes."""
    if not STATUS.exists():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    return None
