"""What codecs do to real edges: bytes, error and speed, on activations and gradients of models in training.

    python -m benchmarks.codecs --json

The demo's GPT and ResNet are trained for a while; then every tensor between two blocks, and its gradient, goes through
every codec. Ratios are raw float32 bytes over bytes of frames. Errors are |sent - arrived| / |sent| over all edges of a
direction. Speeds are MB/s of float32 per second of one thread's own time, the median over rounds in which the codecs
take turns. "+zstd" forces what "auto" does on slow links.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.cli.models import GPT, ResNet, digit_images, standard_library_text
from fusion.compress.catalog import TensorRole, parse_pair
from fusion.compress.codec import Codec
from fusion.compress.noise import Turn
from fusion.compress.state import EdgeState
from fusion.graph.dag import TensorSpec

LADDER = ("none", "bf16", "int8", "int4")
CODECS = (
    *LADDER,
    "fp16",
    "fp8",
    "int6",
    "int5",
    "int3",
    "int2",
    "hadamard4",
    "int4+dither",
    "int3+dither",
    "int2+dither",
    "int8/int4",
    "int6/int3+dither",
    "int5/int2+dither",
    "int8+zstd",
    "int4+zstd",
    "hadamard4+zstd",
    "mask:3/8",
    "mask:1/4",
    "mask:1/8",
    "mask:1/8+exact",
    "topk:20",
    "topk:20+int4",
    "topk:100",
    "topk:100+int4",
    "topk:100+exact",
    "adatopk:33",
    "adatopk:100",
    "lowrank:20",
)
MASK = "mask:1/8"
WARM_UP = 2


@dataclass(frozen=True)
class CapturedEdge:
    """A value between two blocks, and its gradient."""

    activation: Tensor
    gradient: Tensor


@dataclass
class Way:
    """What a codec did with one direction of all edges of a model."""

    raw_bytes: int = 0
    wire_bytes: int = 0
    square_error: float = 0.0
    square_norm: float = 0.0
    encode_s: list[float] = field(default_factory=list)  #: per round
    decode_s: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return ratio, error and speeds."""
        return {
            "ratio": self.raw_bytes / self.wire_bytes,
            "error": (self.square_error / self.square_norm) ** 0.5,
            "encode_mb_s": self.raw_bytes / statistics.median(self.encode_s) / 1e6,
            "decode_mb_s": self.raw_bytes / statistics.median(self.decode_s) / 1e6,
        }


def gpt_edges(steps: int, batch: int = 32) -> list[CapturedEdge]:
    """Train the demo's GPT on text and return what passes between its blocks, (batch, 64, 256) each."""
    torch.manual_seed(1)
    model, time_steps = GPT(), 64
    text = np.frombuffer(b"".join(path.read_bytes() for path in standard_library_text()), dtype=np.uint8)
    draw = np.random.default_rng(1)

    def loss(size: int) -> Tensor:
        starts = draw.integers(0, len(text) - time_steps - 1, size)
        rows = torch.from_numpy(np.stack([text[start : start + time_steps + 1] for start in starts])).long()
        result: Tensor = model(rows[:, :-1], rows[:, 1:])
        return result

    _train(model, lambda: loss(16), steps, 1e-3)
    return _capture(list(model.blocks)[:-1], lambda: loss(batch))


def resnet_edges(steps: int, batch: int = 512) -> list[CapturedEdge]:
    """Train the demo's ResNet on images and return what passes between its blocks."""
    torch.manual_seed(1)
    model = ResNet()
    images, classes = (torch.from_numpy(array) for array in digit_images())
    generator = torch.Generator().manual_seed(1)

    def loss(size: int) -> Tensor:
        rows = torch.randint(0, len(images), (size,), generator=generator)
        return F.cross_entropy(model(images[rows]), classes[rows])

    _train(model, lambda: loss(128), steps, 3e-3)
    return _capture([model.stem, *list(model.blocks)[:-1]], lambda: loss(batch))


def _train(model: nn.Module, loss: Callable[[], Tensor], steps: int, learning_rate: float) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss())
        optimizer.step()


def _capture(blocks: Sequence[nn.Module], loss: Callable[[], Tensor]) -> list[CapturedEdge]:
    """Return the outputs of `blocks` and their gradients in one pass."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    hooks = [block.register_forward_hook(keep) for block in blocks]
    torch.autograd.backward(loss())
    for hook in hooks:
        hook.remove()
    edges = []
    for output in outputs:
        assert output.grad is not None
        edges.append(CapturedEdge(output.detach().clone(), output.grad.clone()))
    return edges


class Trial:
    """One codec on all edges of one model."""

    def __init__(self, name: str, edges: Sequence[CapturedEdge]) -> None:
        pair = parse_pair(name)
        self._edges = edges
        self._codecs = (Codec(pair.forward, TensorRole.ACTIVATION), Codec(pair.backward, TensorRole.GRADIENT))
        self._ends = [(EdgeState(), EdgeState()) for _ in edges]
        self.ways = (Way(), Way())

    def round(self, number: int) -> None:
        """Send every activation ahead and every gradient back; only rounds after the warm-up count."""
        spent = [[0.0, 0.0], [0.0, 0.0]]
        for index, edge in enumerate(self._edges):
            turn = Turn(1, number, 0, index)
            producer, consumer = self._ends[index]
            for direction, tensor, source, target in self._messages(edge, producer, consumer):
                codec, way = self._codecs[direction], self.ways[direction]
                spec = TensorSpec("float32", tuple(tensor.shape))
                begin = time.thread_time()
                frame = codec.encode(tensor, source, turn)
                middle = time.thread_time()
                arrived = codec.decode(frame, spec, target, turn)
                end = time.thread_time()
                spent[direction][0] += middle - begin
                spent[direction][1] += end - middle
                if number == WARM_UP:
                    way.raw_bytes += spec.bytes
                    way.wire_bytes += len(frame.payload)
                    way.square_error += float((tensor.double() - arrived.double()).square().sum())
                    way.square_norm += float(tensor.double().square().sum())
        if number >= WARM_UP:
            for way, (encode_s, decode_s) in zip(self.ways, spent, strict=True):
                way.encode_s.append(encode_s)
                way.decode_s.append(decode_s)

    @staticmethod
    def _messages(
        edge: CapturedEdge, producer: EdgeState, consumer: EdgeState
    ) -> Iterator[tuple[int, Tensor, EdgeState, EdgeState]]:
        yield 0, edge.activation, producer, consumer
        yield 1, edge.gradient, consumer, producer


def measure(models: dict[str, list[CapturedEdge]], codecs: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return for every codec and model the figures of both directions, and the ratio of both together."""
    trials = {(name, model): Trial(name, edges) for model, edges in models.items() for name in codecs}
    for number in range(WARM_UP + rounds):
        order = list(trials.values())
        for index in range(len(order)):  # a different one goes first in every round
            order[(index + 7 * number) % len(order)].round(number)
    result: dict[str, Any] = {}
    for (name, model), trial in trials.items():
        ahead, back = trial.ways
        result.setdefault(name, {})[model] = {
            "ratio": (ahead.raw_bytes + back.raw_bytes) / (ahead.wire_bytes + back.wire_bytes),
            "forward": ahead.figures(),
            "backward": back.figures(),
        }
    return result


def slowest(result: dict[str, Any], codecs: Sequence[str], speed: str, ways: Sequence[str]) -> float:
    """Return the least MB/s of these codecs over models and directions."""
    return min(float(figures[way][speed]) for name in codecs for figures in result[name].values() for way in ways)


def print_table(result: dict[str, Any]) -> None:
    """Print one line per codec and model."""
    print(f"{'codec':18} {'model':7} {'ratio':>7}   {'error':>13}   {'encode MB/s':>13} {'decode MB/s':>13}")
    for name, models in result.items():
        for model, figures in models.items():
            ahead, back = figures["forward"], figures["backward"]
            print(
                f"{name:18} {model:7} {figures['ratio']:7.1f}   {ahead['error']:6.4f} {back['error']:6.4f}   "
                f"{ahead['encode_mb_s']:6.0f} {back['encode_mb_s']:6.0f} "
                f"{ahead['decode_mb_s']:6.0f} {back['decode_mb_s']:6.0f}"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps before the edges are taken")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--codec", action="append", default=[], help="beside the built-in list; may be repeated")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {"gpt": gpt_edges(options.steps), "resnet": resnet_edges(options.steps)}
    result = measure(models, [*CODECS, *options.codec], options.rounds)
    both = ("forward", "backward")
    summary = {
        "ladder_encode_mb_s": slowest(result, LADDER, "encode_mb_s", both),
        "ladder_decode_mb_s": slowest(result, LADDER, "decode_mb_s", both),
        "mask_encode_mb_s": slowest(result, (MASK,), "encode_mb_s", both),
        "mask_decode_mb_s": slowest(result, (MASK,), "decode_mb_s", both),
    }
    if options.json:
        print(json.dumps(summary | {"codecs": result}))
    else:
        print_table(result)
        for name, value in summary.items():
            print(f"{name:18} {value:.0f}")


if __name__ == "__main__":
    main()
