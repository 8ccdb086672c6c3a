"""Seeded faults in runs of distribute(elastic=) under torchrun: they end, with the losses of plain PyTorch, and leave nothing behind.

    python3 elastic_cases.py --cases 20 --seed 1
"""

import argparse
import glob
import json
import os
import random
import subprocess
import sys
import tempfile
import time

import elastic_model
import support

WORKER = os.path.join(support.HERE, "elastic_worker.py")
STEPS, HANG, TOLERANCE = 10, 2.0, 1e-9
HANGS = [], ["hang"]  # not of the first 500 seeds, which are as they were
KINDS = {
    "one program": {"engine": "spmd"},
    "pipeline": {"engine": "pipeline", "model": "deep"},
    "grid": {"engine": "grid", "model": "deep"},
    "zero": {"engine": "spmd", "options": {"strategy": "zero"}},
}
TWICE = {"twice": {"engine": "spmd", "every": 0, "options": {"strategy": "zero", "redundancy": 1}}}  # with --twice, alone
POINTS = {"rendezvous": 1, "step": STEPS, "collective": 200, "boundary": 1, "checkpoint": 4}


def left_behind(folder):
    """Files in memory and processes of a run."""
    found = [path for path in glob.glob(f"/dev/shm/motley-elastic-{os.getuid()}-*")]
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/cmdline") as file:
                found += [f"process {process}"] if folder in file.read() else []
        except OSError:
            continue
    return found


def case(seed, twice):
    """(what was done, what went wrong or nothing, seconds). twice: state that is cut is kept twice, and there is no checkpoint."""
    rng = random.Random(seed)
    kinds, points = (TWICE, {**POINTS, "second": 2 * STEPS}) if twice else (KINDS, POINTS)
    name = rng.choice(sorted(kinds))
    faults = []
    for attempt in range(rng.choice([1, 1, 2, 3])):
        action, point = rng.choice(["kill", "kill", "stop", *HANGS[seed > 500], "delay"]), rng.choice(sorted(points))
        count = rng.randint(1, points[point] if attempt == 0 else min(3, points[point]))
        faults.append(f"{action}:{point}:{rng.randrange(3)}:{count}@{attempt}")
    with tempfile.TemporaryDirectory() as folder:
        said = {"folder": folder, "steps": STEPS, "every": 3, "optimizer": rng.choice(["adamw", "sgd"]), "hang": HANG, **kinds[name]}
        command = [sys.executable, "-m", "motley.launch", "--nnodes", "1:1", "--nproc_per_node", "3", "--max_restarts", "6",
                   "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{support.free_port()}", "--rdzv_id", "case",
                   "--rdzv_conf", "is_host=true", "--monitor_interval", "0.1", WORKER, json.dumps(said)]  # fmt: skip
        environment = {**support.environment(), "MOTLEY_FAULTS": ";".join(faults)}
        what, begun = f"{seed}: {name}, {said['optimizer']}, {';'.join(faults)}", time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            log, _ = process.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            process.kill()
            return what, "it hung\n" + process.communicate()[0], 0
        took = time.monotonic() - begun
        if process.returncode != 0:
            return what, f"code {process.returncode}\n{log}", took
        wanted, _ = elastic_model.plain(said)
        with open(os.path.join(folder, "losses")) as file:
            rows = [line.split()[:2] for line in file]
        if {int(step) for step, _ in rows} != set(range(STEPS)):
            return what, f"steps {rows}\n{log}", took
        worst = max(abs(float(loss) - wanted[int(step)]) / abs(wanted[int(step)]) for step, loss in rows)
        if not worst <= TOLERANCE:
            return what, f"a loss is off by {worst:.1e}\n{log}", took
        if twice and len(faults) == 1 and len(rows) > STEPS + 1:
            return what, f"{len(rows) - STEPS} steps were made again\n{log}", took
        left = left_behind(folder)
        return what, f"left behind: {left}\n{log}" if left else "", took


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--twice", action="store_true", help="plans that keep what is cut twice, alone")
    asked = parser.parse_args()
    failed = 0
    for seed in range(asked.seed, asked.seed + asked.cases):
        what, wrong, took = case(seed, asked.twice)
        failed += bool(wrong)
        print(f"{'FAILED ' if wrong else 'ok     '}{took:6.1f} s  {what}{': ' + wrong if wrong else ''}", flush=True)
    print(f"{asked.cases - failed} of {asked.cases} right")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
