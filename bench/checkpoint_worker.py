"""A worker of checkpoint_bench.py: FOLDER STEPS EVERY. Says "step N" behind every step, on rank 0."""
import sys

import torch
import torch.nn.functional as F
from torch import nn

import motley

CLUSTER = """name: two
link: {bandwidth: 2 Gbps, latency: 20 us}
devices: [{type: cpu-core, count: 2}]
"""

folder, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 768), *(layer for _ in range(5) for layer in (nn.Linear(768, 768), nn.GELU())), nn.Linear(768, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch = torch.randint(256, (1024,)), torch.randint(256, (1024,))
dist = motley.distribute(model, batch, F.cross_entropy, CLUSTER, optimizer, elastic=motley.Elastic(folder, every=every), all_devices=True, strategy="dp-ev", engine="spmd")
while dist.steps < steps:
    dist.train_step(*batch)
    if dist.rank == 0:
        print(f"step {dist.steps}", file=sys.stderr, flush=True)
