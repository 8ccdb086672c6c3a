#!/usr/bin/env python3
"""Soundness by running, in full: random programs of the theory equal one device.

    ./dev bench soundness [programs of operators, default 100000] [programs of each model and number of devices, default 30] [seed]

Every operator of the op table is called with hostile numbers (tests/python/operators.py: infinities, zeros, ties, indices that
repeat, ignored targets, pieces without elements), each call by random programs on 2, 3 and 4 workers; then every model of the zoo
at toy size on 2 to 5 workers (soundness_bench.cc), some of its blocks computed again. Results lie in bench/results/.
"""

import csv
import datetime
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("MOTLEY_BUILD", ROOT / "build"))
DEVICES, PROGRAMS, LIMIT = [2, 3, 4], 3, 1e-9


def operators_in_full(total, seed):
    """[(operator, calls, programs, worst error, what of it)]"""
    sys.path[:0] = [str(BUILD / "python"), str(BUILD / "tests" / "python"), str(ROOT / "tests" / "python")]
    import torch

    import operators

    torch.set_num_threads(1)
    names = [op for op in operators.operators() if operators.Call(op, 0).arguments is not None]
    calls = -(-total // (len(names) * len(DEVICES) * PROGRAMS))
    rows = []
    for number, op in enumerate(names):
        worst, what = 0.0, ""
        for i in range(calls):
            try:
                error, text = operators.Call(op, (seed * 1000 + i) * 1000 + number).worst(DEVICES, PROGRAMS, seed + i)
            except Exception as failure:
                error, text = 1e305, f"{type(failure).__name__}: {failure}"
            if not error <= worst:
                worst, what = error, f"call {i}: {text}"
        rows.append((op, calls, calls * len(DEVICES) * PROGRAMS, worst, what if not worst < LIMIT else ""))
        if not worst < LIMIT:
            print(f"WRONG {op}: {worst:.1e} {what}", flush=True)
    return rows


def main():
    total, models, seed = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 100000), (2, 30), (3, 1)))
    subprocess.run(["cmake", "--build", str(BUILD), "--", "soundness_module", "motley_python", "soundness_bench"], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    start = time.time()
    rows = operators_in_full(total, seed)
    programs, wrong = sum(row[2] for row in rows), [row for row in rows if not row[3] < LIMIT]
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines = [
        f"commit {commit}, seed {seed}",
        f"{programs} programs of {len(rows)} operators with hostile numbers, {rows[0][1]} calls each, {time.time() - start:.0f} s:",
        f"  {len(wrong)} operators wrong; worst error of the others {max((r[3] for r in rows if r[3] < LIMIT), default=0):.1e}",
        *(f"  WRONG {op}: {error:.1e} {what}" for op, _, _, error, what in wrong),
    ]
    print("\n".join(lines), flush=True)
    done = subprocess.run([str(next(BUILD.rglob("soundness_bench"))), str(models), str(seed)], capture_output=True, text=True)
    print(done.stdout, flush=True)
    lines += ["models of the zoo, by random programs, every second one with blocks that run again:", *done.stdout.splitlines()]
    folder = ROOT / "bench" / "results" / datetime.date.today().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "soundness.txt").write_text("\n".join(lines) + "\n")
    with open(folder / "soundness.csv", "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["operator", "calls", "programs", "worst relative error"])
        table.writerows((op, calls, count, f"{error:.1e}") for op, calls, count, error, _ in rows)
    return 1 if wrong or done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
