"""The same script with motley: the cluster is described, and every worker gets the share that suits it.

    torchrun --nproc_per_node=3 examples/02_after.py
"""

import os
import sys

import torch
from torch.utils.data import DataLoader

import motley
from digits import Digits, make_model

BATCH = 48
HERE = os.path.dirname(os.path.abspath(__file__))
OUT = sys.argv[1] if len(sys.argv) > 1 else "digits.pt"

data = Digits()
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_fn = torch.nn.CrossEntropyLoss()

example = next(iter(DataLoader(data, batch_size=BATCH)))  # a global batch: only its shapes matter
dist = motley.distribute(model, example, loss_fn, cluster=f"{HERE}/three.yaml", optimizer=optimizer)
loader = DataLoader(data, batch_sampler=motley.DataSplitter(data, dist))

if dist.rank == 0:
    print(dist)
for epoch in range(2):
    loader.batch_sampler.set_epoch(epoch)
    for pictures, labels in loader:
        loss = dist(pictures, labels)
        loss.backward()
        dist.step()
    if dist.rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")

if dist.rank == 0:
    torch.save(dist.state_dict(), OUT)  # whole tensors under the model's own names
    dist.eval()
    right = (dist(data.pictures).argmax(1) == data.labels).float().mean()
    print(f"right: {100 * right:.0f}%")
