"""The smallest job. Here: python examples/minimal.py. On a cluster: fusion submit examples/minimal.py."""

import torch
from torch import nn

import fusion

x = torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
job = fusion.Job(
    model=model,
    data={"input": x, "target": x.sum(dim=1, keepdim=True)},
    loss=lambda output, batch: nn.functional.mse_loss(output, batch["target"]),
    optimizer=fusion.AdamW(1e-2),
    batch_size=64,
    micro_batches=4,
    steps=50,
)

if __name__ == "__main__":
    run = job.run_local(on_step=lambda step: print(f"step {step.step}  loss {step.loss:.4f}"))
    run.load_into(model)
