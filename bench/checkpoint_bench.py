#!/usr/bin/env python3
"""How much longer training takes for a checkpoint every 50 steps.

    ./dev bench checkpoint [--runs 3] [--every 50] [--out FOLDER]

`motley run` on two emulated devices, which leave the machine's cores free as accelerators do, and `motley.distribute(elastic=)` on two workers
that take both cores, so that writing takes from computing. The stall of a checkpoint is by how much the 25 steps behind it are longer than the
25 before it; beside it the same in the middle between two checkpoints, where there is none: the noise. Wanted: at most 2% of the 50 steps.
Results: checkpoint.csv, checkpoint.txt.
"""
import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

from study import ROOT, Load, Study

BAR = 0.02
CLUSTER = """name: two
link: {bandwidth: 2 Gbps, latency: 100 us}
devices: [{type: a, count: 2}]
device_types: [{name: a, like: cpu-core, flops: 18 GFLOPS, memory: 3 GiB, memory_bandwidth: 2.4 GB/s, overhead: 16 us, speed: 0.3}]
"""
MODEL, BATCH = "gpt:layers=4,hidden=256,heads=4,seq=64,vocab=256", 8


class Bench(Study):
    @property
    def steps(self):
        return 9 * self.args.every // 2 + 5

    def times_of(self, command, environment):
        """When each step ended, from the lines "step N"."""
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
        times, said = [], ""
        for line in process.stderr:
            if line.startswith("step "):
                times.append(time.monotonic())
            else:
                said = line
        if process.wait() != 0:
            sys.exit(f"{command}: {said}")
        return times

    def judge(self, what, times, saved, load):
        """Checkpoints are begun behind every so many steps, but the last, which ends the run."""
        every, window = self.args.every, self.args.every // 2
        took = [b - a for a, b in zip(times, times[1:])]  # of steps 1, 2, ...
        step = statistics.median(took)

        def longer(at):  # what the steps behind `at` steps took more than those before
            return sum(took[at - 1 : at - 1 + window]) - sum(took[at - 1 - window : at - 1])

        whole = range(2 * every, len(times) - window, every)
        for at in whole:
            self.rows.append({"what": what, "step_s": f"{step:.4f}", "checkpoint_bytes": saved, "behind": at, "stall_s": f"{longer(at):.4f}",
                              "between_s": f"{longer(at - window):.4f}", "longest_step_s": f"{max(took[at - 1 : at - 1 + window]):.4f}",
                              "foreign_cores": f"{load:.2f}"})  # fmt: skip

    def of_run(self, plan):
        folder = self.tmp / "saved"
        shutil.rmtree(folder, ignore_errors=True)
        command = [ROOT / self.args.build / "motley", "run", plan, "--steps", str(self.steps), "--emulate", "--checkpoint", folder,
                   "--checkpoint-every", str(self.args.every)]  # fmt: skip
        with Load() as load:
            times = self.times_of(command, {})
        self.judge("motley run", times, size_of(folder), load.foreign)

    def of_python(self):
        folder = self.tmp / "elastic"
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "motley.launch", "--nnodes", "1:1", "--nproc_per_node", "2", "--max_restarts", "0", "--rdzv_backend", "c10d",
                   "--rdzv_endpoint", "127.0.0.1:0", "--rdzv_id", "bench", ROOT / "bench" / "checkpoint_worker.py", folder, str(self.steps), str(self.args.every)]  # fmt: skip
        build = (ROOT / self.args.build).resolve()
        with Load() as load:
            times = self.times_of(command, {"PYTHONPATH": str(build / "python"), "MOTLEY_BINARY_DIR": str(build), "OMP_NUM_THREADS": "1"})
        self.judge("distribute", times, size_of(folder), load.foreign)


def size_of(folder):
    """Of the newest checkpoint in it."""
    newest = max(pathlib.Path(folder).glob("step-*"), key=lambda path: path.stat().st_mtime)
    return sum(file.stat().st_size for file in newest.iterdir())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--every", type=int, default=50, help="steps from one checkpoint to the next; fewer to try it")
    parser.add_argument("--out")
    args = parser.parse_args()
    bench = Bench("checkpoint", args, 1)
    bench.say_machine()
    cluster, plan = bench.tmp / "two.yaml", bench.tmp / "plan.json"
    cluster.write_text(CLUSTER)
    bench.motley("plan", MODEL, "--cluster", cluster, "--batch", BATCH, "--strategy", "dp-cp", "-o", plan)
    for _ in range(args.runs):
        bench.of_run(plan)
        bench.of_python()
    good = True
    for what in ("motley run", "distribute"):
        rows = [row for row in bench.rows if row["what"] == what]
        step = statistics.median(float(row["step_s"]) for row in rows)
        stall, between = (statistics.median(float(row[column]) for row in rows) for column in ("stall_s", "between_s"))
        part = stall / (args.every * step)
        good = good and part <= BAR
        bench.say(f"{what}: steps of {step * 1e3:.0f} ms, a checkpoint of {rows[0]['checkpoint_bytes'] / 2**20:.0f} MiB every {args.every}: {stall * 1e3:.0f} ms longer, "
                  f"{100 * part:.2f}% of the time; between checkpoints {between * 1e3:.0f} ms ({len(rows)} checkpoints, medians, "
                  f"foreign load up to {max(float(row['foreign_cores']) for row in rows):.2f})")  # fmt: skip
    bench.write("")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
