"""What motley.discover finds on random emulated clusters, against what their files set, and how long it takes.

    ./dev bench discover [--clusters 20] [--seed 1] [--out FOLDER]
"""
import argparse
import os
import statistics
import sys

import study

sys.path.insert(0, str(study.ROOT / "tests" / "python"))
import random_clusters


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clusters", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--build", default="build")
    parser.add_argument("--out")
    args = parser.parse_args()
    bench = study.Study("discover", args, 1)
    bench.say_machine()
    os.environ["PYTHONPATH"] = str(study.ROOT / args.build / "python")
    for seed in range(args.seed, args.seed + args.clusters):
        text, truth = random_clusters.random_cluster(seed)
        with study.Load() as load:
            report, output = random_clusters.discovered(str(study.ROOT / args.build / "motley"), "/usr/bin/python3", text, str(bench.tmp))
        errors = random_clusters.errors(truth, report, report["flops"])
        links = [abs(e) for what, e in errors if "flops" not in what]
        flops = [abs(e) for what, e in errors if "flops" in what]
        worst = max(errors, key=lambda e: abs(e[1]))
        row = {
            "seed": seed,
            "workers": len(report["flops"]),
            "groups": len(truth["groups"]),
            "links_worst": round(max(links, default=0), 4),
            "flops_worst": round(max(flops), 4),
            "worst": f"{worst[0]} {worst[1]:+.1%}",
            "warnings": len(report["warnings"]),
            "seconds": round(report["seconds"], 1),
            "load": round(load.foreign, 2),
        }
        bench.rows.append(row)
        bench.say("  ".join(f"{k} {v}" for k, v in row.items()))
        for warning in report["warnings"]:
            bench.say(f"    looks wrong: {warning}")
    worst = [max(r["links_worst"], r["flops_worst"]) for r in bench.rows]
    bench.say(
        f"{sum(w <= 0.1 for w in worst)} of {len(worst)} clusters within 10% everywhere, worst {max(worst):.1%}; "
        f"seconds: median {statistics.median(r['seconds'] for r in bench.rows):.1f}, most {max(r['seconds'] for r in bench.rows):.1f}"
    )
    bench.write(None)


if __name__ == "__main__":
    main()
