#!/usr/bin/env python3
"""Throttled workers that are named, and noise for which nobody is: in runs on an emulated cluster.

    ./dev bench slow [--runs 50] [--out FOLDER]

Half of the runs slow one worker down to half its speed from a random step on (MOTLEY_FAULTS, core/fault.h): it is to be named within 20 steps, and
nobody else. In the others nobody is slower than planned, but other processes take a core in bursts of up to a second, half of the time.
In half of either kind the devices are as fast as the cluster file says, in half by factors that it does not know. Results: slow.csv, slow.txt.
"""
import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import time

import json

from study import ROOT, Study

MODEL, BATCH = "gpt:layers=2,hidden=96,heads=4,seq=32,vocab=256", 24
WITHIN = 20
CLUSTER = """name: slow-{seed}
link: {{bandwidth: 1 Gbps, latency: 100 us}}
devices: [{{type: a, count: 2}}, {{type: b, count: 2}}]
device_types:
  - {{name: a, like: cpu-core, flops: {a} GFLOPS, memory: 2 GiB, memory_bandwidth: 2.4 GB/s, overhead: 16 us, speed: 0.3}}
  - {{name: b, like: cpu-core, flops: {b} GFLOPS, memory: 2 GiB, memory_bandwidth: 1.2 GB/s, overhead: 32 us, speed: 0.15}}
"""


def bursts(seed):
    """Takes a core for up to a second, and leaves it for as long."""
    rng = random.Random(seed)
    while True:
        until = time.monotonic() + rng.uniform(0.05, 1)
        while time.monotonic() < until:
            pass
        time.sleep(rng.uniform(0.05, 1))


class Bench(Study):
    def run(self, seed, slow):
        rng = random.Random(seed)
        known = seed % 2 == 0
        cluster, plan = self.tmp / "cluster.yaml", self.tmp / "plan.json"
        cluster.write_text(CLUSTER.format(seed=seed, a=18 if known else rng.uniform(12, 24), b=9 if known else rng.uniform(6, 12)))
        self.motley("plan", MODEL, "--cluster", cluster, "--batch", BATCH, "--strategy", "dp-cp", "-o", plan)
        worker, since = rng.randrange(4), rng.randint(14, 40)
        faults = f"slow:step:{worker}:{since}" if slow else ""
        steps = since + WITHIN + 5 if slow else 60
        noise = None if slow else multiprocessing.Process(target=bursts, args=(seed,), daemon=True)
        if noise:
            noise.start()
        command = [ROOT / self.args.build / "motley", "run", plan, "--steps", str(steps), "--emulate", "--json"]
        run = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, MOTLEY_FAULTS=faults))
        if noise:
            noise.kill()
            noise.join()
        if run.returncode != 0:
            sys.exit(run.stderr)
        found = json.loads(run.stdout)
        named = [(d["step"], d["device"], d["factor"]) for d in found["slow_devices"]]
        right = [step - (since - 1) for step, device, _ in named if slow and device == worker and step >= since - 1]
        wrong = [row for row in named if not slow or row[1] != worker or row[0] < since - 1]
        self.rows.append({"seed": seed, "slow": worker if slow else "", "since_step": since - 1 if slow else "", "named_after_steps": right[0] if right else "",
                          "factor": f"{named[0][2]:.2f}" if named else "", "others_named": len(wrong), "median_step_s": f"{found['median_step_s']:.4f}"})  # fmt: skip
        print(self.rows[-1], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--runs", type=int, default=50, help="of each kind")
    parser.add_argument("--out")
    args = parser.parse_args()
    bench = Bench("slow", args, 1)
    bench.say_machine()
    for seed in range(args.runs):
        bench.run(seed, True)
        bench.run(1000 + seed, False)
    slow, noisy = ([row for row in bench.rows if (row["slow"] != "") == is_slow] for is_slow in (True, False))
    within = [row["named_after_steps"] for row in slow if row["named_after_steps"] != "" and row["named_after_steps"] <= WITHIN]
    bench.say(f"throttled: the worker was named within {WITHIN} steps in {len(within)} of {len(slow)} runs, after {min(within, default=0)} to {max(within, default=0)}; "
              f"others were named in {sum(row['others_named'] > 0 for row in slow)}")  # fmt: skip
    bench.say(f"noise alone: somebody was named in {sum(row['others_named'] > 0 for row in noisy)} of {len(noisy)} runs")
    bench.write("")
    return 0 if len(within) == len(slow) and not any(row["others_named"] for row in bench.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
