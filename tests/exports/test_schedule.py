#!/usr/bin/env python3
"""A schedule.csv in torch.distributed.pipelining: four ranks over gloo run it with toy stages, and the gradients are those of
one device.

    test_schedule.py SCHEDULE.csv         of `motley export --to torchtitan`; needs torch 2.6 or later
    test_schedule.py --motley PROGRAM     plans for torchtitan, exports, and runs that one
    test_schedule.py                      1F1B, and a schedule with more warm-up passes"""
import argparse
import os
import pathlib
import subprocess
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WIDTH, ROWS = 8, 2


def rows_of(warm_ups, count):
    """The CSV of stages with these warm-up passes, as src/export/torchtitan.cc writes it."""
    stages = len(warm_ups)
    order = []
    for warm in warm_ups:
        passes, backward = [("F", m) for m in range(warm)], 0
        for m in range(warm, count):
            passes += [("B", backward), ("F", m)]
            backward += 1
        order.append(passes + [("B", m) for m in range(backward, count)])
    done, at, rows = {}, [0] * stages, [[] for _ in range(stages)]
    time = 0
    while any(a < len(o) for a, o in zip(at, order)):
        made = []
        for s in range(stages):
            cell = ""
            if at[s] < len(order[s]):
                kind, m = order[s][at[s]]
                before = ("F", s - 1, m) if kind == "F" else ("B", s + 1, m)
                if not 0 <= before[1] < stages or done.get(before, time) < time:
                    cell = f"{s}{kind}{m}"
                    made.append((kind, s, m))
                    at[s] += 1
            rows[s].append(cell)
        for one in made:
            done[one] = time
        time += 1
        assert time < 1000
    return "\n".join(",".join(r) for r in rows) + "\n"


def stage(index):
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def data(count):
    random = torch.Generator().manual_seed(9)
    return (torch.randn(count * ROWS, WIDTH, dtype=torch.double, generator=random),
            torch.randn(count * ROWS, WIDTH, dtype=torch.double, generator=random))


def loss(y, target):
    return ((y - target) ** 2).mean()


def worker(rank, ranks, path, stages, count, port):
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    own = [PipelineStage(stage(s), s, stages, torch.device("cpu")) for s in range(rank, stages, ranks)]
    schedule = _PipelineScheduleRuntime(own, count, loss_fn=loss)
    schedule._load_csv(path)
    x, target = data(count)
    if rank == 0:
        schedule.step(x)
    elif rank == ranks - 1:
        schedule.step(target=target)
    else:
        schedule.step()
    whole = nn.Sequential(*(stage(s) for s in range(stages)))
    loss(whole(x), target).backward()
    for one in own:
        for mine, wanted in zip(one.submod.parameters(), whole[one.stage_index].parameters()):
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-10, atol=1e-13)
    dist.barrier()
    dist.destroy_process_group()


def check(text, port):
    cells = [c for line in text.splitlines() for c in line.split(",") if c]
    stages = 1 + max(int(c.replace("B", "F").split("F")[0]) for c in cells)
    count = 1 + max(int(c.replace("B", "F").split("F")[1]) for c in cells)
    ranks = len(text.splitlines())
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "schedule.csv")
        path.write_text(text)
        mp.spawn(worker, (ranks, str(path), stages, count, port), nprocs=ranks)
    print(f"{stages} stages on {ranks} ranks, {count} micro-batches: gradients equal one device's")


def exported(motley, folder):
    """The schedule of a plan of four stages, as exported."""
    model = "llama:layers=8,hidden=64,heads=4,kv_heads=4,ffn=128,seq=32,vocab=256"
    for words in (["plan", model, "--cluster", "local-mixed-4", "--batch", "32", "--for", "torchtitan", "--fix", "pp=4,dp=1,tp=1",
                   "--no-comparison", "-o", f"{folder}/plan.json"],
                  ["export", f"{folder}/plan.json", "--to", "torchtitan", "-o", f"{folder}/run"]):
        subprocess.run([motley, *words], check=True, stdout=subprocess.DEVNULL)
    return pathlib.Path(folder, "run", "schedule.csv").read_text()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", nargs="?", type=pathlib.Path)
    parser.add_argument("--motley")
    args = parser.parse_args()
    if args.schedule or args.motley:
        with tempfile.TemporaryDirectory() as folder:
            check(args.schedule.read_text() if args.schedule else exported(args.motley, folder), 29611)
        return
    check(rows_of([4, 3, 2, 1], 8), 29612)
    check(rows_of([7, 4, 3, 1], 8), 29613)


if __name__ == "__main__":
    main()
