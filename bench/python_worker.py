"""One worker of bench/python_bench.py.

    step PLAN BATCH STEPS       trains mlp by a plan of the motley program
    ddp CLUSTER JOBS.json       the same models by motley and by DistributedDataParallel in turn, in an emulated cluster
"""

import json
import os
import statistics
import sys
import time

import torch

import motley
import python_model

torch.set_num_threads(1)


def step(plan, batch, steps):
    torch.manual_seed(0)
    model, draw = python_model.mlp(int(batch))
    dist = motley.distribute(model, draw(), python_model.labels_loss, plan=plan)
    times = []
    for _ in range(int(steps)):
        start = time.monotonic()
        dist.train_step(*draw())
        times.append(time.monotonic() - start)
        if dist.rank == 0:
            print(f"step {len(times) - 1}", file=sys.stderr, flush=True)
    if dist.rank == 0:
        print("REPORT" + json.dumps({"seconds": times}))


def ddp(cluster, jobs):
    import measured_ddp

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    speeds = [float(speed) for speed in os.environ["MOTLEY_SPEEDS"].split(",")]
    with open(jobs) as file:
        jobs = json.load(file)
    for job in jobs:
        model = measured_ddp.build(job["model"], job["args"])
        batch = model.batch(job["batch"])
        dist = motley.distribute(model, (batch,), None, cluster, "adamw", emulate=True)
        if rank == 0:
            print(f"{job['model']}: {dist.plan}links: {dist.pacing}", file=sys.stderr, flush=True)
        for number in range(job["runs"]):
            times = []
            for _ in range(job["steps"] + 1):
                torch.distributed.barrier()
                start = time.monotonic()
                dist.train_step(batch)
                took = torch.tensor([time.monotonic() - start])
                torch.distributed.all_reduce(took, op=torch.distributed.ReduceOp.MAX)
                times.append(took.item())
            row = {"model": job["model"], "run": number, "motley": statistics.median(times[1:])}
            for shares in ("even", "proportional"):
                result = measured_ddp.run({**job, "shares": shares}, speeds)
                row["ddp-" + shares] = statistics.median(result["seconds"])
            if rank == 0:
                print("REPORT" + json.dumps(row), flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    {"step": step, "ddp": ddp}[sys.argv[1]](*sys.argv[2:])
