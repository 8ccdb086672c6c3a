#!/usr/bin/env python3
"""Communication that is priced as hidden against what is hidden, over gloo, in float32 and in bf16, on emulated clusters.

    ./dev bench hidden [--runs 3] [--steps 8] [--cases A,B] [--out FOLDER]

Each cluster is calibrated first, with the model. Data parallelism in proportion to speed, whose gradients travel during the backward pass, and two parts
side by side (`--duplex 2`). Hidden is by how much a step is shorter than one that waits for every message where it stands (`motley run
--overlap off`, in turn with runs that do not; medians). Priced is the same of `motley simulate`, with a backend that hides and with one
that does not. Wanted: within 10%, of what is hidden in all cases together, for each type. Gradients of bf16 are half as large, and gloo
sends them as f32.
"""
import argparse
import json
import statistics
import sys
import time

from study import Study

CLUSTERS = {
    "two": ("link: {bandwidth: 200 Mbps, latency: 500 us}\ndevices: [{type: a, count: 2}]\n", {"a": 0.5}),
    "three": ("link: {bandwidth: 300 Mbps, latency: 500 us}\ndevices: [{type: a, count: 2}, {type: b}]\n", {"a": 0.4, "b": 0.2}),
    "sites": ("link: {bandwidth: 150 Mbps, latency: 1 ms}\ngroups:\n"
              "  - {link: {bandwidth: 2 Gbps, latency: 500 us}, devices: [{type: a, count: 2}]}\n"
              "  - {link: {bandwidth: 2 Gbps, latency: 500 us}, devices: [{type: b, count: 2}]}\n", {"a": 0.3, "b": 0.2}),
}  # fmt: skip
MODELS = {
    "gpt": ("gpt:layers=4,hidden=256,heads=4,seq=64,vocab=256", 24),
    "mlp": ("mlp:layers=6,in=512,hidden=768,classes=16", 768),
}


class Bench(Study):
    def calibrated(self, name, model):
        (tree, speeds), (spec, batch) = CLUSTERS[name], MODELS[model]
        cluster, profile = self.tmp / f"{name}.yaml", self.tmp / f"{name}-{model}.profile"
        types = "".join(f"  - {{name: {t}, like: cpu-core, flops: {60 * s:g} GFLOPS, memory: 3 GiB, memory_bandwidth: {8 * s:g} GB/s, "
                        f"overhead: {4 / s:g} us, speed: {s}}}\n" for t, s in speeds.items())
        cluster.write_text(f"name: {name}\n{tree}device_types:\n{types}")
        result, foreign = self.quiet("calibrate", "--cluster", cluster, "--emulate", "--model", spec, "--batch", batch // 2, "--precision", "bf16",
                                     "--json", "-o", profile)
        beside = ", ".join(f"{d['interference']:.3f}" for d in json.loads(profile.read_text())["devices"])
        self.say(f"{name}, {model}: {result['emulated']}, calibrated in {result['seconds']:.0f} s, interference {beside} (foreign load {foreign:.2f})")
        return cluster, profile

    def simulated(self, plan):
        """Seconds of a step; of one that waits for every message; of communication, the mean over the devices."""
        blocking = self.tmp / "blocking.json"
        text = json.loads(plan.read_text())
        text["cluster"].append("backend: {name: gloo, hides: false}")
        blocking.write_text(json.dumps(text))
        here, waiting = (self.motley("simulate", p, "--json") for p in (plan, blocking))
        return here["step_s"], waiting["step_s"], statistics.mean(d["comm_s"] for d in here["devices"])

    def case(self, cluster, profile, name, model, precision, parts):
        spec, batch = MODELS[model]
        plan = self.tmp / f"{name}-{model}-{precision}-{parts}.json"
        how = ["--duplex", parts] if parts > 1 else ["--engine", "spmd", "--strategy", "dp-cp", "--duplex", "off"]
        self.motley("plan", spec, "--cluster", cluster, "--profile", profile, "--batch", batch, "--precision", precision, *how,
                    "--json", "-o", plan)
        step, waiting, comm = self.simulated(plan)
        priced = waiting - step
        on, off, loads = [], [], []
        for _ in range(self.args.runs):
            for overlap, list_ in (("on", on), ("off", off)):
                report, foreign = self.quiet("run", plan, "--steps", self.args.steps, "--emulate", "--overlap", overlap, "--json")
                list_.append(statistics.median(s["seconds"] for s in report["steps"][3:]))
                loads.append(foreign)
        measured = statistics.median(off) - statistics.median(on)
        self.rows.append({"cluster": name, "model": model, "precision": precision, "parts": parts, "priced_s": round(priced, 5),
                          "measured_s": round(measured, 5), "comm_priced_s": round(comm, 5), "step_priced_s": round(step, 5), "waiting_priced_s": round(waiting, 5),
                          "step_s": round(statistics.median(on), 5), "step_waiting_s": round(statistics.median(off), 5),
                          "load": round(max(loads), 2)})  # fmt: skip
        self.say(f"{name:6} {model:4} {precision:4} {parts} part{'s' if parts > 1 else ' '}  hidden: priced {1e3 * priced:7.1f} ms, "
                 f"measured {1e3 * measured:7.1f} ms, {priced / measured - 1 if measured > 0 else float('inf'):+6.1%}   step: priced "
                 f"{1e3 * step:.0f} ms, measured {1e3 * statistics.median(on):.0f} ms, waiting {1e3 * waiting:.0f} and {1e3 * statistics.median(off):.0f} ms "
                 f"(load {max(loads):.2f})")

    def total(self, precision):
        rows = [r for r in self.rows if r["precision"] == precision]
        priced, measured = (sum(r[k] for r in rows) for k in ("priced_s", "measured_s"))
        off = [abs(r["priced_s"] / r["measured_s"] - 1) if r["measured_s"] > 0 else float("inf") for r in rows]
        error = priced / measured - 1
        self.say(f"{precision}: {1e3 * priced:.0f} ms priced as hidden, {1e3 * measured:.0f} ms hidden, {error:+.1%}; single cases "
                 f"{statistics.median(off):.1%} off in the median, {max(off):.1%} at worst; {sum(o <= 0.1 for o in off)} of {len(off)} "
                 f"within 10%")
        return abs(error) <= 0.1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a run; the first three do not count")
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default="1,2")
    parser.add_argument("--build", default="build")
    parser.add_argument("--out")
    args = parser.parse_args()
    bench = Bench("hidden", args, 2)
    bench.say_machine()
    begun = time.monotonic()
    for name in args.clusters.split(","):
        for model in args.models.split(","):
            cluster, profile = bench.calibrated(name, model)
            for precision in ("fp32", "bf16"):
                for parts in map(int, args.parts.split(",")):
                    bench.case(cluster, profile, name, model, precision, parts)
    good = [bench.total(precision) for precision in ("fp32", "bf16")]
    bench.say(f"{(time.monotonic() - begun) / 60:.1f} minutes")
    bench.write(None)
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
