"""One of two workers: goes on from the checkpoint of three, as plain PyTorch does from its own training."""

import sys
from multiprocessing import util

import torch
import torch.nn.functional as F

import motley
import support

folder = sys.argv[1]

torch.set_default_dtype(torch.float64)
PAIR = """name: pair
link: {bandwidth: 1 Gbps, latency: 2 us}
devices: [{type: quick}, {type: slow}]
device_types:
  - {name: quick, flops: 60 MFLOPS, memory: 1 GiB, memory_bandwidth: 100 MB/s, overhead: 2 us}
  - {name: slow, flops: 25 MFLOPS, memory: 1 GiB, memory_bandwidth: 40 MB/s, overhead: 4 us}
"""
data = support.batches_of(
    lambda g: (torch.randint(12, (12,), generator=g), torch.randint(12, (12,), generator=g)), 6
)
torch.manual_seed(0)
plain = support.Net()
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
expected = support.plain_training(plain, F.cross_entropy, data, optimizer)
torch.manual_seed(8)
mine = support.Net()
optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
dist = motley.distribute(mine, data[0], F.cross_entropy, PAIR, optimizer, all_devices=True)
dist.load(f"{folder}/checkpoint.pt")
assert dist.steps == 3
for batch, loss in zip(data[3:], expected[3:]):
    got = dist.train_step(*batch)
    assert abs(got - loss) < 1e-9 * abs(loss), (got, loss)
state = dist.state_dict()
for key, value in plain.state_dict().items():
    assert (state[key] - value).abs().max() < 1e-9, key
if dist.rank == 0:
    print("resumed")


def parted():
    """Behind motley's end the connections are closed, so that their threads run no more when the libraries are taken down."""
    try:
        dist.train_step(*data[0])
    except motley.UserError as error:
        assert "after the workers have parted" in str(error), error
    else:
        raise AssertionError("a step behind the end")
    print("parted")


util.Finalize(None, parted, exitpriority=0)
