#!/usr/bin/env python3
"""Predicted against measured, on emulated clusters: plans of motley, the baselines of the field and PyTorch's own
DistributedDataParallel train the same models on the same workers behind the same links.

    ./dev bench measured [--clusters a,b] [--models a,b] [--runs 3] [--out FOLDER]
    ./dev bench measured --smoke      one cluster, judged on ranking and equality of losses only

Every cluster is calibrated first (motley calibrate --emulate) and planned with that profile. A row of the CSV is one run:
the median over its steps after the first three to fifteen (about five seconds), in which memory is touched for the first time
and the emulation learns how long undisturbed work takes (docs/emulation.md). Runs of all plans of a model alternate; while
other processes take more than 0.3 core a run is repeated, twice at most, and the quietest counts. Written to
bench/results/DATE/: measured.csv, measured.svg (scatter), measured.txt (this output).
"""
import argparse
import itertools
import json
import math
import statistics
import sys
import time

from study import ROOT, Study


CLUSTERS = {
    # name: (link of the root, [(link of the group, [speeds])]); one group: flat. Speeds are shares of a core.
    "pair": ("1 Gbps, latency: 100 us", [(None, [0.6, 0.4])]),
    "pair-slow": ("100 Mbps, latency: 200 us", [(None, [0.8, 0.1])]),
    "four-fast": ("40 Gbps, latency: 10 us", [(None, [0.4, 0.4, 0.1, 0.1])]),
    "two-sites": ("400 Mbps, latency: 200 us", [("4 Gbps, latency: 100 us", [0.4, 0.4]),
                                                ("4 Gbps, latency: 100 us", [0.1, 0.1])]),
    "two-far-sites": ("100 Mbps, latency: 2 ms", [("1 Gbps, latency: 100 us", [0.35, 0.35]),
                                                  ("1 Gbps, latency: 100 us", [0.175, 0.175])]),
    "five": ("200 Mbps, latency: 200 us", [("2 Gbps, latency: 100 us", [0.3, 0.3]),
                                           ("2 Gbps, latency: 100 us", [0.15, 0.15, 0.15])]),
}
SLOW_LINKS = {"pair-slow", "two-sites", "two-far-sites", "five"}

MODELS = {
    "vgg19": ({"width": 16, "image": 32, "classes": 10}, 64),
    "gpt": ({"layers": 2, "hidden": 256, "heads": 4, "seq": 64, "vocab": 512}, 32),
    "bert-moe": ({"layers": 2, "hidden": 192, "heads": 4, "seq": 64, "vocab": 512, "experts": 4, "every": 2}, 32),
    "mlp": ({"layers": 4, "hidden": 1536, "in": 512, "classes": 100}, 192),
}
STRATEGIES = ["motley", "dp-ev", "dp-cp", "tensor-parallel"]
DDP = {"ddp-even": "even", "ddp-proportional": "proportional"}


def spec(model):
    return model + ":" + ",".join(f"{k}={v}" for k, v in MODELS[model][0].items())


def cluster_yaml(name):
    root, groups = CLUSTERS[name]
    speeds = sorted({s for _, g in groups for s in g}, reverse=True)
    lines = [f"name: {name}", f"link: {{bandwidth: {root}}}"]
    devices = lambda g: "[" + ", ".join(f"{{type: core-{s}}}" for s in g) + "]"
    if groups[0][0] is None:
        lines.append("devices: " + devices(groups[0][1]))
    else:
        lines.append("groups:")
        lines += [f"  - {{link: {{bandwidth: {link}}}, devices: {devices(g)}}}" for link, g in groups]
    lines.append("device_types:")
    lines += [f"  - {{name: core-{s}, like: cpu-core, flops: {60 * s:g} GFLOPS, memory: 3 GiB, memory_bandwidth: "
              f"{8 * s:g} GB/s, overhead: {4 / s:g} us, speed: {s}}}" for s in speeds]
    return "\n".join(lines) + "\n"


def warm_steps(step_s):
    """Steps before those that count."""
    return max(3, min(15, round(5 / step_s)))


class Bench(Study):
    def __init__(self, args):
        super().__init__("measured", args, 1 if args.smoke else 3)

    def cluster(self, name):
        file, profile = self.tmp / f"{name}.yaml", self.tmp / f"{name}.profile"
        file.write_text(cluster_yaml(name))
        words = ["calibrate", "--cluster", file, "--emulate", "--json", "-o", profile]
        if self.args.smoke:
            for model in self.args.models:
                words += ["--model", spec(model)]
        result, foreign = self.quiet(*words)
        self.say(f"\n== {name}: {result['emulated']}, calibrated in {result['seconds']:.0f} s, worst R2 of a curve "
                 f"{result['fit_r2']:.3f} (foreign load {foreign:.2f})")
        for model in self.args.models:
            self.model(name, file, profile, model)

    def model(self, cluster, file, profile, model):
        plans = {}
        for strategy in STRATEGIES:
            plan = self.tmp / f"{cluster}-{model}-{strategy}.json"
            words = ["plan", spec(model), "--cluster", file, "--profile", profile, "--batch", MODELS[model][1], "-o", plan]
            if strategy != "motley":
                words += ["--strategy", strategy]
            text = self.motley(*words)
            plans[strategy] = (plan, json.loads(plan.read_text())["predicted"]["step_s"], text)
        measured = {name: [] for name in STRATEGIES + list(DDP)}
        losses = {}
        for run in range(self.args.runs):
            for name, (plan, predicted, _) in plans.items():
                warm = 2 if self.args.smoke else warm_steps(predicted)
                steps = warm + (2 if self.args.smoke else max(3, min(8, round(2 / predicted))))
                report, foreign = self.quiet("run", plan, "--steps", steps, "--emulate", "--json")
                losses[name] = [s["loss"] for s in report["steps"]]
                seconds = statistics.median([s["seconds"] for s in report["steps"]][warm:])
                self.row(cluster, model, name, run, predicted, seconds, foreign, measured)
        if not self.args.smoke:
            jobs = [{"model": model, "args": MODELS[model][0], "batch": MODELS[model][1], "shares": shares, "steps": 3,
                     "warm": warm_steps(plans["dp-cp"][1])} for _ in range(self.args.runs) for shares in DDP.values()]
            path = self.tmp / "jobs.json"
            path.write_text(json.dumps(jobs))
            out, foreign = self.quiet("emulate", "--cluster", file, "--", "/usr/bin/python3", ROOT / "bench" / "measured_ddp.py",
                                      path)
            for line in out.splitlines():
                result = json.loads(line)
                run, which = divmod(result["job"], len(DDP))
                self.row(cluster, model, list(DDP)[which], run, None, statistics.median(result["seconds"]), foreign,
                         measured)
        medians = {name: statistics.median(x) for name, x in measured.items() if x}
        self.say(f"-- {model} ({spec(model)}, batch {MODELS[model][1]})")
        for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
            predicted = plans[name][1] if name in plans else None
            spread = (max(measured[name]) - min(measured[name])) / seconds
            note = f"predicted {1e3 * predicted:8.1f} ms ({100 * (predicted / seconds - 1):+5.1f}%)" if predicted else " " * 31
            self.say(f"   {name:17} {1e3 * seconds:8.1f} ms, spread {100 * spread:4.1f}%   {note}")
        for line in plans["motley"][2].splitlines()[:12]:
            self.say("      " + line)
        self.losses(losses)

    def row(self, cluster, model, plan, run, predicted, measured, foreign, all_measured):
        all_measured[plan].append(measured)
        self.rows.append({"cluster": cluster, "model": model, "plan": plan, "run": run,
                          "predicted_s": "" if predicted is None else f"{predicted:.6f}", "measured_s": f"{measured:.6f}",
                          "foreign_cores": f"{foreign:.2f}"})

    def losses(self, losses):
        """All plans start from the same parameters and see the same data."""
        self.worst_loss = getattr(self, "worst_loss", 0)
        for name, mine in losses.items():
            for a, b in zip(mine, losses["motley"]):
                self.worst_loss = max(self.worst_loss, abs(a - b) / abs(b))

    # ---- Judgement

    def medians(self):
        cases = {}
        for row in self.rows:
            case = cases.setdefault((row["cluster"], row["model"]), {})
            case.setdefault(row["plan"], ([], row["predicted_s"]))[0].append(float(row["measured_s"]))
        return {key: {plan: (statistics.median(m), float(p) if p else None) for plan, (m, p) in case.items()}
                for key, case in cases.items()}

    def judge(self):
        cases = self.medians()
        points = [(p, m) for case in cases.values() for m, p in case.values() if p is not None]
        mean_p, mean_m = (statistics.mean(x) for x in zip(*points))
        cov = sum((p - mean_p) * (m - mean_m) for p, m in points)
        var = math.sqrt(sum((p - mean_p) ** 2 for p, _ in points) * sum((m - mean_m) ** 2 for _, m in points))
        pearson = cov / var if var else 1.0
        errors = [abs(p / m - 1) for p, m in points]
        right = pairs = 0
        wrong = []
        for (cluster, model), case in cases.items():
            known = [(plan, m, p) for plan, (m, p) in case.items() if p is not None]
            for (a, ma, pa), (b, mb, pb) in itertools.combinations(known, 2):
                if max(ma, mb) <= 1.1 * min(ma, mb):
                    continue
                pairs += 1
                right += (ma < mb) == (pa < pb)
                if (ma < mb) != (pa < pb):
                    wrong.append(f"{cluster}/{model}: {a} and {b}")
        behind, gains = [], {}
        for (cluster, model), case in cases.items():
            fastest = min(m for m, _ in case.values())
            if case["motley"][0] > 1.03 * fastest:
                behind.append(f"{cluster}/{model} ({100 * (case['motley'][0] / fastest - 1):.0f}%)")
            ddp = [m for plan, (m, _) in case.items() if plan in DDP]
            if ddp and cluster in SLOW_LINKS:
                gains.setdefault(model, []).append((min(ddp) / case["motley"][0], cluster))
        self.say(f"\n{len(points)} predictions over {len(cases)} cases ({len({c for c, _ in cases})} clusters)")
        self.say(f"Pearson                    {pearson:.4f}   (bar 0.99)")
        self.say(f"mean absolute error        {100 * statistics.mean(errors):.1f}%    (bar 5%; worst {100 * max(errors):.0f}%)")
        self.say(f"pairs ranked right         {right} of {pairs}" + (f"; wrong: {', '.join(wrong)}" if wrong else ""))
        self.say(f"motley fastest within 3%   {len(cases) - len(behind)} of {len(cases)}"
                 + (f"; behind in {', '.join(behind)}" if behind else ""))
        for model, list_ in gains.items():
            best, cluster = max(list_)
            self.say(f"over the best DDP, {model:9} {best:.2f}x on {cluster}; over all slow links "
                     f"{min(list_)[0]:.2f}x to {best:.2f}x")
        self.say(f"losses differ by at most   {self.worst_loss:.1e} relative between motley's plans")
        self.off = 100 * statistics.mean(errors)

    def scatter(self):
        points = [(p, m, model, plan, cluster) for (cluster, model), case in self.medians().items()
                  for plan, (m, p) in case.items() if p is not None]
        low = math.log10(min(min(p, m) for p, m, *_ in points)) - 0.05
        high = math.log10(max(max(p, m) for p, m, *_ in points)) + 0.05
        size, margin = 560, 60
        at = lambda x: margin + (math.log10(x) - low) / (high - low) * size
        colors = dict(zip(MODELS, ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")))
        marks = {"motley": "M -5 0 A 5 5 0 1 0 5 0 A 5 5 0 1 0 -5 0", "dp-ev": "M -5 -5 H 5 V 5 H -5 Z",
                 "dp-cp": "M 0 -6 L 6 5 H -6 Z", "tensor-parallel": "M 0 -6 L 6 0 L 0 6 L -6 0 Z"}
        total = size + 2 * margin
        out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{total + 140}" height="{total}" font-family="sans-serif" '
               f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
               f'<rect x="{margin}" y="{margin}" width="{size}" height="{size}" fill="none" stroke="black"/>',
               f'<line x1="{margin}" y1="{margin + size}" x2="{margin + size}" y2="{margin}" stroke="gray"/>']
        for decade in range(math.floor(low), math.ceil(high) + 1):
            for k in (1, 2, 5):
                x = k * 10.0**decade
                if low <= math.log10(x) <= high:
                    out.append(f'<text x="{at(x):.0f}" y="{margin + size + 18}" text-anchor="middle">{x:g}</text>')
                    out.append(f'<text x="{margin - 6}" y="{total - at(x) + 4:.0f}" text-anchor="end">{x:g}</text>')
        for p, m, model, plan, cluster in points:
            out.append(f'<path transform="translate({at(p):.1f} {total - at(m):.1f})" d="{marks[plan]}" fill="none" '
                       f'stroke="{colors[model]}" stroke-width="1.5"><title>{cluster} {model} {plan}: predicted {p:.3f} s, '
                       f'measured {m:.3f} s</title></path>')
        for i, (model, color) in enumerate(colors.items()):
            out.append(f'<text x="{total - 40}" y="{margin + 20 * i + 10}" fill="{color}">{model}</text>')
        for i, (plan, mark) in enumerate(marks.items()):
            y = margin + 20 * (i + 5) + 6
            out.append(f'<path transform="translate({total - 34} {y})" d="{mark}" fill="none" stroke="black"/>')
            out.append(f'<text x="{total - 20}" y="{y + 4}">{plan}</text>')
        out.append(f'<text x="{margin + size / 2}" y="{total - 16}" text-anchor="middle">predicted seconds a step</text>')
        out.append(f'<text transform="translate(16 {margin + size / 2}) rotate(-90)" text-anchor="middle">measured seconds a '
                   f'step</text></svg>')
        return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", help="folder of the results")
    parser.add_argument("--build", default="build", help="build folder")
    parser.add_argument("--smoke", action="store_true", help="one cluster, two models, judged and not written")
    args = parser.parse_args()
    if args.smoke:
        args.clusters, args.models, args.runs = "two-sites", "mlp,gpt", 1
    args.clusters, args.models = args.clusters.split(","), args.models.split(",")
    for name, known in [(c, CLUSTERS) for c in args.clusters] + [(m, MODELS) for m in args.models]:
        if name not in known:
            parser.error(f"there is no {name}; there are {', '.join(known)}")
    start = time.monotonic()
    bench = Bench(args)
    bench.say_machine()
    for name in args.clusters:
        bench.cluster(name)
        if not args.smoke:
            bench.write(bench.scatter())  # what there is so far
    bench.judge()
    bench.say(f"{(time.monotonic() - start) / 60:.1f} minutes")
    if not args.smoke:
        print(f"written to {bench.write(bench.scatter())}")
        if bench.off > 5:
            sys.exit(f"MISSED: predictions are {bench.off:.1f}% off on average, and may be 5%")
        return
    # Other processes may disturb times; not losses, and not the ranking of plans that are far apart.
    if bench.worst_loss > 1e-5:
        sys.exit(f"losses differ by {bench.worst_loss:.1e}")
    for (cluster, model), case in bench.medians().items():
        for (a, (ma, pa)), (b, (mb, pb)) in itertools.combinations(case.items(), 2):
            if max(ma, mb) > 1.5 * min(ma, mb) and (ma < mb) != (pa < pb):
                sys.exit(f"{cluster} {model}: {a} and {b} are predicted to take {pa:.3f} and {pb:.3f} s, and took {ma:.3f} and "
                         f"{mb:.3f} s")
    print("ranking and losses are as predicted")


if __name__ == "__main__":
    main()
