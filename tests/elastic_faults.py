"""Runs of `motley run --elastic` with seeded faults: they end, with the losses of one device, and leave nothing behind.

    python3 tests/elastic_faults.py BUILD --cases 12 --seed 1
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time

MODEL = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=256"
STEPS = 10
HANG = 2.0  # seconds of --hang-timeout
TOLERANCE = 2e-5  # of losses, in single precision; double precision is tested by recent_test.cc
CLUSTER = """name: five
link: {bandwidth: 400 Mbps, latency: 100 us}
groups:
  - {name: fast, link: {bandwidth: 4 Gbps, latency: 20 us}, devices: [{type: fast, count: 3}]}
  - {name: slow, link: {bandwidth: 4 Gbps, latency: 20 us}, devices: [{type: slow, count: 2}]}
device_types:
  - {name: fast, like: cpu-core, flops: 200 MFLOPS, memory: 2 GiB, memory_bandwidth: 300 MB/s, overhead: 2 us}
  - {name: slow, like: cpu-core, flops: 90 MFLOPS, memory: 1 GiB, memory_bandwidth: 150 MB/s, overhead: 2 us}
"""
PLANS = {
    "spmd": ["--engine", "spmd"],
    "pipeline": ["--engine", "pipeline"],
    "grid": ["--engine", "grid"],
    "zero": ["--strategy", "zero"],
}
TWICE = {"twice": ["--strategy", "zero", "--redundancy", "1"]}  # with --twice, alone
POINTS = {"rendezvous": 1, "step": STEPS, "collective": 150, "boundary": STEPS, "checkpoint": STEPS}


class Faults:
    def __init__(self, build, folder, twice):
        self.points = {**POINTS, "second": 2 * STEPS} if twice else POINTS
        self.motley, self.folder = os.path.join(build, "motley"), folder
        cluster = os.path.join(folder, "five.yaml")
        with open(cluster, "w") as file:
            file.write(CLUSTER)
        one = os.path.join(folder, "one.yaml")
        with open(one, "w") as file:
            file.write(CLUSTER[CLUSTER.index("device_types") :].join(["name: one\nlink: {bandwidth: 1 Gbps}\ndevices: [{type: fast}]\n", ""]))
        self.plans = {}
        for name, words in (TWICE if twice else PLANS).items():
            path = os.path.join(folder, f"{name}.json")
            run = self.run("plan", MODEL, "--cluster", cluster, "--batch", "20", *words, "-o", path, "--json")
            if run.returncode == 0:
                self.plans[name] = (path, len(json.loads(run.stdout)["devices"]))
        alone = os.path.join(folder, "alone.json")
        assert self.run("plan", MODEL, "--cluster", one, "--batch", "20", "-o", alone).returncode == 0
        self.expected = self.losses(self.run("run", alone, "--steps", str(STEPS), "--json"))
        self.normal = {}

    def run(self, *words, faults="", timeout=120):
        return subprocess.run([self.motley, *words], capture_output=True, text=True, timeout=timeout, start_new_session=True,
                              env=dict(os.environ, MOTLEY_FAULTS=faults))  # fmt: skip

    @staticmethod
    def losses(run):
        assert run.returncode == 0, run.stderr
        return [(s["step"], s["loss"]) for s in json.loads(run.stdout)["steps"]]

    def case(self, seed):
        """(what was done, what went wrong or nothing, seconds beyond a run without faults and the time to notice)."""
        rng = random.Random(seed)
        name = rng.choice(sorted(self.plans))
        path, workers = self.plans[name]
        if name not in self.normal:
            begun = time.monotonic()
            self.losses(self.run("run", path, "--steps", str(STEPS), "--json"))
            self.normal[name] = time.monotonic() - begun
        faults, stops = [], 0
        for attempt in range(rng.choice([1, 1, 2, min(3, workers - 1)])):
            action, point = rng.choice(["kill", "kill", "stop", "delay"]), rng.choice(sorted(self.points))
            if attempt and point == "collective":
                point = "step"
            count = rng.randint(1, self.points[point] if attempt == 0 else min(2, self.points[point]))
            faults.append(f"{action}:{point}:{rng.randrange(workers - attempt)}:{count}@{attempt}")
            stops += action == "stop"
        text = ";".join(faults)
        begun = time.monotonic()
        try:
            run = self.run("run", path, "--steps", str(STEPS), "--elastic", "--hang-timeout", str(HANG), "--json", faults=text)
        except subprocess.TimeoutExpired:
            return f"{name} {text}", "it hung", 0
        over = time.monotonic() - begun - self.normal[name] - HANG * stops
        wrong = self.wrong(run)
        return f"{name} {text}", wrong, max(0.0, over) / max(1, len(faults))

    def wrong(self, run):
        if run.returncode != 0:
            return f"code {run.returncode}: {run.stderr.strip().splitlines()[-1:]}"
        got = self.losses(run)
        if [step for step, _ in got] != [step for step, _ in self.expected]:
            return f"steps {[step for step, _ in got]}"
        worst = max(abs(a - b) / b for (_, a), (_, b) in zip(got, self.expected))
        if not worst <= TOLERANCE:
            return f"a loss is off by {worst:.1e}"
        left = [name for name in os.listdir("/dev/shm") if name.startswith(f"motley-{os.getuid()}-")]
        left += [p for p in os.listdir("/proc") if p.isdigit() and self.ours(p)]
        return f"left behind: {left}" if left else ""

    def ours(self, process):
        try:
            with open(f"/proc/{process}/cmdline") as file:
                return self.folder in file.read()
        except OSError:
            return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build")
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strict", action="store_true", help="fail, too, if going on takes more than 5 s: on a machine that does nothing else")
    parser.add_argument("--twice", action="store_true", help="of a plan that keeps what is cut twice, alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motley-faults-") as folder:
        faults = Faults(args.build, folder, args.twice)
        print(f"plans: {', '.join(f'{name} ({n} workers)' for name, (_, n) in faults.plans.items())}")
        failed, times = 0, []
        for seed in range(args.seed, args.seed + args.cases):
            what, wrong, over = faults.case(seed)
            failed += bool(wrong)
            times.append(over)
            print(f"{seed}  {what}  {over:.1f} s{'  WRONG: ' + wrong if wrong else ''}", flush=True)
        late = sum(over > 5 for over in times)
        print(f"{args.cases - failed} of {args.cases} right; {late} took more than 5 s a fault beyond its detection, worst {max(times):.1f} s")
        sys.exit(1 if failed or (late and args.strict) else 0)


if __name__ == "__main__":
    main()
