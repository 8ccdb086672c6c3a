#!/usr/bin/env python3
"""motley.distribute against PyTorch's own ways to train, on one machine: GPT-2 124M of transformers and ResNet-50 of timm.

    ./dev bench python [overhead equal unequal] [--models gpt2,resnet50] [--runs 2] [--steps 2] [--out FOLDER]

overhead  one worker: a step of the bare loop and one by a plan in turn
equal     three emulated devices of 0.4 of a core each behind ports of 10 Gbps (docs/emulation.md): motley, DistributedDataParallel and
          FSDP2 (fully_shard) over gloo in turn
unequal   of 0.6, 0.3 and 0.15 of a core behind ports of 1 Gbps; DDP and FSDP2 with equal rows and with rows by speed

motley plans for what it measured (motley.discover) in at most 20 s. Optimizer: AdamW. A step is the time until the slowest worker has made it; the
median over all runs counts, each after two steps that do not. It runs in the environment with torch 2 that `./dev setup` makes.
Written to bench/results/DATE/.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from study import ROOT, Study

PYTHON, WORKER = ROOT / ".torch2" / "bin" / "python", ROOT / "bench" / "python_worker.py"
CLUSTERS = {"equal": ((0.4, 0.4, 0.4), "10 Gbps"), "unequal": ((0.6, 0.3, 0.15), "1 Gbps")}  # shares of a core, of every port
MODELS = {
    # part: {model: (rows of the global batch, tokens or pixels of a row)}
    "overhead": {"gpt2": (1, 256), "resnet50": (8, 128)},
    "equal": {"gpt2": (6, 64), "resnet50": (24, 64)},
    "unequal": {"gpt2": (6, 64), "resnet50": (24, 64)},
}


def cluster_yaml(part):
    speeds, port = CLUSTERS[part]
    lines = [f"name: {part}\nlink: {{bandwidth: {port}, latency: 100 us}}", f"devices: [{', '.join(f'{{type: core-{s}}}' for s in speeds)}]"]
    lines.append("device_types:")
    lines += [f"  - {{name: core-{s}, like: cpu-core, flops: {60 * s:g} GFLOPS, memory: 6 GiB, memory_bandwidth: {8 * s:g} GB/s, "
              f"overhead: {4 / s:g} us, speed: {s}}}" for s in sorted(set(speeds), reverse=True)]  # fmt: skip
    return "\n".join(lines) + "\n"


class Bench(Study):
    def __init__(self, part, args):
        super().__init__(f"python-{part}", args, 1)
        self.motley_program = str(ROOT / args.build / "motley")
        self.environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, (ROOT / args.build / "python", ROOT / "tests" / "python"))))

    def worker(self, launch, *words):
        """The reports of rank 0 of a worker that `launch` starts."""
        command = [str(word) for word in (*launch, WORKER, *words)]
        done = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed")
        return [json.loads(line.split("REPORT")[1]) for line in done.stdout.splitlines() if line.startswith("REPORT")]

    def launch(self, part):
        """The words before a worker's script."""
        if part == "overhead":
            return [PYTHON]
        cluster = self.tmp / f"{part}.yaml"
        cluster.write_text(cluster_yaml(part))
        return [self.motley_program, "emulate", "--cluster", cluster, "--", PYTHON]

    def discover(self, part):
        """Measures what the workers are on, as a user would."""
        words = ["-m", "motley.discover", "-o", self.tmp / f"{part}-found.yaml"]
        if subprocess.run([*map(str, self.launch(part) + words)], env=self.environment, stdout=subprocess.DEVNULL).returncode != 0:
            sys.exit(f"motley.discover of the workers of {part} failed")

    def part(self, part, model):
        rows, size = MODELS[part][model]
        job, found = self.tmp / f"{part}-{model}.json", self.tmp / f"{part}-found"
        job.write_text(json.dumps({"part": part, "model": model, "rows": rows, "size": size, "runs": self.args.runs,
                                   "steps": self.args.steps * (4 if part == "overhead" else 1),
                                   "cluster": f"{found}.yaml", "profile": f"{found}.profile"}))  # fmt: skip
        seconds = {}
        for report in self.worker(self.launch(part), job):
            if "plan" in report:
                self.say(report["plan"])
                continue
            seconds.setdefault(report["system"], []).extend(report["seconds"])
            self.rows += [{"part": part, "model": model, "system": report["system"], "run": report["run"], "step_s": f"{s:.4f}"}
                          for s in report["seconds"]]  # fmt: skip
        own = statistics.median(seconds["motley"])
        for system, all_steps in seconds.items():
            median = statistics.median(all_steps)
            ratio = "" if system == "motley" else f"   {median / own:5.2f} of motley's"
            if part == "overhead" and system != "motley":
                pairs = statistics.median(m / b for m, b in zip(seconds["motley"], all_steps))
                ratio += f"; a step by a plan takes {100 * (pairs - 1):+.1f}%, the median of pairs"
            self.say(f"{part:8}  {model:8}  {rows:2} x {size:<3}  {system:18}  {median:7.3f} s, least {min(all_steps):7.3f} s, "
                     f"{len(all_steps)} steps{ratio}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(MODELS))
    parser.add_argument("--models", default="gpt2,resnet50")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="of a run that count")
    parser.add_argument("--build", default="build-torch2", help="build folder")
    parser.add_argument("--out", help="folder of the results")
    args = parser.parse_args()
    for part in args.parts:
        if part not in MODELS:
            parser.error(f"there is no part {part}; there are {', '.join(MODELS)}")
    for part in args.parts:
        bench = Bench(part, args)
        bench.say_machine()
        if part in CLUSTERS:
            bench.discover(part)
        for model in args.models.split(","):
            bench.part(part, model)
        print(f"written to {bench.write(None)}")


if __name__ == "__main__":
    main()
