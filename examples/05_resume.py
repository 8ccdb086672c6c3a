"""A checkpoint does not depend on the cluster: train on three workers, go on with two.

    torchrun --nproc_per_node=3 examples/05_resume.py examples/three.yaml checkpoint.pt
    torchrun --nproc_per_node=2 examples/05_resume.py examples/two.yaml checkpoint.pt

The file holds the state_dicts of the plain model and optimizer: torch.load(path)["model"].
"""

import os
import sys

import torch

import motley
from digits import Digits, make_model

cluster, path = sys.argv[1:3]
data = Digits()
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
example = (data.pictures[:48], data.labels[:48])
dist = motley.distribute(model, example, torch.nn.CrossEntropyLoss(), cluster, optimizer)
if os.path.exists(path):
    dist.load(path)

first = dist.steps
for step in range(first, first + 5):
    rows = torch.arange(48 * step, 48 * (step + 1)) % len(data)
    loss = dist.train_step(data.pictures[rows], data.labels[rows])
    if dist.rank == 0:
        print(f"step {step} on {dist.world_size} workers: loss {loss:.4f}")
dist.save(path)
