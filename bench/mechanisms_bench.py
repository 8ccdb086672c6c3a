#!/usr/bin/env python3
"""What plans lose without each engine, and without what can be switched off: the models of the zoo on the shipped clusters.

    ./dev bench mechanisms [--clusters A,B] [--models A,B] [--time-limit 5] [--out FOLDER]

Each model is planned on each cluster as a user would, and then without one thing at a time (SWITCHES). Of an engine: the best plan of the
others, of the same run, over the best of all; so what engines tell one another stays in. Of a switch: the plan of a run of its own. Where no
plan is left, that is counted apart. Batches are 8 a device. Written to bench/results/DATE/: mechanisms.csv and mechanisms.txt (this output)."""
import argparse
import json
import pathlib
import statistics
import subprocess
import time

from study import ROOT, Study

ENGINES = ("spmd", "pipeline", "grid", "virtual", "duplex", "opponents")
SWITCHES = {"recomputation": ["--recompute", "off"], "parts of a batch, overlap": ["--duplex", "off"],
            "virtual devices": ["--virtual-devices", "off"]}  # fmt: skip
MODELS = ("bert", "bert-moe", "gpt", "llama", "mlp", "moe", "resnet50", "transgan", "vgg19", "vit", "vit-moe")
TOLD_APART = 1.001  # losses below are none


class Bench(Study):
    def plan(self, model, cluster, batch, *words):
        run = subprocess.run([ROOT / self.args.build / "motley", "plan", model, "--cluster", cluster, "--batch", str(batch), "--time-limit",
                              str(self.args.time_limit), "--json", "-o", self.tmp / "plan.json", *words],
                             capture_output=True, text=True)  # fmt: skip
        return json.loads(run.stdout) if run.returncode == 0 else None

    def row(self, model, cluster, batch):
        whole = self.plan(model, cluster, batch)
        if whole is None:
            return
        row = {"cluster": cluster, "model": model, "batch": batch, "engine": whole["engine"], "step_s": whole["predicted_step_s"]}
        best = {}
        for c in whole["candidates"]:
            engine = "opponents" if c["engine"] not in ENGINES else c["engine"]
            best[engine] = min(best.get(engine, float("inf")), c["simulated_step_s"])
        for engine in ENGINES:
            left = [step for other, step in best.items() if other != engine]
            row[engine] = min(left) / min(best.values()) if left else float("inf")
        for name, words in SWITCHES.items():
            without = self.plan(model, cluster, batch, *words)
            row[name] = without["predicted_step_s"] / row["step_s"] if without else float("inf")
        self.rows.append(row)
        losses = ", ".join(f"{k} {row[k]:.3f}" for k in (*ENGINES, *SWITCHES) if row[k] > TOLD_APART)
        self.say(f"{cluster:14} {model:10} {row['step_s']:10.4g} s  {row['engine']:10} without: {losses or 'nothing is lost'}")

    def summary(self):
        self.say(f"\n{'without':26} {'slower in':>9} {'no plan':>8} {'median':>8} {'worst':>8}")
        for name in (*ENGINES, *SWITCHES):
            factors = [row[name] for row in self.rows]
            lost = [f for f in factors if TOLD_APART < f < float("inf")]
            self.say(f"{name:26} {len(lost):4} of {len(factors):3} {sum(f == float('inf') for f in factors):7} "
                     f"{statistics.median(lost) if lost else 1:7.3f}x {max(lost, default=1):7.3f}x")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", default=",".join(sorted(p.stem for p in pathlib.Path(ROOT / "clusters").glob("*.yaml"))))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--time-limit", type=float, default=5, help="seconds for each plan")
    parser.add_argument("--build", default="build")
    parser.add_argument("--out")
    bench = Bench("mechanisms", parser.parse_args(), 1)
    bench.say_machine()
    begun = time.monotonic()
    for cluster in bench.args.clusters.split(","):
        devices = bench.plan("mlp", cluster, 8192, "--engine", "opponents")["devices"]
        for model in bench.args.models.split(","):
            bench.row(model, cluster, 8 * len(devices))
    bench.summary()
    bench.say(f"{(time.monotonic() - begun) / 60:.1f} minutes")
    bench.write("")


if __name__ == "__main__":
    main()
