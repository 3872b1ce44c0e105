"""The two models of `fusion demo`, with their data: a GPT on Python's own source, and a ResNet on real images."""

from __future__ import annotations

import importlib
import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.base.errors import ConfigError
from fusion.job.job import Job
from fusion.job.settings import AdamW, Cosine
from fusion.job.tensordata import TensorData
from fusion.job.tokendata import TextData

# B batch, T time, C channels, H heads, D channels of a head, V vocabulary


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, channels = x.shape
        heads = (batch, time, self.heads, channels // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(channels, dim=2))  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        mixed: Tensor = self.dropout(self.out(y.transpose(1, 2).reshape(batch, time, channels)))
        return mixed


class Block(nn.Module):
    """One transformer block, norms first."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention = Attention(channels, heads, dropout)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        grown: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))
        return grown


class GPT(nn.Module):
    """A GPT whose token embedding is also its output layer. Returns the mean cross entropy of the next tokens."""

    def __init__(
        self, vocabulary: int = 256, block_size: int = 64, layers: int = 4, heads: int = 4, channels: int = 256
    ) -> None:
        super().__init__()
        dropout = 0.1
        self.tokens, self.places = nn.Embedding(vocabulary, channels), nn.Embedding(block_size, channels)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(channels, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of next-token ids `labels` (B, T) after `input_ids` (B, T)."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.places(places))  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Residual(nn.Module):
    """Two convolutions around a shortcut, each with batch norm."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            convolution = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A small ResNet for grey images. Returns the class scores (B, classes)."""

    def __init__(self, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1), (2 * width, 4 * width, 2)]
        self.blocks = nn.Sequential(*(Residual(*size) for size in sizes))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(self.stem(image))
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


def standard_library_text(limit_bytes: int = 4_000_000) -> list[Path]:
    """Return the .py files of the standard library, in a fixed order, up to about `limit_bytes`."""
    found, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        size = path.stat().st_size
        if not 0 < size <= limit_bytes - total:
            continue
        found.append(path)
        total += size
    if not found:
        raise ConfigError(
            f"the demo's text is Python's own library, and {sysconfig.get_path('stdlib')} has no .py files"
        )
    return found


def digit_images() -> tuple[np.ndarray, np.ndarray]:
    """Return grey images of handwritten digits, float32 (N, 1, height, width) in 0..1, and their classes (N)."""
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(
            "the images come with scikit-learn, which is not installed; run: pip install 'fusionllm[demo]'"
        )
    digits = importlib.import_module("sklearn.datasets").load_digits()
    # The set is in the order of its writers; both parts of a split shall hold all of them.
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order].astype(np.float32)[:, None] / np.float32(16)
    return images, digits.target[order].astype(np.int64)


def gpt_job(steps: int, seed: int = 1, *, layers: int = 4, channels: int = 256, **settings: Any) -> Job:
    """Return the demo's GPT job: about 3 million parameters unless told otherwise, 8 micro-batches, text as bytes.

    Without codecs unless told otherwise: its losses are compared with those of one process.
    """
    torch.manual_seed(seed)
    block_size = 64
    settings = {"name": "demo-gpt", "compression": "none"} | settings
    return Job(
        model=GPT(block_size=block_size, layers=layers, channels=channels),
        data=TextData(standard_library_text(), block_size),
        optimizer=AdamW(1e-3, weight_decay=0.1, no_decay=("*norm*", "*.bias")),
        lr_schedule=Cosine(warmup=min(10, steps // 4), final=0.1),
        steps=steps,
        batch_size=16,
        micro_batches=8,
        grad_clip=1.0,
        seed=seed,
        **settings,
    )


def mini_gpt_job(steps: int, seed: int = 1, **settings: Any) -> Job:
    """Return a GPT of 12 narrow blocks: many places to cut, and 4 billion operations a step, so that a laptop can
    stand for a dozen machines.
    """
    return gpt_job(steps, seed, layers=12, channels=64, name="demo-gpt-mini", **settings)


def resnet_job(steps: int, seed: int = 1, **settings: Any) -> Job:
    """Return the demo's ResNet job: batch norm, images of handwritten digits; codecs as in `gpt_job`."""
    torch.manual_seed(seed)
    settings = {"name": "demo-resnet", "compression": "none"} | settings
    images, classes = digit_images()
    return Job(
        model=ResNet(),
        data=TensorData({"image": images, "label": classes}),
        loss=lambda scores, batch: F.cross_entropy(scores, batch["label"]),
        optimizer=AdamW(3e-3),
        lr_schedule=Cosine(warmup=min(5, steps // 4), final=0.1),
        steps=steps,
        batch_size=128,
        micro_batches=8,
        seed=seed,
        **settings,
    )
