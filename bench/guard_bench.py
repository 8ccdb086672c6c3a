#!/usr/bin/env python3
"""What the guard of motley.distribute costs, on one worker. At most two eager steps at the start, and 1% of a step after, are wanted.

    ./dev bench guard [steps of each, default 6]

For GPT-2 (124M parameters, sequence 256, batch 1) and ResNet-50 (batch 8 of 3x128x128): the time of what is looked at before each
step as a share of the step, and what the first two steps take more than without the guard, in eager steps. The table is written to
bench/results/.
"""

import copy
import datetime
import os
import pathlib
import statistics
import sys
import time
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("MOTLEY_BUILD", ROOT / "build"))
sys.path.insert(0, str(BUILD / "python"))

import motley  # noqa: E402
import networks  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

ONE = "name: one\nlink: {bandwidth: 1 Gbps, latency: 1 us}\ndevices: [{type: cpu}]\ndevice_types:\n" \
      "  - {name: cpu, flops: 50 GFLOPS, memory: 64 GiB, memory_bandwidth: 10 GB/s}\n"  # fmt: skip


MODELS = {
    "gpt2-124m": (lambda: networks.GPT(12, 768, 12, 50257, 256), lambda: (torch.randint(50257, (1, 256)), torch.randint(50257, (1, 256)))),
    "resnet-50": (networks.resnet, lambda: (torch.randn(8, 3, 128, 128), torch.randint(1000, (8,)))),
}


def distributed(model, batch, verify):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return motley.distribute(model, batch, F.cross_entropy, ONE_FILE, optimizer, verify=verify)


def timed_steps(dist, batch, count):
    took = []
    for _ in range(count):
        start = time.perf_counter()
        dist.train_step(*batch)
        took.append(time.perf_counter() - start)
    return took


def measured(build, draw, steps):
    """(parameters, seconds of an eager step, what the first two guarded steps take more, of a later one, before each of these)"""
    torch.manual_seed(0)
    model, batch = build(), draw()
    eager = []
    for _ in range(3):
        start = time.perf_counter()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        eager.append(time.perf_counter() - start)
        model.zero_grad()
    unguarded = distributed(copy.deepcopy(model), batch, False)
    without = timed_steps(unguarded, batch, 2)
    del unguarded
    dist = distributed(model, batch, True)
    inside, ready = [], type(dist)._ready

    def timed(*arguments):
        start = time.perf_counter()
        result = ready(*arguments)
        inside.append(time.perf_counter() - start)
        return result

    type(dist)._ready = timed
    took = timed_steps(dist, batch, 2 + steps)
    type(dist)._ready = ready
    count = sum(1 for _ in model.parameters())
    return count, min(eager), sum(took[:2]) - sum(without), statistics.median(took[2:]), statistics.median(inside[2:])


folder = ROOT / "bench" / "results" / datetime.date.today().isoformat()
folder.mkdir(parents=True, exist_ok=True)
ONE_FILE = str(BUILD / "one.yaml")
pathlib.Path(ONE_FILE).write_text(ONE)
warnings.simplefilter("ignore")
torch.set_num_threads(1)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 6
lines = ["model      parameters  eager step  step by plan  looked at before it  first two steps take more"]
for name, (build, draw) in MODELS.items():
    count, eager, more, later, looked = measured(build, draw, steps)
    lines.append(
        f"{name:10} {count:10}  {eager:8.3f} s  {later:10.3f} s  {1e6 * looked:6.0f} us = {looked / later:.3%}  "
        f"{more:.3f} s = {more / eager:.2f} eager steps"
    )
print("\n".join(lines))
(folder / "guard.txt").write_text("\n".join(lines) + "\n")
