#!/usr/bin/env python3
"""The Python door against the C++ program and against DistributedDataParallel.

    ./dev bench python [--runs 3] [--build FOLDER]

capture   seconds to capture gpt from Python and from C++; the operators are the same
step      median step of one plan of mlp on two workers, motley run and Python in turn; the graphs are equal.
          The quietest of the runs counts
ddp       median step on the emulated cluster two-sites (four workers, 400 Mbps between sites), motley and
          DistributedDataParallel in turn: even shares, and shares by speed
"""

import argparse
import json
import os
import pathlib
import resource
import socket
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAIR = "name: pair\nlink: {bandwidth: 10 Gbps, latency: 20 us}\ndevices: [{type: cpu-core, count: 2}]\n"
MLP = "mlp:layers=4,hidden=1536,in=512,classes=100"
GPT = "gpt:layers=2,hidden=256,heads=4,seq=64,vocab=512"
BATCH = 32


def environment(build):
    paths = [str(build / "python"), str(ROOT / "bench")]
    return dict(os.environ, PYTHONPATH=":".join(paths), OMP_NUM_THREADS="1")


def reports(command, build):
    done = subprocess.run(command, env=environment(build), stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed")
    return [json.loads(line.split("REPORT")[1]) for line in done.stdout.splitlines() if "REPORT" in line]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


class Cpu:
    """CPU seconds of the processes that are started inside."""

    def __enter__(self):
        self.begin = self.now()
        return self

    def __exit__(self, *_):
        self.seconds = self.now() - self.begin

    @staticmethod
    def now():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime


def capture(build, runs):
    code = f"""
import json, statistics, time, torch, motley, python_model
from motley import _motley
rows = []
for layers in (2, 12):
    torch.manual_seed(0)
    model, draw = python_model.gpt({BATCH}, layers=layers)
    batch = draw()
    times = {{"python": [], "c++": []}}
    for _ in range({runs} + 1):
        start = time.perf_counter()
        here = motley.capture(model, batch, python_model.loss_fn)
        middle = time.perf_counter()
        there = _motley.capture_zoo("{GPT}".replace("layers=2", f"layers={{layers}}"), {BATCH})
        times["python"].append(middle - start)
        times["c++"].append(time.perf_counter() - middle)
        assert here.ops == there.ops
    rows.append({{"layers": layers, "nodes": here.nodes, **{{k: statistics.median(v[1:]) for k, v in times.items()}}}})
print("REPORT" + json.dumps(rows))
"""
    for row in reports([sys.executable, "-c", code], build)[0]:
        ratio = row["python"] / row["c++"]
        print(f"capture,{row['layers']} layers,{row['nodes']} nodes,python {row['python']:.4f} s,c++ {row['c++']:.4f} s,{ratio:.2f}x")


def step(build, runs, steps):
    with tempfile.TemporaryDirectory() as folder:
        cluster, plan = f"{folder}/pair.yaml", f"{folder}/plan.json"
        pathlib.Path(cluster).write_text(PAIR)
        motley = str(build / "motley")
        subprocess.run([motley, "plan", MLP, "--cluster", cluster, "--batch", "192", "-o", plan],
                       stdout=subprocess.DEVNULL, check=True)  # fmt: skip

        def run(n):
            with Cpu() as cpu:
                done = subprocess.run([motley, "run", plan, "--steps", str(n), "--json"], capture_output=True, text=True, check=True)
            return [row["seconds"] for row in json.loads(done.stdout)["steps"]][1:], cpu.seconds

        def python(n):
            with Cpu() as cpu:
                report = reports(
                    [sys.executable, "-m", "motley.launch", "--nproc_per_node", "2", "--master_addr", "127.0.0.1",
                     "--master_port", free_port(), str(ROOT / "bench" / "python_worker.py"), "step", plan, "192", str(n)], build
                )  # fmt: skip
            return report[0]["seconds"], cpu.seconds

        ways = {"motley run": run, "python": python}
        wall, cpu = ({k: [] for k in ways} for _ in range(2))
        for _ in range(runs):
            for k, way in ways.items():
                few, more = way(steps), way(4 * steps)  # what start-up costs is in both
                wall[k].append(statistics.median(few[0] + more[0]))
                cpu[k].append((more[1] - few[1]) / (3 * steps))
            print("step,run," + ",".join(f"{k} {wall[k][-1]:.4f} s and {cpu[k][-1]:.4f} s of CPU" for k in ways), flush=True)
    for what, times in (("median step", wall), ("CPU of a step", cpu)):
        there, here = (min(times[k]) for k in ways)
        print(f"step,{what} in the quietest of {runs} runs,motley run {there:.4f} s,python {here:.4f} s,{here / there:.3f}x")


def ddp(build, runs, steps):
    sys.path.insert(0, str(ROOT / "bench"))
    import measured_bench

    jobs = [{"model": name, "args": measured_bench.MODELS[name][0], "batch": measured_bench.MODELS[name][1], "steps": steps,
             "runs": runs} for name in ("mlp", "vgg19", "gpt")]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        cluster = f"{folder}/two-sites.yaml"
        pathlib.Path(cluster).write_text(measured_bench.cluster_yaml("two-sites"))
        pathlib.Path(f"{folder}/jobs.json").write_text(json.dumps(jobs))
        command = [str(build / "motley"), "emulate", "--cluster", cluster, "--", sys.executable,
                   str(ROOT / "bench" / "python_worker.py"), "ddp", cluster, f"{folder}/jobs.json"]  # fmt: skip
        rows = reports(command, build)
    for job in jobs:
        mine = [row for row in rows if row["model"] == job["model"]]
        median = {k: statistics.median(row[k] for row in mine) for k in ("motley", "ddp-even", "ddp-proportional")}
        print(f"ddp,{job['model']},motley {median['motley']:.3f} s,even {median['ddp-even']:.3f} s,"
              f"proportional {median['ddp-proportional']:.3f} s,"
              f"{median['ddp-even'] / median['motley']:.2f}x,{median['ddp-proportional'] / median['motley']:.2f}x")  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["capture", "step", "ddp"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    options = parser.parse_args()
    build = options.build.resolve()
    if "capture" in options.parts:
        capture(build, 20)
    if "step" in options.parts:
        step(build, options.runs, options.steps)
    if "ddp" in options.parts:
        ddp(build, options.runs, min(options.steps, 5))


if __name__ == "__main__":
    main()
