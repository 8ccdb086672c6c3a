"""Runs of `motley run --elastic` with seeded faults: they end, with the losses of one device in double precision, and leave nothing behind.

    python3 tests/elastic_faults.py BUILD --cases 12 --seed 1

Where the system allows it, in namespaces of its own: only there are networks cut and disks filled, and what is left behind is this run's.
"""

import argparse
import collections
import csv
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

MODEL = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=256"
STEPS, REFERENCE = 10, 40  # of a run; of one device
EVERY = 3  # steps from one checkpoint to the next
HANG = 2.0  # seconds of --hang-timeout
CUT = 5.0  # until a worker is known to be cut off: at least 3, and 2 for others to say so too
PLANS_ANEW = 2.8  # until a process that plans is taken to hang
TOLERANCE = 1e-9  # of losses
CLUSTER = """name: {name}
link: {{bandwidth: 400 Mbps, latency: 100 us}}
groups:
  - {{name: fast, link: {{bandwidth: 4 Gbps, latency: 20 us}}, devices: [{{type: fast, count: {fast}}}]}}
  - {{name: slow, link: {{bandwidth: 4 Gbps, latency: 20 us}}, devices: [{{type: slow, count: {slow}}}]}}
"""
ALONE = "name: alone\nlink: {bandwidth: 1 Gbps}\ndevices: [{type: fast}]\n"
TYPES = """device_types:
  - {name: fast, like: cpu-core, flops: 200 MFLOPS, memory: 2 GiB, memory_bandwidth: 300 MB/s, overhead: 2 us, speed: 0.1}
  - {name: slow, like: cpu-core, flops: 90 MFLOPS, memory: 1 GiB, memory_bandwidth: 150 MB/s, overhead: 2 us, speed: 0.05}
"""
DEVICES = {4: (2, 2), 5: (3, 2), 6: (3, 3)}  # workers: fast and slow ones
PLANS = {
    "spmd": ["--engine", "spmd"],
    "pipeline": ["--engine", "pipeline"],
    "grid": ["--engine", "grid"],
    "zero": ["--strategy", "zero"],
}
TWICE = {"twice": ["--strategy", "zero", "--redundancy", "1"]}  # with --twice, alone
LOSES = tuple(f"MOTLEY_FAULTS: {action} " for action in ("kill", "stop", "hang", "cut", "part"))  # lines of those who are lost
POINTS = {"rendezvous": 1, "step": STEPS, "collective": 150, "boundary": STEPS, "checkpoint": STEPS}
RETURN, RETURNS = 0.5, 30  # seconds until a lost device is tried again; steps of such runs
KINDS = ["worker"] * 5 + ["replanning", "network", "network", "disk", "launcher", "return", "return"]
COLUMNS = ["seed", "kind", "plan", "workers", "faults", "options", "wrong", "losses_of_workers", "returns", "beyond_detection_s", "planning_s", "steps_again"]


def inside(words):
    """This program again in namespaces of its own, or nothing where that is not allowed."""
    namespaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    if os.getuid() != 0:
        namespaces += ["--user", "--map-root-user"]
    may = "mount -t tmpfs -o size=256m none /dev/shm && ip link set lo up"
    if not shutil.which("unshare") or subprocess.run([*namespaces, "sh", "-c", may], capture_output=True).returncode != 0:
        return
    os.execvp("unshare", [*namespaces, "sh", "-c", f'{may} && exec "$@"', "sh", sys.executable, *words, "--inside"])


class Case:
    """What a seed stands for."""

    def __init__(self, seed, plans, kinds, points):
        rng = random.Random(seed)
        self.seed, self.kind, self.plan = seed, rng.choice(kinds), rng.choice(sorted(plans))
        self.workers, self.rng, self.points = rng.choice(sorted(DEVICES)), rng, points
        self.faults, self.losses, self.waits, self.options = [], 0, [], []  # waits: seconds to notice, of each loss
        self.disk = ""  # checkpoint or memory
        self.checkpoint = self.kind in ("disk", "launcher") or rng.random() < 0.5
        self.steps = RETURNS if self.kind == "return" else STEPS
        kinds = {"worker": self.of_workers, "replanning": self.of_planning, "network": self.of_network, "disk": self.of_disk, "return": self.of_return}
        kinds.get(self.kind, lambda: None)()

    def lose(self, action, point, count, attempt):
        """A worker at a point of an attempt. Where the plan leaves it out, nothing happens."""
        rank = self.rng.randrange(self.workers - attempt)
        self.faults.append(f"{action}:{point}:{rank}:{count}@{attempt}")
        self.losses += action != "delay"
        if action != "delay":
            self.waits.append({"kill": 0.0, "stop": HANG, "hang": HANG}.get(action, CUT) + (HANG if point == "rendezvous" and action != "kill" else 0))

    def some_point(self, attempt, points=None):
        point = self.rng.choice(sorted(points or self.points))
        if attempt and point == "collective":
            point = "step"
        return point, self.rng.randint(1, self.points[point] if attempt == 0 else min(2, self.points[point]))

    def of_workers(self):
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            action = self.rng.choice(["kill", "kill", "stop", *(["hang"] if self.seed > 500 else []), "delay"])  # seeds stay what they were
            self.lose(action, *self.some_point(self.losses), self.losses)

    def of_planning(self):
        """Whoever plans for what is left is lost too."""
        self.lose("kill", *self.some_point(0), 0)
        for _ in range(self.rng.randint(1, 3)):
            action = self.rng.choice(["kill", "kill", "stop"])
            self.faults.append(f"{action}:replanning:-1:{self.rng.randint(1, self.workers + 1)}@0")
            self.waits[0] += PLANS_ANEW if action == "stop" else 0

    def of_network(self):
        self.options.append("--emulate")
        action = self.rng.choice(["cut", "part"])
        points = [p for p in self.points if action == "cut" or p != "rendezvous"]
        for _ in range(self.rng.choice([1, 1, 2]) if action == "cut" else 1):
            self.lose(action, *self.some_point(0, points), 0)

    def of_return(self):
        """Lost devices come back; some are lost once more. Emulated, so that steps are long enough for that."""
        self.options.append("--emulate")
        for number in range(self.rng.choice([1, 1, 2])):
            action = self.rng.choice(["kill", "kill", "stop"])
            self.lose(action, *(self.some_point(0) if number == 0 else (self.rng.choice(["rendezvous", "step"]), 1)), 2 * number)

    def of_disk(self):
        """Full for a while; a worker is lost meanwhile, or nobody."""
        self.disk = self.rng.choice(["checkpoint", "memory"])
        full = self.rng.randint(1, 4)
        self.faults.append(f"fill:{self.rng.choice(['step', 'boundary'])}:{self.rng.randrange(self.workers)}:{full}@0")
        if self.rng.random() < 0.5:
            self.faults.append(f"free:step:0:{self.rng.randint(full + 2, STEPS - 2)}@0")
        else:
            self.lose("kill", "step", self.rng.randint(full + 1, STEPS - 4), 0)
            self.faults.append("free:step:0:2@1")

    def text(self):
        return ";".join(self.faults) or "kill of the launcher"


class Run:
    """A run and when it said what."""

    def __init__(self, command, environment):
        self.lines, self.out = [], tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdout=self.out, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)
        self.begun = time.monotonic()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            self.lines.append((time.monotonic() - self.begun, line.rstrip()))

    def wait(self, seconds):
        """The exit code; None: it did not end, and is killed."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        self.reader.join(5)
        return code

    def steps(self):
        """[(when, step)] that it told of; behind which of them it went on without a worker: [(when, position, seconds of planning, when it was lost or
        nothing)]; [seconds of planning] of returns"""
        steps, losses, returns, lost = [], [], [], None
        for when, line in self.lines:
            if line.startswith("step "):
                steps.append((when, int(line.split()[1])))
            elif "; going on without device" in line:
                losses.append((when, len(steps), planning_of(line), lost))
                lost = None
            elif line.startswith(LOSES):
                lost = when
            elif "going on with device" in line:
                returns.append(planning_of(line))
        return steps, losses, returns

    def losses(self):
        self.out.seek(0)
        return [(s["step"], s["loss"]) for s in json.loads(self.out.read())["steps"]]


def planning_of(line):
    """Seconds that a line ends with."""
    number, unit = line.split(" in ")[-1].split()[:2]
    return float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}.get(unit, 60)


class Faults:
    def __init__(self, build, folder, twice, alone):
        self.folder, self.alone = folder, alone  # alone: in namespaces of its own
        self.motley = os.path.join(build, "motley")
        self.words, self.twice = TWICE if twice else PLANS, twice
        self.points = {**POINTS, "second": 2 * STEPS} if twice else POINTS
        self.kinds = [k for k in KINDS if alone or k not in ("network", "disk")]
        self.temporary = os.path.join(folder, "tmp")
        os.mkdir(self.temporary)
        self.graph = os.path.join(folder, "gpt.json")
        self.plans, self.normal = {}, {}
        self.call("capture", MODEL, "--batch", "20", "--dtype", "f64", "-o", self.graph)
        self.expected = dict(self.finished(self.plan_on("alone", ALONE, []), REFERENCE).losses())

    def environment(self, **more):
        return dict(os.environ, TMPDIR=self.temporary, **more)

    def call(self, *words):
        run = subprocess.run([self.motley, *words], capture_output=True, text=True, env=self.environment())
        if run.returncode != 0:
            sys.exit(f"motley {' '.join(words)}: {run.stderr}")

    def plan_on(self, name, cluster, words):
        path = os.path.join(self.folder, name)
        with open(path + ".yaml", "w") as file:
            file.write(cluster + TYPES)
        self.call("plan", self.graph, "--cluster", path + ".yaml", "--batch", "20", *words, "-o", path + ".json")
        with open(path + ".json") as file:
            return path + ".json" if json.load(file) else ""

    def finished(self, plan, steps, *words):
        run = Run([self.motley, "run", plan, "--steps", str(steps), "--json", *words], self.environment())
        if run.wait(300) != 0:
            sys.exit(f"motley run {plan}: {run.lines[-1:]}")
        return run

    def plan(self, case):
        key = case.plan, case.workers
        if key not in self.plans:
            fast, slow = DEVICES[case.workers]
            name = f"{case.plan}-{case.workers}"
            self.plans[key] = self.plan_on(name, CLUSTER.format(name=name, fast=fast, slow=slow), self.words[case.plan])
        return self.plans[key]

    def until_first_step(self, case):
        """Seconds of a run without faults until its first step."""
        key = case.plan, case.workers, *case.options
        if key not in self.normal:
            self.normal[key] = self.finished(self.plan(case), 2, *case.options).steps()[0][0][0]
        return self.normal[key]

    def case(self, seed):
        """A row of the table."""
        case = Case(seed, self.words, self.kinds, self.points)
        row = dict.fromkeys(COLUMNS, "")
        saved = os.path.join(self.folder, "saved")
        shutil.rmtree(saved, ignore_errors=True)
        os.mkdir(saved)
        normal = self.until_first_step(case)
        if case.disk == "checkpoint":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", saved], check=True)
        try:
            wrong = self.of_launcher(case, saved) if case.kind == "launcher" else self.of_faults(case, saved, normal, row)
        finally:
            if case.disk == "checkpoint":
                subprocess.run(["umount", "-l", saved], check=True)
        for path in (os.path.join(saved, "filler"), "/dev/shm/filler"):
            if os.path.exists(path):
                os.remove(path)
        left = self.left_behind()
        if left and not wrong:
            wrong = f"left behind: {', '.join(left)}"
        row.update(seed=seed, kind=case.kind, plan=case.plan, workers=case.workers, faults=case.text(), wrong=wrong, losses_of_workers=case.losses,
                   options=" ".join([*case.options, *(["--checkpoint"] if case.checkpoint else []), *([f"full {case.disk}"] if case.disk else [])]))  # fmt: skip
        return row

    def command(self, case, saved, steps):
        words = [self.motley, "run", self.plan(case), "--steps", str(steps), "--elastic", "--hang-timeout", str(HANG), "--json", *case.options]
        words += ["--return-after", str(RETURN)] if case.kind == "return" else []
        return words + (["--checkpoint", saved, "--checkpoint-every", str(EVERY)] if case.checkpoint else [])

    def of_faults(self, case, saved, normal, row):
        more = {"MOTLEY_FAULTS": case.text()}
        if case.disk:
            more["MOTLEY_FAULT_DISK"] = saved if case.disk == "checkpoint" else "/dev/shm"
        run = Run(self.command(case, saved, case.steps), self.environment(**more))
        code = run.wait(120)
        if code is None:
            return "it hung"
        if code != 0:
            return f"code {code}: {run.lines[-1][1] if run.lines else ''}"
        steps, losses, returns = run.steps()
        beyond = []
        for number, (when, position, _, lost) in enumerate(losses):
            # A worker behind another in the same attempt is lost when the next begins.
            began = lost or (losses[number - 1][0] if number else normal)
            ends = [at for at, _ in steps[position:]] or [when]
            if number + 1 < len(losses) and losses[number + 1][1] == position:
                ends = [losses[number + 1][3] or losses[number + 1][0]]  # until the next one is lost nothing is late
            beyond.append(ends[0] - began - (case.waits[min(number, len(case.waits) - 1)] if case.waits else 0))
        again = len(steps) - len({step for _, step in steps})
        if beyond:
            row.update(beyond_detection_s=f"{max(0.0, *beyond):.2f}", planning_s=f"{max([p for *_, p, _ in losses] + returns):.3f}")
        row.update(steps_again=again, returns=len(returns))
        wrong = self.wrong(run.losses(), range(case.steps))
        if not wrong and case.kind == "return" and losses and not returns:
            wrong = "nobody came back"
        if not wrong and len(losses) > case.losses:
            wrong = f"{len(losses)} workers were lost"
        if not wrong and self.twice and len(losses) == 1 and not case.disk and again > 1:
            wrong = f"{again} steps were made again, of which a second worker had all"
        if not wrong and case.checkpoint and not case.disk and again > (2 * EVERY + 1) * max(1, len(losses)):
            wrong = f"{again} steps were made again"
        return wrong

    def of_launcher(self, case, saved):
        """Killed at any moment, and started again: from a checkpoint of its own, or anew."""
        run = Run(self.command(case, saved, REFERENCE - 5), self.environment())
        run.wait_s = case.rng.uniform(0.2, 2) * (1 + self.until_first_step(case))
        try:
            run.process.wait(run.wait_s)
        except subprocess.TimeoutExpired:
            run.process.kill()
        run.wait(10)
        again = Run(self.command(case, saved, 4), self.environment())
        code = again.wait(120)
        if code != 0:
            return f"started again: {'it hung' if code is None else again.lines[-1:]}"
        got = again.losses()
        return self.wrong(got, range(got[0][0], got[0][0] + 4))

    def wrong(self, got, steps):
        if [step for step, _ in got] != list(steps):
            return f"steps {[step for step, _ in got]}"
        worst = max(abs(loss - self.expected[step]) / self.expected[step] for step, loss in got)
        return "" if worst <= TOLERANCE else f"a loss is off by {worst:.1e}"

    def left_behind(self):
        """Processes, files in memory and elsewhere, ports and network namespaces, two seconds after the end."""
        until = time.monotonic() + 2
        while True:
            left = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(f"motley-{os.getuid()}-") or self.alone]
            left += [os.path.join(self.temporary, name) for name in os.listdir(self.temporary)]
            left += [f"process {p}" for p in os.listdir("/proc") if p.isdigit() and self.ours(p)]
            if self.alone:
                with open("/proc/net/tcp") as file:
                    left += [f"port {row.split()[1]}" for row in file.readlines()[1:] if row.split()[3] == "0A"]
                own = {os.readlink(f"/proc/{p}/ns/net") for p in os.listdir("/proc") if p.isdigit() and os.path.exists(f"/proc/{p}/ns/net")}
                left += [f"network namespace {name}" for name in own - {os.readlink("/proc/self/ns/net")}]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.05)

    def ours(self, process):
        """Another process than this one: of this run's folder, or any where no others can be seen."""
        if int(process) == os.getpid():
            return False
        try:
            if self.alone and os.getpid() == 1:
                os.waitpid(int(process), os.WNOHANG)  # orphans are this one's children
                return os.path.exists(f"/proc/{process}")
        except OSError:
            pass
        try:
            with open(f"/proc/{process}/cmdline") as file:
                return self.folder in file.read()
        except OSError:
            return False


def summary(rows):
    """What was right, by what was done and by plans."""
    lines = []
    for column in ("kind", "plan", "workers"):
        for value in sorted({str(row[column]) for row in rows}):
            some = [row for row in rows if str(row[column]) == value]
            lines.append(f"{column + ' ' + value:20} {line_of(some)}")
    return [*lines, f"{'all':20} {line_of(rows)}"]


def line_of(rows):
    beyond = sorted(float(row["beyond_detection_s"]) for row in rows if row["beyond_detection_s"] != "")
    planning = sorted(float(row["planning_s"]) for row in rows if row["planning_s"] != "")
    again = [int(row["steps_again"]) for row in rows if row["steps_again"] != ""]
    text = f"{sum(not row['wrong'] for row in rows):3} of {len(rows):3} right"
    if beyond:
        late, slow = sum(s > 5 for s in beyond), sum(s > 1 for s in planning)
        text += f"; next step {beyond[len(beyond) // 2]:.1f} s beyond detection in the median, worst {beyond[-1]:.1f}, {late} of {len(beyond)} above 5"
        text += f"; planning worst {planning[-1]:.2f} s, {slow} above 1"
    counts = collections.Counter(again)
    return text + (f"; steps made again {dict(sorted(counts.items()))}" if again else "")


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build")
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", help="file of rows: cases in it are not run again, others are added")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after so long")
    parser.add_argument("--strict", action="store_true", help="fail, too, if going on takes more than 5 s: on a machine that does nothing else")
    parser.add_argument("--twice", action="store_true", help="of a plan that keeps what is cut twice, alone")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = parsed()
    if not args.inside:
        inside(sys.argv)
        print("no namespaces of its own are allowed here: networks are not cut and disks not filled")
    rows, until = [], time.monotonic() + 60 * args.minutes
    if args.table and os.path.exists(args.table):
        with open(args.table, newline="") as file:
            rows = list(csv.DictReader(file))
    known = {int(row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory(prefix="motley-faults-") as folder:
        faults = Faults(args.build, folder, args.twice, args.inside)
        for seed in range(args.seed, args.seed + args.cases):
            if seed in known or time.monotonic() > until:
                continue
            row = faults.case(seed)
            rows.append(row)
            print(f"{seed}  {row['plan']} on {row['workers']}  {row['faults']}  {row['options']}  {row['beyond_detection_s'] or '-'} s, "
                  f"{row['steps_again']} again{'  WRONG: ' + row['wrong'] if row['wrong'] else ''}", flush=True)  # fmt: skip
            if args.table:
                new = not os.path.exists(args.table)
                with open(args.table, "a", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    if new:
                        writer.writeheader()
                    writer.writerow(row)
    print("\n".join(summary(rows)))
    late = sum(float(row["beyond_detection_s"] or 0) > 5 for row in rows)
    sys.exit(1 if any(row["wrong"] for row in rows) or (late and args.strict) else 0)


if __name__ == "__main__":
    main()
