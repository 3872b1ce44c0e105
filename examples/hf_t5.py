"""A Hugging Face T5 with random weights (extra: examples), learning to write its input backwards.

Targets have unlike lengths, so micro-batches count by their target tokens: `loss_weight=fusion.tokens("labels")`.
Here, in one process: python examples/hf_t5.py --local. On a cluster: fusion submit examples/hf_t5.py.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

import fusion

LENGTH, PAD, END, IGNORE = 16, 0, 1, -100


def reversals(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(2, 28, (samples, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH, (samples, 1), generator=generator)
    places = torch.arange(LENGTH)
    inputs = letters.masked_fill(places > lengths, PAD).masked_fill(places == lengths, END)
    back = letters.gather(1, (lengths - 1 - places).clamp(min=0))
    labels = back.masked_fill(places > lengths, IGNORE).masked_fill(places == lengths, END)
    return {"input_ids": inputs, "attention_mask": (inputs != PAD).long(), "labels": labels}


def make_job(steps: int = 50, batch_size: int = 32, micro_batches: int = 4) -> fusion.Job:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=28,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=PAD,
        use_cache=False,
    )
    return fusion.Job(
        model=T5ForConditionalGeneration(config),
        data=reversals(4096),
        loss_weight=fusion.tokens("labels", ignore=IGNORE),
        optimizer=fusion.AdamW(3e-3),
        batch_size=batch_size,
        micro_batches=micro_batches,
        steps=steps,
        grad_clip=1.0,
        name="hf-t5",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local", action="store_true", help="train in this process instead of on a cluster")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    job = make_job(arguments.steps)
    if arguments.local:
        job.run_local(on_step=print)
    else:
        for step in job.submit().metrics():
            print(step)
