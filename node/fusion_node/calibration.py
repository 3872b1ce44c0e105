"""What each kind of operator reaches on this machine: short runs of one operator each, counted as the planner counts.

A sample is the forward and backward of a few calls of one kind, at a size that trained models have. Kinds with
arithmetic are measured in floating-point operations per second, the others in bytes; see `fusion.plan.timing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fusion.plan.timing import BACKWARD_MOVES

LEAST_RUNS = 3
#: Kinds that are not measured themselves, and the one whose kernels they run in.
_SAME = {"addmm": "linear", "einsum": "matmul", "tensordot": "matmul", "bilinear": "matmul"}
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the samples are: an accelerator would otherwise spend its time on launches."""

    batch: int
    length: int
    width: int
    heads: int
    channels: int
    side: int  #: of an image

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return that of a transformer's activations."""
        return self.batch, self.length, self.width

    @property
    def image(self) -> tuple[int, int, int, int]:
        """Return that of a batch of images."""
        return self.batch, self.channels, self.side, self.side


CPU_SIZES = Sizes(batch=4, length=128, width=256, heads=8, channels=32, side=32)
ACCELERATOR_SIZES = Sizes(batch=8, length=512, width=1024, heads=16, channels=128, side=56)


@dataclass(frozen=True, slots=True)
class Sample:
    """Calls of one kind of operator."""

    kind: str  #: `OperatorInfo.cost`
    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]  #: that gradients are made for
    work: float  #: operations, or bytes, of the forward and backward together
    arithmetic: bool = True  #: False: the work is in bytes


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the kinds reach."""

    bytes_per_s: float  #: of plain operators that only move memory
    efficiency: dict[str, float]  #: share of the speed that was asked for, or of `bytes_per_s`


def calibrate(
    device: torch.device,
    flops: float,
    seconds: float,
    sizes: Sizes | None = None,
    now_s: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure every kind in about `seconds` together; `flops` is the speed that shares are taken of."""
    sizes = sizes or (CPU_SIZES if device.type == "cpu" else ACCELERATOR_SIZES)
    samples = [make(_Maker(device), sizes) for make in _SAMPLES]
    took_s = rounds_s([partial(_run, sample, device) for sample in samples], seconds, now_s)
    rates = {sample.kind: sample.work / run_s for sample, run_s in zip(samples, took_s, strict=True)}
    shares = {sample.kind: rates[sample.kind] / (flops if sample.arithmetic else rates["memory"]) for sample in samples}
    return Calibration(rates["memory"], shares | {kind: shares[like] for kind, like in _SAME.items()})


def rounds_s(
    runs: Sequence[Callable[[], None]], seconds: float, now_s: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Let `runs` take turns for about `seconds`; return the mean of each one's fastest half, others disturb.

    In turns, because then all see the machine alike, and none finds the caches as it left them itself.
    """
    for run in runs:
        run()  # the first time also loads kernels
    durations: list[list[float]] = [[] for _ in runs]
    end_s = now_s() + seconds
    while len(durations[0]) < LEAST_RUNS or now_s() < end_s:
        for run, found in zip(runs, durations, strict=True):
            begin_s = now_s()
            run()
            found.append(now_s() - begin_s)
    half = (len(durations[0]) + 1) // 2
    return [sum(sorted(found)[:half]) / half for found in durations]


def _run(sample: Sample, device: torch.device) -> None:
    out = sample.forward()
    torch.autograd.backward(out, torch.ones_like(out))
    for leaf in sample.leaves:
        leaf.grad = None
    wait_for(device)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class _Maker:
    """Makes the same numbers on every machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)

    def leaf(self, *shape: int) -> Tensor:
        """Return a tensor that requires its gradient."""
        return (torch.randn(shape, generator=self.generator) * 0.1).to(self.device).requires_grad_()

    def indices(self, below: int, *shape: int) -> Tensor:
        """Return random integers."""
        return torch.randint(below, shape, generator=self.generator).to(self.device)


def _product(kind: str, forward: Callable[[], Tensor], leaves: Sequence[Tensor], flops: float) -> Sample:
    """A forward of `flops` whose backward makes both gradients, each as expensive."""
    return Sample(kind, forward, leaves, 3.0 * flops)


def _moving(kind: str, forward: Callable[[], Tensor], leaves: Sequence[Tensor], elements: int) -> Sample:
    """A forward that reads and writes so many floats."""
    return Sample(kind, forward, leaves, _FLOAT_BYTES * elements * (1.0 + BACKWARD_MOVES), arithmetic=False)


def _linear(make: _Maker, sizes: Sizes) -> Sample:
    x, weight = make.leaf(*sizes.shape), make.leaf(2 * sizes.width, sizes.width)
    return _product("linear", lambda: F.linear(x, weight), (x, weight), 2.0 * x.numel() * 2 * sizes.width)


def _matmul(make: _Maker, sizes: Sizes) -> Sample:
    batch, inner = sizes.batch * sizes.heads, sizes.width // sizes.heads
    left, right = make.leaf(batch, sizes.length, inner), make.leaf(batch, inner, sizes.length)
    return _product("matmul", lambda: left @ right, (left, right), 2.0 * left.numel() * sizes.length)


def _attention(make: _Maker, sizes: Sizes) -> Sample:
    """Forward two products, backward five."""
    shape = (sizes.batch, sizes.heads, sizes.length, sizes.width // sizes.heads)
    query, key, value = (make.leaf(*shape) for _ in range(3))
    flops = 7 * 2.0 * query.numel() * sizes.length
    return Sample(
        "attention",
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        (query, key, value),
        flops,
    )


def _conv(make: _Maker, sizes: Sizes) -> Sample:
    x, weight = make.leaf(*sizes.image), make.leaf(sizes.channels, sizes.channels, 3, 3)
    return _product("conv", lambda: F.conv2d(x, weight, padding=1), (x, weight), 18.0 * x.numel() * sizes.channels)


def _conv_transpose(make: _Maker, sizes: Sizes) -> Sample:
    x, weight = make.leaf(*sizes.image), make.leaf(sizes.channels, sizes.channels, 2, 2)
    return _product(
        "conv_transpose",
        lambda: F.conv_transpose2d(x, weight, stride=2),
        (x, weight),
        8.0 * x.numel() * sizes.channels,
    )


def _recurrent(make: _Maker, sizes: Sizes) -> Sample:
    width, length = sizes.width // 2, sizes.length // 4
    x, start = make.leaf(length, sizes.batch, width), make.leaf(1, sizes.batch, width)
    weights = [make.leaf(4 * width, width), make.leaf(4 * width, width), make.leaf(4 * width), make.leaf(4 * width)]
    return _product(
        "recurrent",
        lambda: torch.lstm(x, [start, start], weights, True, 1, 0.0, True, False, False)[0],
        (x, start, *weights),
        2.0 * x.numel() * 8 * width,
    )


def _cell(make: _Maker, sizes: Sizes) -> Sample:
    width = sizes.width // 2
    x, start = make.leaf(sizes.length, width), make.leaf(sizes.length, width)
    by_input, by_state = make.leaf(4 * width, width), make.leaf(4 * width, width)
    return _product(
        "cell",
        lambda: torch.lstm_cell(x, [start, start], by_input, by_state)[0],
        (x, start, by_input, by_state),
        2.0 * x.numel() * 8 * width,
    )


def _memory(make: _Maker, sizes: Sizes) -> Sample:
    """x + y, times z, and a ReLU: 3 + 3 + 2 tensors read and written."""
    x, y, z = (make.leaf(*sizes.shape) for _ in range(3))
    return _moving("memory", lambda: F.relu((x + y) * z), (x, y, z), 8 * x.numel())


def _special(make: _Maker, sizes: Sizes) -> Sample:
    """A GELU and a softmax."""
    x = make.leaf(*sizes.shape)
    return _moving("special", lambda: F.softmax(F.gelu(x), -1), (x,), 4 * x.numel())


def _random(make: _Maker, sizes: Sizes) -> Sample:
    """A dropout."""
    x = make.leaf(*sizes.shape)
    return _moving("random", lambda: F.dropout(x, 0.1), (x,), 2 * x.numel())


def _norm(make: _Maker, sizes: Sizes) -> Sample:
    x, weight, bias = make.leaf(*sizes.shape), make.leaf(sizes.width), make.leaf(sizes.width)
    return _moving("norm", lambda: F.layer_norm(x, (sizes.width,), weight, bias), (x, weight, bias), 2 * x.numel())


def _batch_norm(make: _Maker, sizes: Sizes) -> Sample:
    x, weight, bias = make.leaf(*sizes.image), make.leaf(sizes.channels), make.leaf(sizes.channels)
    return _moving(
        "batch_norm", lambda: F.batch_norm(x, None, None, weight, bias, True), (x, weight, bias), 2 * x.numel()
    )


def _pool(make: _Maker, sizes: Sizes) -> Sample:
    x = make.leaf(*sizes.image)
    return _moving("pool", lambda: F.max_pool2d(x, 2), (x,), x.numel() + x.numel() // 4)


def _rows(make: _Maker, sizes: Sizes) -> Sample:
    weight, rows = make.leaf(8 * sizes.width, sizes.width), make.indices(8 * sizes.width, sizes.batch, sizes.length)
    moved = 2 * rows.numel() * sizes.width + 2 * rows.numel()  # an index is of eight bytes
    return _moving("rows", lambda: F.embedding(rows, weight), (weight,), moved)


_SAMPLES: tuple[Callable[[_Maker, Sizes], Sample], ...] = (
    _linear,
    _matmul,
    _attention,
    _conv,
    _conv_transpose,
    _recurrent,
    _cell,
    _memory,
    _special,
    _random,
    _norm,
    _batch_norm,
    _pool,
    _rows,
)
