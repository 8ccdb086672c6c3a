"""Training that goes on when workers or machines are lost, and when they come back.

    torchrun --nproc_per_node=3 --max_restarts=3 examples/08_elastic.py saved       # kill one of its workers meanwhile

On several machines, each with torchrun --nnodes=2:4 --rdzv_backend=c10d ...: see docs/elastic.md. What differs from 02_after.py: a folder for
checkpoints, and a loop that asks dist.steps where it is.
"""

import os
import sys

import torch

import motley
from digits import Digits, make_model

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 40
data = Digits()


def batch_of(step):
    """The same for a step, whoever takes it and however often."""
    rows = torch.randint(len(data.labels), (48,), generator=torch.Generator().manual_seed(step))
    return data.pictures[rows], data.labels[rows]


model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
elastic = motley.Elastic(sys.argv[1], every=10, beside=scheduler)
dist = motley.distribute(model, batch_of(0), torch.nn.CrossEntropyLoss(), f"{HERE}/three.yaml", optimizer, elastic=elastic)
while dist.steps < STEPS:
    step = dist.steps
    loss = dist.train_step(*batch_of(step))
    scheduler.step()
    if dist.rank == 0:
        print(f"step {step} on {dist.world_size} workers: loss {loss:.3f}", flush=True)
