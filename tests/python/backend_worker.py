"""One of three or four workers that train over a backend of torch.distributed: losses and parameters as of plain PyTorch."""

import copy
import sys

import torch
import torch.nn.functional as F

import motley
import support

torch.set_num_threads(1)
TYPES = """device_types:
  - {name: fast, flops: 60 MFLOPS, memory: 1 GiB, memory_bandwidth: 100 MB/s, overhead: 2 us}
  - {name: slow, flops: 25 MFLOPS, memory: 1 GiB, memory_bandwidth: 40 MB/s, overhead: 4 us}
"""
PARTS = """name: parts
link: {bandwidth: 1 Gbps, latency: 20 us}
groups:
  - {name: near, backend: other, link: {bandwidth: 4 Gbps, latency: 5 us}, devices: [{type: fast}, {type: slow}]}
  - {name: far, link: {bandwidth: 4 Gbps, latency: 5 us}, devices: [{type: slow}]}
""" + TYPES
# Two fabrics, and a third between them: reductions of gradients go over all of them.
FABRICS = """name: fabrics
backend: gloo
link: {bandwidth: 20 Mbps, latency: 100 us}
groups:
  - {name: near, backend: other, link: {bandwidth: 40 Gbps, latency: 5 us}, devices: [{type: even, count: 2}]}
  - {name: far, backend: second, link: {bandwidth: 40 Gbps, latency: 5 us}, devices: [{type: even, count: 2}]}
device_types: [{name: even, flops: 1 GFLOPS, memory: 1 GiB, memory_bandwidth: 1 GB/s, overhead: 2 us}]
"""
made = {"other": [], "second": []}  # sizes of groups of a case


def other(store, rank, size, timeout):
    """gloo under a name of which motley knows nothing: it has no tags, for all it knows."""
    made["other"].append(size)
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


def second(store, rank, size, timeout):
    """The same, configured otherwise."""
    made["second"].append(size)
    options = torch.distributed.ProcessGroupGloo._Options()
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout, options._threads = timeout, 3
    return torch.distributed.ProcessGroupGloo(store, rank, size, options)


for name, create in (("other", other), ("second", second)):
    torch.distributed.Backend.register_backend(name, create, devices=["cpu"])
CASES = {"gloo": ("gloo", support.CLUSTER), "bound": ("gloo", support.CLUSTER), "other": ("other", support.CLUSTER), "parts": (None, PARTS),
         "fabrics": (None, FABRICS)}  # fmt: skip


def check(name, engine):
    backend, cluster = CASES[name]
    if name == "bound":  # as by init_process_group(device_id=...); there is no such device, and no group may ask for it
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        torch.distributed.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
    torch.manual_seed(0)
    width, batch = (256, 512) if name == "fabrics" else (24, 12)
    model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]).double()
    plain = copy.deepcopy(model)
    batches = [(torch.randn(batch, width).double(), torch.randn(batch, width).double()) for _ in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    dist = motley.distribute(
        model, batches[0], F.mse_loss, cluster, optimizer, backend=backend, engine=engine, all_devices=True, verify=False
    )
    losses = [dist.train_step(*batch) for batch in batches]
    theirs = torch.optim.AdamW(plain.parameters(), 1e-2)
    for (x, y), loss in zip(batches, losses):
        theirs.zero_grad()
        expected = F.mse_loss(plain(x), y)
        expected.backward()
        theirs.step()
        assert abs(loss - expected.item()) < 1e-9, (name, engine, loss, expected.item())
    state = dist.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.allclose(state[key], value, rtol=0, atol=1e-9), (name, engine, key)
    rank = dist._group.rank
    if name == "parts":  # of the part alone, by those who are in it
        assert set(made["other"]) == ({2} if rank < 2 else set()), made
    if name == "fabrics":
        assert set(made["other"]) == ({2} if rank < 2 else set()) and set(made["second"]) == (set() if rank < 2 else {2}), made
        if engine == "spmd":
            assert "reduce_scatter" in str(dist.plan), dist.plan  # planned, in steps over both
    if rank == 0:
        print("done", name, engine, flush=True)


before = None
for case, kind in (argument.split(":") for argument in sys.argv[1:]):
    if case != before:
        made["other"].clear(), made["second"].clear()
    before = case
    check(case, kind)
