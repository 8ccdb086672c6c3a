#!/usr/bin/env python3
"""libFuzzer with ASan and UBSan over every format that motley reads, until so many inputs of each were tried: over several runs.

    ./dev bench fuzz [--inputs 10000000] [--minutes 60] [--jobs 2] [FORMAT ...]

Formats that had least time come first, two minutes at a time, an eighth of them with inputs that may be long (Format::most). The newest fuzz.csv in bench/results is gone on from, which a
change of readers does not begin anew; corpora grow in build-fuzz. A finding ends the study, and stays in build-fuzz/found.
Results: fuzz.csv, a row for each format, and fuzz.txt.
"""
import argparse
import concurrent.futures
import csv
import re
import subprocess
import sys
import time
from pathlib import Path

from study import ROOT, Study

BUILD = ROOT / "build-fuzz"
SLICE = 120  # seconds; libtorch takes two to start


def before():
    """{format: [inputs, seconds]} of the newest results."""
    tables = sorted((ROOT / "bench" / "results").glob("*/fuzz.csv"))
    if not tables:
        return {}
    with open(tables[-1], newline="") as file:
        return {row["format"]: [int(row["inputs"]), float(row["seconds"])] for row in csv.DictReader(file)}


def fuzz(name, most, long):
    """(inputs, seconds, what was found or nothing) of a slice, or of `most` inputs where that is less; `long`: of any length."""
    corpus, found = BUILD / "corpus" / (name + "-long" * long), BUILD / "found"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(exist_ok=True)
    given = [path for path in (ROOT / "tests" / "corpus" / name,) if path.exists()]
    command = [BUILD / "libfuzzer", f"--format={name}", *["--long"] * long, f"-max_total_time={SLICE}", f"-runs={most}", "-entropic=0", "-timeout=60", "-rss_limit_mb=3000", "-print_final_stats=1",
               f"-artifact_prefix={found}/{name}-", corpus, *given]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    stats = dict(re.findall(r"stat::(\w+): *(\d+)", run.stderr))
    done = re.search(r"Done (\d+) runs in (\d+) second", run.stderr)
    inputs = int(stats.get("number_of_executed_units", 0))
    said = "\n".join(line for line in run.stderr.splitlines() if line.startswith((name + ":", "==")))
    problem = "" if run.returncode == 0 or waited(command, run.stderr) else f"{said[:1000]}\n{run.stderr[-3000:]}"
    return inputs, min(float(done.group(2)) if done else SLICE, SLICE), problem  # no more: it was stopped meanwhile


def waited(command, said):
    """Whether an input that took too long takes less when it is run again: this process was stopped, or others had the cores."""
    path = re.search(r"ERROR: libFuzzer: timeout.*Test unit written to (\S+)", said, re.DOTALL)
    if not path:
        return False
    again = subprocess.run([*command[:2], "--long", "-timeout=60", path.group(1)], capture_output=True)
    if again.returncode == 0:
        Path(path.group(1)).unlink()
    return again.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("formats", nargs="*", help="default: all")
    parser.add_argument("--inputs", type=int, default=10**7)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--build", default="build", help=argparse.SUPPRESS)
    parser.add_argument("--out")
    args = parser.parse_args()
    for words in (["cmake", "--preset", "fuzz"], ["cmake", "--build", BUILD, "--target", "libfuzzer"]):
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    study, state, until, problem = Study("fuzz", args, 1), before(), time.monotonic() + 60 * args.minutes, ""
    study.say_machine()
    for name in subprocess.run([BUILD / "libfuzzer"], capture_output=True, text=True, check=True).stdout.split():
        state.setdefault(name, [0, 0.0])
    wanted, running = args.formats or list(state), {}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        while True:
            left = [name for name in wanted if state[name][0] < args.inputs and name not in running.values()]
            while left and len(running) < args.jobs and time.monotonic() < until and not problem:
                name = min(left, key=lambda name: state[name][1])  # seconds: the fast ones come to their end first
                left.remove(name)
                running[pool.submit(fuzz, name, args.inputs - state[name][0], state[name][1] // SLICE % 8 == 7)] = name
            if not running:
                break
            for future in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED).done:
                name = running.pop(future)
                inputs, seconds, wrong = future.result()
                state[name] = [state[name][0] + inputs, state[name][1] + seconds]
                print(f"{name}: {inputs:,} more, {state[name][0]:,} in all{'; FOUND' if wrong else ''}", flush=True)
                problem = problem or (wrong and f"{name}: {wrong}")
            study.rows = [{"format": name, "inputs": inputs, "seconds": round(seconds)} for name, (inputs, seconds) in sorted(state.items())]
            study.write("")
    done = sum(inputs >= args.inputs for inputs, _ in state.values())
    study.say(f"{done} of {len(state)} formats have had {args.inputs:,} inputs or more; {sum(inputs for inputs, _ in state.values()):,} in all, "
              f"in {sum(seconds for _, seconds in state.values()) / 3600:.1f} hours of a core; findings of this run: {1 if problem else 0}")  # fmt: skip
    for name, (inputs, seconds) in sorted(state.items()):
        study.say(f"{name:14} {inputs:12,} inputs  {inputs / max(1, seconds):8,.0f} a second")
    if study.rows:
        study.write("")
    if problem:
        sys.exit(problem)


if __name__ == "__main__":
    main()
