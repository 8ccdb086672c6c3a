"""What the tests of the Python package share."""

import gc
import glob
import importlib.util
import os
import random
import re
import socket
import subprocess
import sys
import unittest

import torch
import torch.nn.functional as F
from torch import nn

gc.freeze()  # what is imported stays: each of a thousand collections need not look at it

for stream in (sys.stdout, sys.stderr):  # torchrun's workers do not buffer: a line in one piece, whatever the others write
    stream.reconfigure(line_buffering=True, write_through=False)

HERE = os.path.dirname(os.path.abspath(__file__))
CLUSTER = os.path.join(HERE, "mixed-3.yaml")
ONE = "name: one\nlink: {bandwidth: 1 Gbps, latency: 1 us}\ndevices: [{type: P100-16GB}]\n"


class Net(nn.Module):
    """Tied weights, batch normalisation, a counter, a buffer that is not saved."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.inside, self.norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(8, 12)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x):
        return self.out(self.drop(F.relu(self.norm(self.inside(self.embed(x)) * self.scale))))


class InDoublePrecision(unittest.TestCase):
    """Tests whose tensors are of 64 bits, on one thread."""

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    @classmethod
    def tearDownClass(cls):
        torch.set_default_dtype(cls.before)


def far_off(which):
    """A cluster of three devices of which one, the 'first' or the 'last', is so far off that small models do without it."""
    near = "  - {name: near, link: {bandwidth: 10 Gbps, latency: 1 us}, devices: [{type: fast}, {type: slow}]}\n"
    far = "  - {name: far, link: {bandwidth: 10 Gbps, latency: 1 us}, devices: [{type: fast}]}\n"
    return (
        "name: far-off\nlink: {bandwidth: 1 Mbps, latency: 5 ms}\ngroups:\n"
        + (far + near if which == "first" else near + far)
        + """device_types:
  - {name: fast, flops: 60 MFLOPS, memory: 1 GiB, memory_bandwidth: 100 MB/s, overhead: 2 us}
  - {name: slow, flops: 25 MFLOPS, memory: 1 GiB, memory_bandwidth: 40 MB/s, overhead: 4 us}
"""
    )


def load_file(path):
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def architectures():
    """[(name, build)]; build() is (model, loss_fn, batch(generator))."""
    files = sorted(glob.glob(os.path.join(HERE, "models", "*.py")))
    return [(os.path.basename(file)[:-3], load_file(file).build) for file in files]


def free_port():
    """Below the ports that the system hands out by itself, so that nobody gets it before who asked listens on it."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("0.0.0.0", port))
                return port
            except OSError:
                continue


def environment():
    """Of workers; where one crashes, Python says what it was doing."""
    said = dict(os.environ, OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1")
    return {name: value for name, value in said.items() if name != "PYTHONUNBUFFERED"}


def launch(workers, script, *arguments, timeout=600):
    """Runs a script under torchrun; its standard output. AssertionError with all it said if it fails, why first: logs are cut."""
    command = [sys.executable, "-m", "motley.launch", "--nproc_per_node", str(workers), "--master_addr",
               "127.0.0.1", "--master_port", str(free_port()), script, *map(str, arguments)]  # fmt: skip
    done = subprocess.run(command, env=environment(), timeout=timeout, capture_output=True, text=True)
    why = [line for line in done.stderr.splitlines() if re.search(r"Error|terminate|Signal|exitcode|what\(\)|Fatal", line)]
    assert done.returncode == 0, "\n".join([" ".join(command), *why[:20], done.stdout, done.stderr])
    return done.stdout


def plain_loss(model, loss_fn, batch):
    """The loss of a batch as plain PyTorch computes it."""
    inputs = batch[0]
    if isinstance(inputs, dict):
        output = model(**inputs)
    elif isinstance(inputs, tuple):
        output = model(*inputs)
    else:
        output = model(inputs)
    if loss_fn is None:
        return output["loss"]
    return loss_fn(output, *batch[1:])


def plain_training(model, loss_fn, batches, optimizer):
    """Losses of plain single-process training."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = plain_loss(model, loss_fn, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches_of(batch, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [batch(generator) for _ in range(steps)]


def token_batches(n, size=12):
    """Batches of Net: tokens, and tokens to tell."""
    return batches_of(lambda g: (torch.randint(12, (size,), generator=g), torch.randint(12, (size,), generator=g)), n)


def same(state, wanted, limit=1e-9):
    """Whether two models' states agree, in dtype too."""
    assert list(state) == list(wanted), (list(state), list(wanted))
    for key, value in wanted.items():
        assert state[key].shape == value.shape and state[key].dtype == value.dtype, key
        assert (state[key] - value).abs().max() <= limit, (key, (state[key] - value).abs().max())


def same_optimizer(state, wanted):
    """Whether two optimizers' states agree."""
    assert state["state"].keys() == wanted["state"].keys()
    for index, values in wanted["state"].items():
        assert state["state"][index].keys() == values.keys()
        for key, value in values.items():
            assert torch.allclose(state["state"][index][key], value, rtol=0, atol=1e-9), (index, key)
