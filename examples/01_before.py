"""A script for DistributedDataParallel, as it is before motley. Every worker gets the same share of each batch.

    torchrun --nproc_per_node=3 examples/01_before.py
"""

import sys

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from digits import Digits, make_model

BATCH = 48

torch.distributed.init_process_group("gloo")
rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
data = Digits()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=BATCH // workers, sampler=sampler, drop_last=True)

model = DistributedDataParallel(make_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_fn = torch.nn.CrossEntropyLoss()

for epoch in range(2):
    sampler.set_epoch(epoch)
    for pictures, labels in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(pictures), labels)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")

if rank == 0:
    torch.save(model.module.state_dict(), sys.argv[1] if len(sys.argv) > 1 else "digits.pt")
