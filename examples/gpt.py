"""A GPT with tied embeddings, on the text of Python's own standard library, with evaluation on held-out text.

Here, in one process: python examples/gpt.py --local. On a cluster: fusion submit examples/gpt.py [--set steps=500].
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion

BLOCK = 128  # T: tokens of a sample


class Block(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        B, T, C = x.shape
        q, k, v = (
            self.qkv(self.norm_1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.dropout(self.out(y))
        grown: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return grown


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 256, channels: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, channels), nn.Embedding(BLOCK, channels)
        self.blocks = nn.Sequential(*(Block(channels, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied, also when they end up on different machines

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # both (B, T)
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        logits = self.head(self.norm(self.blocks(x)))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_job(steps: int = 200, batch_size: int = 16, micro_batches: int = 8, lr: float = 1e-3) -> fusion.Job:
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    train, held_out = fusion.TextData(files, BLOCK).split(0.05)
    return fusion.Job(
        model=GPT(),
        data=train,
        optimizer=fusion.AdamW(lr, weight_decay=0.1, no_decay=["*norm*", "*.bias"]),
        lr_schedule=fusion.Cosine(warmup=min(20, steps // 5), final=0.1),
        batch_size=batch_size,
        micro_batches=micro_batches,
        steps=steps,
        grad_clip=1.0,
        eval_data=held_out,
        eval_every=50,
        eval_batches=4,
        name="gpt",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local", action="store_true", help="train in this process instead of on a cluster")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    job = make_job(arguments.steps)
    if arguments.local:
        job.run_local(on_step=print)
    else:
        for step in job.submit().metrics():
            print(step)
