#!/usr/bin/env python3
"""The Python package against the C++ program and against DistributedDataParallel.

    ./dev bench python [--runs 5] [--steps 60] [--build FOLDER]

capture   least seconds of CPU to capture gpt from Python and from C++, in turn; the operators are the same
step      median step of one plan of mlp on two workers, motley run and Python going on half a second in turn; the graphs are equal
ddp       median step on the emulated cluster two-sites (four workers, 400 Mbps between sites), motley and
          DistributedDataParallel in turn: even shares, and shares by speed
"""

import argparse
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading

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


def capture(build, runs):
    code = f"""
import json, time, torch, motley, python_model
from motley import _motley
rows = []
for layers in (2, 12):
    torch.manual_seed(0)
    model, draw = python_model.gpt({BATCH}, layers=layers)
    batch = draw()
    times = {{"python": [], "c++": []}}
    for _ in range({runs} + 1):
        start = time.thread_time()
        here = motley.capture(model, batch, python_model.loss_fn)
        middle = time.thread_time()
        there = _motley.capture_zoo("{GPT}".replace("layers=2", f"layers={{layers}}"), {BATCH})
        times["python"].append(middle - start)
        times["c++"].append(time.thread_time() - middle)
        assert here.ops == there.ops
    rows.append({{"layers": layers, "nodes": here.nodes, **{{k: min(v) for k, v in times.items()}}}})
print("REPORT" + json.dumps(rows))
"""
    for row in reports([sys.executable, "-c", code], build)[0]:
        ratio = row["python"] / row["c++"]
        print(f"capture,{row['layers']} layers,{row['nodes']} nodes,python {row['python']:.4f} s,c++ {row['c++']:.4f} s,{ratio:.2f}x")


TURN_S = 0.5  # of two programs in turns, each


class InTurns:
    """A program of several processes that stands still, from its first step on, while another has its turn."""

    def __init__(self, commands, environments):
        self.processes = []
        for words, variables in zip(commands, environments):
            group = self.processes[0].pid if self.processes else 0
            own = {"stderr": subprocess.PIPE} if group == 0 else {}
            self.processes.append(subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True, process_group=group, **own))
        log = ""
        for line in self.processes[0].stderr:
            log += line
            if line.startswith("step "):
                break
        else:
            sys.exit(f"{' '.join(map(str, commands[0]))} failed\n{log}")
        self.signal(signal.SIGSTOP)
        self.output = None
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def signal(self, number):
        os.killpg(self.processes[0].pid, number)

    def read(self):
        self.output, self.errors = self.processes[0].communicate()

    def turn(self):
        """Whether it goes on after this turn."""
        self.signal(signal.SIGCONT)
        self.reader.join(TURN_S)
        if self.reader.is_alive():
            self.signal(signal.SIGSTOP)
            return True
        if any(process.wait() != 0 for process in self.processes):
            sys.exit(f"{' '.join(map(str, self.processes[0].args))} failed\n{self.errors}")
        return False


def step(build, runs, steps):
    """Both beside each other, half a second in turn: a slow moment of the machine is for both. The median over the steps of
    all runs counts; steps that a turn interrupted are left out."""
    with tempfile.TemporaryDirectory() as folder:
        cluster, plan = f"{folder}/pair.yaml", f"{folder}/plan.json"
        pathlib.Path(cluster).write_text(PAIR)
        motley = str(build / "motley")
        subprocess.run([motley, "plan", MLP, "--cluster", cluster, "--batch", "192", "-o", plan],
                       stdout=subprocess.DEVNULL, check=True)  # fmt: skip

        def of_motley():
            return InTurns([[motley, "run", plan, "--steps", str(steps), "--json"]], [environment(build)])

        def of_python():
            port = free_port()
            ranks = [dict(environment(build), RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for r in range(2)]  # fmt: skip
            words = [sys.executable, str(ROOT / "bench" / "python_worker.py"), "step", plan, "192", str(steps)]
            return InTurns([words] * 2, ranks)

        times = {"motley run": [], "python": []}
        for run in range(runs):
            both = {"motley run": of_motley(), "python": of_python()}
            going = sorted(both, reverse=run % 2 == 1)
            while going:
                going = [name for name in going if both[name].turn()]
            seconds = {"motley run": [row["seconds"] for row in json.loads(both["motley run"].output)["steps"]],
                       "python": json.loads(both["python"].output.split("REPORT")[1])["seconds"]}  # fmt: skip
            for name, all_steps in seconds.items():
                new = [s for s in all_steps[3:] if s < TURN_S]
                print(f"step,run {run},{name},{len(new)} steps,median {statistics.median(new):.4f} s", flush=True)
                times[name] += new
        median = {name: statistics.median(t) for name, t in times.items()}
        least = {name: statistics.quantiles(t, n=10)[0] for name, t in times.items()}
        for name in times:
            print(f"step,{name},{runs} runs of {steps} steps,median {median[name]:.4f} s,least tenth {least[name]:.4f} s")
        print(f"step,python / motley run,{median['python'] / median['motley run']:.3f}x,"
              f"of the least tenths {least['python'] / least['motley run']:.3f}x")


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
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    options = parser.parse_args()
    build = options.build.resolve()
    if "capture" in options.parts:
        capture(build, 40)
    if "step" in options.parts:
        step(build, options.runs, options.steps)
    if "ddp" in options.parts:
        ddp(build, min(options.runs, 3), min(options.steps, 5))


if __name__ == "__main__":
    main()
