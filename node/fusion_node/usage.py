"""What this process has used of its machine."""

from __future__ import annotations

import resource
import sys

import torch

from fusion.base.units import KIB


def peak_memory_bytes(device: str) -> int:
    """Return the most memory held so far: on the device, or for a CPU worker by the whole process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB
