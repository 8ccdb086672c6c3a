#!/usr/bin/env python3
"""What the limits of training frameworks cost: for every cluster, model and target the step of the framework's own way (as
many layers in each stage and equal rows on all devices), of the best plan that it can say, and of any plan (the fastest that was
found, those of targets among them).

    ./dev bench export [FOLDER] [--clusters a,b] [--models a,b] [--targets a,b] [--time-limit SECONDS] [--motley PROGRAM]

Into FOLDER, if given: export.csv and export.txt. Exit code 1 if a target's plan is slower than its own way."""
import argparse
import csv
import json
import pathlib
import subprocess
import sys

from study import ROOT

MODELS = {
    "gpt": ("gpt:seq=512", 64),
    "llama": ("llama:layers=16,hidden=1024,heads=16,kv_heads=8,ffn=2816,seq=512,vocab=32000", 64),
    "moe": ("moe:layers=8,hidden=512,heads=8,kv_heads=8,ffn=1024,experts=8,seq=512,vocab=32000", 64),
}
CLUSTERS = sorted(path.stem for path in (ROOT / "clusters").glob("*.yaml"))
TARGETS = ["ddp", "fsdp2", "deepspeed", "galvatron", "megatron", "torchtitan", "flagscale"]


def plan(args, cluster, model, batch, target=None):
    """What `motley plan` says; None: nothing fits."""
    words = ["--for", target, "--no-comparison"] if target else []
    done = subprocess.run([args.motley, "plan", model, "--cluster", cluster, "--batch", str(batch), "--json",
                           "--time-limit", str(args.time_limit), *words], capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in (0, 3):
        sys.exit(f"{cluster} {model} {target}: exit code {done.returncode}: {done.stderr}")
    return json.loads(done.stdout) if done.returncode == 0 else None


def shown(seconds):
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--time-limit", type=float, default=10)
    parser.add_argument("--motley", default=str(ROOT / "build" / "motley"))
    args = parser.parse_args()
    rows, slower = [], 0
    targets = args.targets.split(",")
    lines = ["| cluster, model | any plan | " + " | ".join(targets) + " |", "| --- " * (len(targets) + 2) + "|"]
    print("\n".join(lines), flush=True)
    for cluster in args.clusters.split(","):
        for name in args.models.split(","):
            model, batch = MODELS[name]
            cells = []
            any_plan = plan(args, cluster, model, batch)
            free = any_plan["predicted_step_s"] if any_plan else None
            for target in targets:
                found = plan(args, cluster, model, batch, target)
                row = {"cluster": cluster, "model": model, "batch": batch, "target": target}
                if found:
                    found = found["for"]
                    limit = found["limits"][0]["limit"] if found["limits"] else ""
                    row |= {"default_s": found["default_step_s"], "for_s": found["predicted_step_s"], "costs_most": limit}
                    free = min(free or found["predicted_step_s"], found["predicted_step_s"])
                    cells.append(f"{shown(found['predicted_step_s'])} ({shown(found['default_step_s'])})")
                    if found["default_step_s"] and found["predicted_step_s"] > found["default_step_s"] * (1 + 1e-6):
                        slower += 1
                        print(f"slower than its own way: {cluster} {model} {target}", file=sys.stderr)
                else:
                    cells.append("-")
                rows.append(row)
            for row in rows[-len(targets) :]:
                row["free_s"] = free
            lines.append(f"| {cluster}, {name} | {shown(free)} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
        (args.folder / "export.txt").write_text("\n".join(lines) + "\n")
        with open(args.folder / "export.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["cluster", "model", "batch", "target", "default_s", "for_s", "free_s", "costs_most"])
            writer.writeheader()
            writer.writerows(rows)
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
