"""A Hugging Face GPT-2 with random weights (extra: examples). Its forward returns an output with `.loss`.

Here, in one process: python examples/hf_gpt2.py --local. On a cluster: fusion submit examples/hf_gpt2.py.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fusion

BLOCK = 128


def make_job(steps: int = 50, batch_size: int = 8, micro_batches: int = 4) -> fusion.Job:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=BLOCK,
        n_embd=128,
        n_layer=4,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    text = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return fusion.Job(
        model=GPT2LMHeadModel(config),
        data=fusion.TextData(text, BLOCK, shift_labels=False),  # the model shifts the labels itself
        optimizer=fusion.AdamW(1e-3, no_decay=["*.bias", "*ln_*"]),
        batch_size=batch_size,
        micro_batches=micro_batches,
        steps=steps,
        grad_clip=1.0,
        name="hf-gpt2",
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
