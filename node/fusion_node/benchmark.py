"""Measures how fast this machine runs real operators: `python -m fusion_node.benchmark`, a process of its own.

It runs the forward and backward of a transformer block (matrix products, attention, layer norm, GELU) over and over
and counts floating-point operations as the planner's cost rules do, so that their quotient predicts step times; then
each kind of operator by itself (`fusion_node.calibration`).
The last line of its stdout is one JSON object with the fields of Measurement.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusion_node.calibration import calibrate, rounds_s, wait_for

BLOCK_SHARE = 0.4  #: of the time to measure; the rest is for the kinds of operators


@dataclass(frozen=True, slots=True)
class Block:
    """The size of the transformer block that is run."""

    batch: int
    length: int  #: tokens in a sequence
    width: int
    heads: int

    @property
    def flops(self) -> float:
        """Operations of one forward and backward.

        Forward: 24 * width^2 per token in the four products (qkv 6, output 2, MLP 8 + 8) and 4 * length * width per
        token in attention (scores and weighted sum, 2 each); the backward of each takes twice that.
        """
        return 3.0 * self.batch * self.length * (24.0 * self.width**2 + 4.0 * self.length * self.width)


CPU_BLOCK = Block(batch=4, length=128, width=256, heads=8)
ACCELERATOR_BLOCK = Block(batch=8, length=512, width=1024, heads=16)  #: a smaller one would time its launches


def _parameters(width: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    made = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    return {name: value.to(device).requires_grad_() for name, value in made.items()}


def _forward(x: Tensor, p: dict[str, Tensor], heads: int) -> Tensor:  # x: (batch, length, width)
    batch, length, width = x.shape
    qkv = F.linear(F.layer_norm(x, (width,)), p["qkv"]).view(batch, length, 3, heads, width // heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
    x = x + F.linear(mixed, p["out"])
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), p["up"])), p["down"])


def measure_flops(device: torch.device, seconds: float, now_s: Callable[[], float] = time.perf_counter) -> float:
    """Return operations per second over about `seconds`; the fastest half of the runs counts, others disturb."""
    block = CPU_BLOCK if device.type == "cpu" else ACCELERATOR_BLOCK
    parameters = _parameters(block.width, device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((block.batch, block.length, block.width), generator=generator).to(device).requires_grad_()
    (run_s,) = rounds_s([lambda: _run(x, parameters, block.heads)], seconds, now_s)
    return block.flops / run_s


def _run(x: Tensor, parameters: dict[str, Tensor], heads: int) -> None:
    _forward(x, parameters, heads).sum().backward()  # type: ignore[no-untyped-call]
    for value in (x, *parameters.values()):
        value.grad = None
    wait_for(x.device)


def resolve_device(choice: str) -> torch.device:
    """Return the device that `choice` means here; "auto" prefers cuda, then mps. ValueError says why not."""
    if choice == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device("cuda:0" if choice == "cuda" else choice)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{choice}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"{choice}: torch {torch.__version__} cannot use MPS here")
    return device


def describe(device: torch.device) -> tuple[str, int]:
    """Return the device's name and its memory in bytes; 0 where the system's memory counts."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return str(properties.name), int(properties.total_memory)
    return platform.processor() or platform.machine(), 0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: torch's own choice")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long to measure; 0: only look at the device")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        device = resolve_device(arguments.device)
        name, memory_bytes = describe(device)
        figures = _measure(device, arguments.seconds) if arguments.seconds > 0 else {}
    except (ValueError, RuntimeError) as error:
        print(json.dumps({"error": " ".join(str(error).split())[:400]}))
        return
    print(json.dumps({"device": str(device), "device_name": name, "device_memory_bytes": memory_bytes} | figures))


def _measure(device: torch.device, seconds: float) -> dict[str, Any]:
    flops = measure_flops(device, BLOCK_SHARE * seconds)
    found = calibrate(device, flops, (1 - BLOCK_SHARE) * seconds)
    return {"flops": flops, "bytes_per_s": found.bytes_per_s, "efficiency": found.efficiency}


if __name__ == "__main__":
    main()
