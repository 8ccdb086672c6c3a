"""What the measured benches share: motley's program, the load of other processes, the lines printed, the results' folder."""
import csv
import datetime
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUSY = 0.3  # cores of other processes above which a run is repeated
AWAKE = 2e-4  # seconds that a sleeping thread may take to wake up; beyond, every message takes longer, and the run is repeated


def waking():
    """Mean seconds from a message to a thread that has waited for it for a while, as workers do between messages."""
    here, there = socket.socketpair()
    turns, seconds = 60, 0.0

    def answer():
        for _ in range(turns):
            there.recv(1)
            there.send(b"x")

    other = threading.Thread(target=answer)
    other.start()
    for _ in range(turns):
        time.sleep(0.005)
        begin = time.monotonic()
        here.send(b"x")
        here.recv(1)
        seconds += time.monotonic() - begin
    other.join()
    here.close()
    there.close()
    return seconds / turns / 2


class Load:
    """Cores that processes other than this one's children take, kernel threads and interrupts not counted."""

    def __enter__(self):
        self.begin = self.now()
        return self

    def __exit__(self, *_):
        busy, own, wall = (b - a for a, b in zip(self.begin, self.now()))
        self.foreign = max(0.0, (busy - own) / wall)

    @staticmethod
    def now():
        user, nice, system = map(int, open("/proc/stat").readline().split()[1:4])
        own = sum(sum(resource.getrusage(w)[:2]) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return (user + nice + system) / os.sysconf("SC_CLK_TCK"), own, time.monotonic()


class Study:
    """`name`.csv (of `rows`), `name`.svg and `name`.txt (of what it said) are its results."""

    def __init__(self, name, args, tries):
        self.name, self.args, self.tries = name, args, tries
        self.rows, self.lines = [], []
        self.folder = tempfile.TemporaryDirectory(prefix=f"motley-{name}-")
        self.tmp = pathlib.Path(self.folder.name)

    def say(self, text=""):
        print(text, flush=True)
        self.lines.append(text)

    def say_machine(self):
        machine = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "unknown CPU")
        self.say(f"{machine}, {os.cpu_count()} cores, Linux {os.uname().release}")

    def motley(self, *words):
        """What `motley words...` prints, decoded where --json is among the words."""
        run = subprocess.run([ROOT / self.args.build / "motley", *map(str, words)], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"motley {' '.join(map(str, words))}\n{run.stderr}")
        return json.loads(run.stdout) if "--json" in words else run.stdout

    def quiet(self, *words):
        """As motley(), the quietest of up to `tries` runs, and the foreign load beside it; of more, up to thrice as many, while
        threads wake up late."""
        best, wake = None, waking()
        for turn in range(3 * self.tries):
            with Load() as load:
                result = self.motley(*words)
            before, wake = wake, waking()
            late = max(before, wake) / AWAKE
            bad = max(load.foreign / BUSY, late)
            if best is None or bad < best[0]:
                best = (bad, result, load.foreign)
            if bad <= 1 or (turn + 1 >= self.tries and late <= 1):
                break
        return best[1:]

    def write(self, svg):
        """Writes the results into --out, or bench/results/DATE. Returns the folder."""
        folder = pathlib.Path(self.args.out or ROOT / "bench" / "results" / datetime.date.today().isoformat())
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{self.name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)
        if svg:
            (folder / f"{self.name}.svg").write_text(svg)
        (folder / f"{self.name}.txt").write_text("\n".join(self.lines) + "\n")
        return folder
