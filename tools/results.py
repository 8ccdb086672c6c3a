#!/usr/bin/env python3
"""Which commit the results in bench/results/ come from (commits.tsv beside them), and what has changed since.

    results.py stale [NAME ...]   a line for each study whose results are older than the code behind them
    results.py record NAME        the results of this study, as they lie there now, come from the current commit
    results.py check              exit code 1 if a result has no commit, or one that the history does not have
    results.py targets            the table of docs/export.md from the last results of the study export; check compares them
    results.py errors             how far predictions are off in all studies that measured, and their mean
"""

import csv
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "bench" / "results"
TABLE = FOLDER / "commits.tsv"


def git(*words):
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


def table():
    """{study: commit}"""
    rows = [line.split("\t") for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    return {name: commit for name, commit in rows}


def study_of(file):
    return file.stem if file.stem in table() else file.stem.split("-")[0]


def stale(names):
    for name, commit in table().items():
        if names and name not in names:
            continue
        code = ["src", "clusters", "bench/trials", "bench/study.py", *(str(p) for p in ROOT.glob(f"bench/{name}_*"))]
        changes = git("rev-list", "--count", f"{commit}..HEAD", "--", *code)
        count = int(changes.stdout) if changes.returncode == 0 else 0
        if count > 0:
            print(f"bench: the committed results of {name} come from {commit}; {count} commits to the code behind them since",
                  file=sys.stderr)


def record(name):
    commit = git("rev-parse", "--short", "HEAD").stdout.strip()
    rows = dict(table(), **{name: commit})
    text = "# study\tcommit whose code made its results; written by tools/results.py record\n"
    TABLE.write_text(text + "".join(f"{key}\t{rows[key]}\n" for key in sorted(rows)))


def check():
    wrong = []
    rows = table()
    for file in sorted(FOLDER.rglob("*.*")):
        if file != TABLE and study_of(file) not in rows:
            wrong.append(f"{file.relative_to(ROOT)}: commits.tsv has no line for {study_of(file)}; ./dev bench writes it")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "false":
        for name, commit in rows.items():
            if git("merge-base", "--is-ancestor", commit, "HEAD").returncode != 0:
                wrong.append(f"bench/results/commits.tsv: {name}: the history has no {commit}; run the study again")
    if (ROOT / "docs" / "export.md").read_text().find(targets()) < 0:
        wrong.append("docs/export.md: its table of targets is not that of the last results; put in what tools/results.py targets prints")
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


def targets():
    """Milliseconds of a step: of any plan, and for each target of the best that it can say and (of its own way)."""
    files = sorted(FOLDER.rglob("export.csv"))
    if not files:
        return ""
    with open(files[-1], newline="") as file:
        rows = list(csv.DictReader(file))
    names = list(dict.fromkeys(row["target"] for row in rows))
    shown = lambda seconds: f"{float(seconds) * 1000:.0f}" if seconds else "-"  # noqa: E731
    lines = ["| cluster, model | any plan | " + " | ".join(names) + " |", "| --- " * (len(names) + 2) + "|"]
    for case in dict.fromkeys((row["cluster"], row["model"]) for row in rows):
        own = {row["target"]: row for row in rows if (row["cluster"], row["model"]) == case}
        cells = [f"{shown(row['for_s'])} ({shown(row['default_s'])})" if row["for_s"] else "-" for row in own.values()]
        lines.append(f"| {case[0]}, {case[1].split(':')[0]} | {shown(next(iter(own.values()))['free_s'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# Columns of what was predicted and measured: seconds, or how many times faster.
PAIRS = [("predicted_s", "measured_s"), ("step_priced_s", "step_s"), ("waiting_priced_s", "step_waiting_s"),
         ("padded_predicted_s", "padded_s"), ("grouped_predicted_s", "grouped_s"),
         ("predicted_speedup", "speedup")]  # fmt: skip


def errors():
    """Of every study whose table has columns of PAIRS: the mean of |predicted / median measured - 1| over its cases."""
    every = []
    for file in sorted(FOLDER.rglob("*.csv")):
        with open(file, newline="") as table_file:
            rows = list(csv.DictReader(table_file))
        off = []
        for predicted, measured in PAIRS:
            cases = {}
            for row in rows:
                if row.get(predicted) and row.get(measured):
                    of_run = ("run", measured, "foreign_cores")
                    cases.setdefault(tuple(v for k, v in row.items() if k not in of_run), []).append(row)
            off += [abs(float(runs[0][predicted]) / statistics.median(float(r[measured]) for r in runs) - 1) for runs in cases.values()]
        if not off:
            continue
        every += off
        print(f"{str(file.relative_to(FOLDER)):28} {len(off):4} cases  {100 * statistics.mean(off):5.1f}% on average, {100 * max(off):3.0f}% at worst")
    print(f"{'all':28} {len(every):4} cases  {100 * statistics.mean(every):5.1f}% on average, {100 * max(every):3.0f}% at worst")


if __name__ == "__main__":
    if sys.argv[1:2] == ["stale"]:
        stale(sys.argv[2:])
    elif len(sys.argv) == 3 and sys.argv[1] == "record":
        record(sys.argv[2])
    elif sys.argv[1:] == ["check"]:
        sys.exit(check())
    elif sys.argv[1:] == ["targets"]:
        print(targets(), end="")
    elif sys.argv[1:] == ["errors"]:
        errors()
    else:
        sys.exit(__doc__)
