#!/usr/bin/env python3
"""How long a user waits for a plan: from the start of `motley plan`, with its defaults, to its first plan and to the plan on disk.

    ./dev bench plan-times [FOLDER] [--models gpt-24,..] [--clusters mixed-8,..] [--against SECONDS] [--give-up SECONDS]

Eight models on six clusters of 8 to 4,096 devices, whose memory is tight or ample for most of them. Where no plan fits, the time
is that until the program says so. --against plans once more with that --time-limit, and gives the step of the first over that
of the second. A run that takes longer than --give-up is ended. Peak memory is that of the process. Into FOLDER, if given:
plan-times.csv and plan-times.txt.
"""
import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

from study import ROOT

# Name: model, batch on 64 devices or fewer.
MODELS = {
    "gpt-24": ("gpt:layers=24,hidden=1024,heads=16", 512),
    "gpt-48": ("gpt:layers=48,hidden=1024,heads=16", 512),
    "vgg19": ("vgg19", 512),
    "bert-moe": ("bert-moe", 1024),
    "llama-7b": ("llama", 256),
    "llama-70b": ("llama:layers=80,hidden=8192,heads=64,kv_heads=8,ffn=28672", 256),
    "moe-47b": ("moe", 256),
    "vit-24": ("vit:layers=24,hidden=1024,heads=16", 512),
}
# Name: two halves, of nodes of 8 (4 on 8 devices) of one device type each; nodes in each. Else a shipped cluster.
CLUSTERS = {
    "mixed-8": ("A100-80GB", "A100-40GB", 1),
    "hap-64": None,
    "hapt-64": None,
    "mixed-256": ("A100-40GB", "V100-16GB", 16),
    "mixed-1024": ("A100-80GB", "V100-32GB", 64),
    "mixed-4096": ("H100-80GB", "A100-80GB", 256),
}  # fmt: skip


def cluster_yaml(name):
    fast, slow, nodes = CLUSTERS[name]
    group = "  - {{name: {}, count: {}, link: {{bandwidth: 300 GB/s, latency: 5 us}}, devices: [{{type: {}, count: {}}}]}}\n"
    groups = "".join(group.format(half, nodes, kind, 8 if nodes > 1 else 4) for half, kind in (("fast", fast), ("slow", slow)))
    return f"name: {name}\nlink: {{bandwidth: 100 Gbps, latency: 20 us}}\ngroups:\n{groups}"


def devices_of(name):
    return 64 if CLUSTERS[name] is None else 8 if CLUSTERS[name][2] == 1 else 16 * CLUSTERS[name][2]


class Run:
    """One `motley plan`: exit code, wall and processor seconds, MiB, and what it printed, decoded ({}: nothing)."""

    def __init__(self, build, words, give_up):
        start = time.monotonic()
        child = subprocess.Popen([ROOT / build / "motley", "plan", *words, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        timer = threading.Timer(give_up, child.kill)
        timer.start()
        text, errors = child.stdout.read(), child.stderr.read().decode()
        _, status, usage = os.wait4(child.pid, 0)
        timer.cancel()
        self.wall = time.monotonic() - start
        self.code = os.waitstatus_to_exitcode(status)
        self.processor, self.mib = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
        self.said = json.loads(text) if text.startswith(b"{") else {}
        if self.code not in (0, 3, -9):
            sys.exit(f"motley plan {' '.join(words)}\n{errors}")

    def first(self):
        """Seconds from the start of the program to its first plan; None: it does not say."""
        said = self.said
        return self.wall - (said["planning_s"] - said["first_plan_s"]) if said.get("first_plan_s") is not None else None


def seconds(value):
    return "-" if value is None else f"{value:.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--against", type=float, metavar="SECONDS")
    parser.add_argument("--give-up", type=float, default=600, metavar="SECONDS")
    parser.add_argument("--build", default="build", help="build folder")
    args = parser.parse_args()
    for given, known in ((args.models, MODELS), (args.clusters, CLUSTERS)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}; give some of {', '.join(known)}")
    rows, lines = [], []

    def say(text):
        print(text, flush=True)
        lines.append(text)

    say(f"{'model':<10} {'cluster':<11} {'batch':>6} {'first s':>8} {'plan s':>8} {'cpu s':>7} {'MiB':>6} {'step s':>9}  engine")
    with tempfile.TemporaryDirectory(prefix="motley-plan-times-") as folder:
        for cluster in args.clusters.split(","):
            file = cluster
            if CLUSTERS[cluster]:
                file = pathlib.Path(folder, f"{cluster}.yaml")
                file.write_text(cluster_yaml(cluster))
            for model in args.models.split(","):
                name, batch = MODELS[model]
                batch *= max(1, devices_of(cluster) // 64)
                words = [name, "--cluster", str(file), "--batch", str(batch), "-o", str(pathlib.Path(folder, "plan.json"))]
                run = Run(args.build, words, args.give_up)
                step = run.said.get("predicted_step_s")
                row = {"model": model, "cluster": cluster, "batch": batch, "first_plan_s": run.first(), "plan_s": run.wall,
                       "processor_s": run.processor, "mib": run.mib, "step_s": step, "engine": run.said.get("engine"), "over": None}  # fmt: skip
                says = {0: row["engine"], 3: "none in time" if run.said.get("out_of_time") else "none fits", -9: "given up"}[run.code]
                if args.against:
                    longer = Run(args.build, [*words, "--time-limit", str(args.against)], args.against + args.give_up)
                    best = longer.said.get("predicted_step_s")
                    row["over"] = step / best if step and best else None
                    says += f", {row['over']:.3f} of {best:.4g}" if row["over"] else f", then {best}"
                rows.append(row)
                say(f"{model:<10} {cluster:<11} {batch:>6} {seconds(row['first_plan_s']):>8} {run.wall:>8.2f} {run.processor:>7.2f} "
                    f"{run.mib:>6.0f} {'-' if step is None else f'{step:.4g}':>9}  {says}")  # fmt: skip
    if args.folder:
        out = pathlib.Path(args.folder)
        out.mkdir(parents=True, exist_ok=True)
        with open(out / "plan-times.csv", "w", newline="") as table:
            writer = csv.DictWriter(table, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        (out / "plan-times.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
