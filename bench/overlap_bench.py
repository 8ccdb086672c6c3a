#!/usr/bin/env python3
"""A pipeline over two sub-clusters and a slow link, for real: four stages of one split, two on either side, train a vision
transformer in the emulated network while the time c that the link takes for a micro-batch grows from nothing to twice the
slowest stage's t_max.

    ./dev bench overlap [--ratios 0,0.5,0.8,1,1.5,2] [--runs 2] [--steps 3] [--out FOLDER]

Two schedules of the same split: the planned one, whose warm-up counts hide the link (HAPT section 4), and 1F1B. Judged: the
planned step time is flat while c <= t_max and rises after; how much faster than 1F1B it is at c = 0.8 t_max; losses against
one device; micro-batches held at once, counted by the workers, against the plan; predicted against measured. The cluster is
calibrated first. A link of c = t_max makes a step about two micro-batches longer, which fill and drain it and which no
schedule hides; a step has 48, so that this is 4% of it. Runs of all cases alternate; the median counts, and while other
processes take more than 0.3 core a run is repeated once. Written to bench/results/DATE/: overlap.csv, overlap.svg,
overlap.txt (this output).
"""
import argparse
import json
import re
import statistics
import sys
import time

from study import Study

LAYERS, HIDDEN, PATCHES, MICRO_BATCH, COUNT, SPEED = 4, 192, 64, 8, 48, 0.25
MODEL = f"vit:layers={LAYERS},hidden={HIDDEN},heads=4,image=32,patch=4,classes=10"
SENT = MICRO_BATCH * (PATCHES + 1) * HIDDEN * 4  # bytes of a micro-batch between stages, each way
STAGES = 4
FAST = 4e9  # bits/s of the link that does not matter


def cluster_yaml(bits, devices=STAGES, speed=SPEED):
    core = (f"device_types:\n  - {{name: core, like: cpu-core, flops: {60 * speed:g} GFLOPS, memory: 3 GiB, memory_bandwidth: "
            f"{8 * speed:g} GB/s, overhead: {4 / speed:g} us, speed: {speed}}}\n")
    if devices == 1:
        return "name: one\nlink: {bandwidth: 4 Gbps, latency: 100 us}\ndevices: [{type: core}]\n" + core
    site = "  - {link: {bandwidth: 4 Gbps, latency: 100 us}, devices: [{type: core, count: 2}]}\n"
    return f"name: two-sites\nlink: {{bandwidth: {bits / 1e6:.3f} Mbps, latency: 200 us}}\ngroups:\n" + 2 * site + core


class Bench(Study):
    def __init__(self, args):
        super().__init__("overlap", args, 2)
        self.problems = []

    def plan(self, name, bits, layers=""):
        """The split on a link of so many bits a second, with its own warm-up counts. Returns the plan and its layers."""
        cluster, plan = self.tmp / f"{name}.yaml", self.tmp / f"{name}.json"
        cluster.write_text(cluster_yaml(bits))
        fixed = f"pp={STAGES},dp=1,tp=1,mbs={MICRO_BATCH},recompute=none,devices={'/'.join(map(str, range(STAGES)))}"
        found = self.motley("plan", MODEL, "--cluster", cluster, "--profile", self.profile, "--batch", MICRO_BATCH * COUNT,
                            "--fix", fixed + (f",layers={layers}" if layers else ""), "--json", "-o", plan)
        return plan, re.search(r"layers=([0-9/]+)", found["candidates"][0]["what"])[1]

    def with_counts(self, plan, name, counts):
        other = json.loads(plan.read_text())
        other["pipeline"]["schedule"] = name
        for stage, count in zip(other["pipeline"]["replicas"][0]["stages"], counts):
            stage["warm_up"] = count
        path = plan.with_name(f"{plan.stem}-{name}.json")
        path.write_text(json.dumps(other))
        return path

    def run(self):
        self.profile = self.tmp / "profile"
        cluster = self.tmp / "fast.yaml"
        cluster.write_text(cluster_yaml(FAST))
        result, foreign = self.quiet("calibrate", "--cluster", cluster, "--emulate", "--model", MODEL, "--batch", MICRO_BATCH,
                                     "--json", "-o", self.profile)
        self.say(f"{result['emulated']}, calibrated in {result['seconds']:.0f} s (foreign load {foreign:.2f})")
        fast, layers = self.plan("fast", FAST)
        busy = [d["busy_s"] for d in self.motley("simulate", fast, "--json")["devices"]]
        t_max = max(busy) / COUNT
        self.say(f"{MODEL}: {STAGES} stages, {COUNT} micro-batches of {MICRO_BATCH}; t_max {1e3 * t_max:.0f} ms, stages "
                 f"{', '.join(f'{b / max(busy):.2f}' for b in busy)} of it; {SENT / 1e3:.0f} kB each way")
        cases = []
        for ratio in self.args.ratios:
            plan = self.plan(f"c{ratio:g}", 8 * SENT / (ratio * t_max), layers)[0] if ratio > 0 else fast
            for schedule in ("planned", "1f1b"):
                path = plan if schedule == "planned" else self.with_counts(plan, "1f1b", range(STAGES, 0, -1))
                content = json.loads(path.read_text())["pipeline"]
                stages = content["replicas"][0]["stages"]
                counts = [stage["warm_up"] for stage in stages]
                # Until its weights' gradients are made, too.
                holds = [min(COUNT, stage["warm_up"] + stage.get("weights_behind", 0)) for stage in stages]
                cases.append({"ratio": ratio, "schedule": schedule, "kind": content["schedule"], "path": path, "counts": counts, "holds": holds,
                              "predicted": self.motley("simulate", path, "--json")["step_s"], "measured": [], "foreign": []})
        losses = self.one_device()
        worst = 0
        for _ in range(self.args.runs):
            for case in cases:
                report, foreign = self.quiet("run", case["path"], "--steps", self.args.steps, "--emulate", "--json")
                case["measured"].append(report["median_step_s"])
                case["foreign"].append(foreign)
                case["held"] = report["in_flight"]
                for mine, one in zip(report["steps"], losses):
                    worst = max(worst, abs(mine["loss"] - one) / abs(one))
        self.report(cases, t_max, worst)

    def one_device(self):
        cluster, plan = self.tmp / "one.yaml", self.tmp / "one.json"
        cluster.write_text(cluster_yaml(FAST, devices=1, speed=1))
        self.motley("plan", MODEL, "--cluster", cluster, "--batch", MICRO_BATCH * COUNT, "--engine", "spmd", "--json", "-o", plan)
        return [s["loss"] for s in self.motley("run", plan, "--steps", self.args.steps, "--json")["steps"]]

    def bar(self, text, reached):
        self.say(f"{text:78} {'reached' if reached else 'MISSED'}")
        if not reached:
            self.problems.append(text)

    def report(self, cases, t_max, worst):
        self.say(f"\n{'c/t_max':>7}  {'schedule':18}  {'warm-up':>10}  {'held':>10}  {'predicted':>9}  {'measured':>9}  "
                 f"{'error':>6}  spread")
        for case in cases:
            case["median"] = statistics.median(case["measured"])
            case["error"] = case["predicted"] / case["median"] - 1
            dashed = lambda counts: ",".join(map(str, counts))
            self.say(f"{case['ratio']:7.2f}  {case['schedule'] + ' (' + case['kind'] + ')':18}  {dashed(case['counts']):>10}  "
                     f"{dashed(case['held']):>10}  {1e3 * case['predicted']:6.0f} ms  {1e3 * case['median']:6.0f} ms  "
                     f"{100 * case['error']:+5.1f}%  {100 * (max(case['measured']) / min(case['measured']) - 1):.1f}%")
            for run, measured in enumerate(case["measured"]):
                self.rows.append({"c_over_t_max": case["ratio"], "t_max_s": f"{t_max:.6f}", "schedule": case["schedule"],
                                  "kind": case["kind"], "warm_up": dashed(case["counts"]), "held": dashed(case["held"]),
                                  "run": run, "predicted_s": f"{case['predicted']:.6f}", "measured_s": f"{measured:.6f}",
                                  "foreign_cores": f"{case['foreign'][run]:.2f}"})
        of = lambda schedule: {c["ratio"]: c for c in cases if c["schedule"] == schedule}
        planned, plain = of("planned"), of("1f1b")
        self.say()
        flat = [c["median"] for r, c in planned.items() if r <= 1]
        self.bar(f"flat while c <= t_max: spread {100 * (max(flat) / min(flat) - 1):.1f}% (bar 10%)",
                 max(flat) <= 1.1 * min(flat))
        beyond = [planned[r]["median"] for r in sorted(planned) if r >= 1]
        if len(beyond) > 1:
            self.bar(f"rising after: {beyond[-1] / beyond[0]:.2f}x from c = t_max to the slowest link",
                     all(a < b for a, b in zip(beyond, beyond[1:])))
        near = min(planned, key=lambda r: abs(r - 0.8))
        gain = plain[near]["median"] / planned[near]["median"]
        self.bar(f"over 1F1B with the same split at c = {near:g} t_max: {gain:.2f}x (bar 1.3x)", gain >= 1.3)
        self.bar(f"losses within {worst:.1e} of one device's (bar 1e-4)", worst <= 1e-4)
        self.bar("micro-batches held at once as planned", all(c["holds"] == c["held"] for c in cases))
        errors = [abs(c["error"]) for c in cases]
        self.bar(f"predicted within 10%: worst {100 * max(errors):.1f}%, mean {100 * statistics.mean(errors):.1f}%",
                 max(errors) <= 0.1)
        self.cases = cases

    def plot(self):
        width, height, margin = 560, 380, 60
        right = max(max(c["ratio"] for c in self.cases), 1)
        top = 1.05 * max(max(c["median"], c["predicted"]) for c in self.cases)
        x = lambda ratio: margin + ratio / right * width
        y = lambda seconds: margin + height - seconds / top * height
        out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2 * margin}" height="{height + 2 * margin}" '
               f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
               f'<rect x="{margin}" y="{margin}" width="{width}" height="{height}" fill="none" stroke="black"/>',
               f'<line x1="{x(1):.1f}" y1="{margin}" x2="{x(1):.1f}" y2="{margin + height}" stroke="gray"/>']
        for i, (schedule, color) in enumerate((("planned", "#1f77b4"), ("1f1b", "#ff7f0e"))):
            mine = sorted((c for c in self.cases if c["schedule"] == schedule), key=lambda c: c["ratio"])
            line = " ".join(f"{x(c['ratio']):.1f},{y(c['predicted']):.1f}" for c in mine)
            out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-dasharray="4 3"/>')
            out += [f'<circle cx="{x(c["ratio"]):.1f}" cy="{y(m):.1f}" r="4" fill="none" stroke="{color}"/>'
                    for c in mine for m in c["measured"]]
            out.append(f'<text x="{margin + 12}" y="{margin + height - 34 + 18 * i}" fill="{color}">{schedule}: circles measured, '
                       f'dashes predicted</text>')
        for k in range(5):
            out.append(f'<text x="{x(right * k / 4):.0f}" y="{margin + height + 18}" text-anchor="middle">{right * k / 4:g}</text>')
            out.append(f'<text x="{margin - 6}" y="{y(top * k / 4) + 4:.0f}" text-anchor="end">{top * k / 4:.2f}</text>')
        out.append(f'<text x="{margin + width / 2}" y="{height + 2 * margin - 12}" text-anchor="middle">seconds of the slow link a '
                   f'micro-batch, over t_max</text>')
        out.append(f'<text transform="translate(14 {margin + height / 2}) rotate(-90)" text-anchor="middle">seconds a step'
                   f'</text></svg>')
        return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", default="0,0.5,0.8,1,1.5,2", help="c / t_max")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of a run; the first does not count")
    parser.add_argument("--out", help="folder of the results")
    parser.add_argument("--build", default="build", help="build folder")
    args = parser.parse_args()
    try:
        args.ratios = sorted({float(r) for r in args.ratios.split(",")})
    except ValueError:
        parser.error(f"--ratios {args.ratios}: give numbers, such as 0,0.8,2")
    if args.ratios[0] < 0 or args.runs < 1 or args.steps < 2:
        parser.error("give ratios of at least 0, at least one run, and at least two steps")
    start = time.monotonic()
    bench = Bench(args)
    bench.say_machine()
    bench.run()
    bench.say(f"{(time.monotonic() - start) / 60:.1f} minutes")
    print(f"written to {bench.write(bench.plot())}")
    sys.exit(1 if bench.problems else 0)


if __name__ == "__main__":
    main()
