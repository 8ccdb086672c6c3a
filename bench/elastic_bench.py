#!/usr/bin/env python3
"""Seeded faults in runs of `motley run --elastic`: one program, pipelines, grids and ZeRO on 4 to 6 workers.

    ./dev bench elastic [--cases 500] [--seed 1] [--minutes M] [--out FOLDER]

tests/elastic_faults.py says what a case is, and what is checked behind each. Cases that the table has are not run again: a study that was
stopped goes on. Times mean something on a machine that does nothing else. Results: elastic.csv, a row for each case, and elastic.txt.
"""
import argparse
import csv
import datetime
import pathlib
import subprocess
import sys

from study import ROOT

sys.path.insert(0, str(ROOT / "tests"))
import elastic_faults  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out")
    args = parser.parse_args()
    folder = pathlib.Path(args.out or ROOT / "bench" / "results" / datetime.date.today().isoformat())
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "elastic.csv"
    run = subprocess.run([sys.executable, ROOT / "tests" / "elastic_faults.py", ROOT / args.build, "--cases", str(args.cases), "--seed", str(args.seed),
                          "--minutes", str(args.minutes), "--table", table])  # fmt: skip
    if table.exists():
        with open(table, newline="") as file:
            lines = elastic_faults.summary(list(csv.DictReader(file)))
        (folder / "elastic.txt").write_text("\n".join(lines) + "\n")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
