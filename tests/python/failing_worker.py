"""One of three workers, of which one fails in the way and at the rank that the arguments name."""

import os
import signal
import sys
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support

torch.set_num_threads(1)
WAY, BAD = sys.argv[1], int(sys.argv[2])
RANK = int(os.environ["RANK"])
FAILS = RANK == BAD


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.inside = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())])
        self.out = nn.Linear(32, 50)

    def forward(self, x):
        if WAY == "capture" and FAILS:
            failing()
            raise KeyError("planted in the forward pass")
        return self.out(self.inside(self.embed(x)))


def batch():
    return torch.randint(50, (12,)), torch.randint(50, (12,))


def failing():
    """Tells the test when."""
    if RANK == 0 or FAILS:
        print("failing", time.time(), flush=True)


def planted(*_, **__):
    failing()
    raise RuntimeError("planted in the construction")


if WAY == "construction" and FAILS:
    motley._distribute.Held = planted
if WAY == "joining" and FAILS:
    failing()
    raise RuntimeError("planted before distribute()")

options = {"all_devices": True, "engine": "pipeline"} if WAY.startswith("pipeline") else {"all_devices": True}
cluster = support.CLUSTER
if WAY == "planning":
    with open(cluster) as file:
        cluster = file.read().replace("1 GiB", "1 KiB")
    failing()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
if WAY == "optimizer" and FAILS:
    optimizer = torch.optim.AdamW(nn.Linear(3, 3).parameters(), 1e-2)
    failing()
dist = motley.distribute(model, batch(), F.cross_entropy, cluster, optimizer, **options)


def train():
    for number in range(8):
        x, y = batch()
        now = number == 3 and FAILS
        if number == 3 and (FAILS or "operator" in WAY):
            failing()
        if now:
            early()
        if now and WAY == "shape":
            x = x[:5]
        if number == 3 and "operator" in WAY:
            x = x.clone()
            x[{0: 0, 2: -1}[BAD]] = 1000  # a row that one worker has
        loss = dist(x, y)
        if now and WAY == "after forward":
            raise ValueError("planted after the forward pass")
        if now and WAY == "state":
            dist.load_state_dict({})
        dist.backward()
        dist.step()
        if now and WAY == "evaluation":
            dist.eval()
            dist(torch.tensor([5000]))


def early():
    """What goes wrong before a step."""
    if WAY in ("exception", "pipeline exception", "thread"):
        raise ValueError("planted in the loop")
    if WAY == "exit":
        sys.exit(5)
    if WAY == "quiet exit":
        sys.exit(0)
    if WAY == "hard exit":
        os._exit(7)
    if WAY == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if WAY == "caught":
        try:
            raise ValueError("planted in the loop")
        except ValueError as error:
            print(error, file=sys.stderr)
            sys.exit(1)
    if WAY == "waiting thread":  # not a daemon: Python waits for it at the end
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("planted in the loop")


if WAY == "thread":
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
else:
    train()
