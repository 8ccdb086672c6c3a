"""One worker of bench/python_bench.py: python_worker.py JOB.json. Rank 0 prints a line `REPORT {...}` for each run of each system."""

import gc
import json
import os
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import families.timm_models  # noqa: F401, which lets timm be imported without torchvision
import measured_ddp
import motley
import timm
import transformers

ONE = "name: one\nlink: {bandwidth: 1 Gbps, latency: 1 us}\ndevices: [{type: cpu-core}]\n"
WARM = 2  # steps of a run that do not count


def gpt2(rows, length):
    """(model, its blocks, loss_fn, one global batch)"""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    ids = torch.randint(50257, (rows, length))
    return model, list(model.transformer.h), None, ({"input_ids": ids, "labels": ids},)


def resnet50(rows, pixels):
    model = timm.create_model("resnet50")
    blocks = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    return model, blocks, F.cross_entropy, (torch.randn(rows, 3, pixels, pixels), torch.randint(1000, (rows,)))


def loss_of(model, loss_fn, batch):
    return model(**batch[0]).loss if loss_fn is None else loss_fn(model(batch[0]), batch[1])


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def overhead(job, build):
    """The bare loop and motley, a step of each in turn."""
    bare, _, loss_fn, batch = build()
    optimizer = adam(bare)

    def plain():
        optimizer.zero_grad()
        loss_of(bare, loss_fn, batch).backward()
        optimizer.step()

    torch.manual_seed(0)
    model = build()[0]
    dist = motley.distribute(model, batch, loss_fn, ONE, adam(model))
    systems, seconds = {"motley": lambda: dist.train_step(*batch), "bare loop": plain}, {}
    for step in range(WARM + job["runs"] * job["steps"]):
        for name in sorted(systems, reverse=step % 2 == 1):
            start = time.monotonic()
            systems[name]()
            if step >= WARM:
                seconds.setdefault(name, []).append(time.monotonic() - start)
    for name, all_steps in seconds.items():
        print("REPORT" + json.dumps({"system": name, "run": 0, "seconds": all_steps}), flush=True)


def by_motley(job, build, run):
    """One step, as a function."""
    model, _, loss_fn, batch = build()
    dist = motley.distribute(model, batch, loss_fn, motley.cluster(job["cluster"], job["profile"]), adam(model), emulate=True, time_limit=20)
    if run == 0 and dist.rank == 0:
        print("REPORT" + json.dumps({"plan": f"{dist.plan}links: {dist.pacing}"}), flush=True)
    return lambda: dist.train_step(*batch)


def by_torch(shard, shares, build, speeds):
    """The same of DistributedDataParallel, or with `shard` of FSDP2: with as many rows on each worker, or rows by speed."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, blocks, loss_fn, batch = build()
    rows = len(next(iter(batch[0].values())) if loss_fn is None else batch[0])
    sizes = measured_ddp.pieces(rows, speeds, shares)
    begin, weight = sum(sizes[:rank]), sizes[rank] * world / rows  # gradients are averaged over the workers
    cut = slice(begin, begin + sizes[rank])
    mine = ({key: value[cut] for key, value in batch[0].items()},) if loss_fn is None else tuple(tensor[cut] for tensor in batch)
    padding = measured_ddp.Padding(speeds[rank])

    def pad(module, _, output):
        padding.work_done(("forward", module))
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(padding.after("backward", module))  # what comes behind the module is done

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(pad)
    if shard:
        mesh = torch.distributed.init_device_mesh("cpu", (world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adam(wrapped)

    def step():
        padding.mark()
        optimizer.zero_grad()
        (loss_of(wrapped, loss_fn, mine) * weight).backward()
        padding.settle("backward", model)
        optimizer.step()
        padding.settle("step", model)

    return step


def together(job, build):
    """All systems in turn, each made anew for every run."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    speeds = [float(speed) for speed in os.environ["MOTLEY_SPEEDS"].split(",")]
    shares = {"equal rows": "even", "rows by speed": "proportional"} if len(set(speeds)) > 1 else {"": "even"}
    systems = {"motley": lambda run: by_motley(job, build, run)}
    for name, shard in (("DDP", False), ("FSDP2", True)):
        for rows, share in shares.items():
            systems[f"{name}, {rows}" if rows else name] = lambda run, shard=shard, share=share: by_torch(shard, share, build, speeds)
    for run in range(job["runs"]):
        for name in systems:
            torch.manual_seed(0)
            step, seconds = systems[name](run), []
            for _ in range(WARM + job["steps"]):
                torch.distributed.barrier()
                start = time.monotonic()
                step()
                took = torch.tensor([time.monotonic() - start])
                torch.distributed.all_reduce(took, op=torch.distributed.ReduceOp.MAX)
                seconds.append(took.item())
            if torch.distributed.get_rank() == 0:
                print("REPORT" + json.dumps({"system": name, "run": run, "seconds": seconds[WARM:]}), flush=True)
            del step
            gc.collect()
    torch.distributed.barrier()


def main():
    warnings.simplefilter("ignore")
    with open(sys.argv[1]) as file:
        job = json.load(file)
    torch.manual_seed(0)

    def build():
        return {"gpt2": gpt2, "resnet50": resnet50}[job["model"]](job["rows"], job["size"])

    (overhead if job["part"] == "overhead" else together)(job, build)


if __name__ == "__main__":
    main()
