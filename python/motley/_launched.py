"""Which device each worker of an elastic run is, in every attempt of a launch, and the plans for those that are there."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing import util

from . import _motley
from ._errors import NoPlanError, UserError, warn
from ._plan import Plan
from ._plan import plan as make_plan

_PLAN_S = 0.8  # that a plan for what is left may take: with its beginning and end, a second


def for_devices(options, count):
    """The options of plan() for so many devices: one alone keeps nothing twice."""
    return {**options, "redundancy": 0} if count < 2 else dict(options)


def _process(pid):
    """What the system says of a process, its state first; [] if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def _started(pid):
    """When a process began, in the system's ticks; '' if there is none."""
    return "".join(_process(pid)[19:20])


def _folder(launcher):
    """(where folders of this machine's memory are, how their names begin, the one that stays while a launcher lives)"""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else tempfile.gettempdir()
    prefix = f"motley-elastic-{os.getuid()}-"
    return parent, prefix, os.path.join(parent, f"{prefix}{launcher}-{_started(launcher)}")


def remove_folder(launcher):
    """At the end of a launcher."""
    shutil.rmtree(_folder(launcher)[2], ignore_errors=True)


def _folder_of_launcher():
    """This worker's; those of launchers that have ended are removed."""
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    parent, prefix, path = _folder(launcher)
    for name in os.listdir(parent):
        parts = name[len(prefix) :].split("-")
        if name.startswith(prefix) and len(parts) == 2 and _started(parts[0]) != parts[1]:
            shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
    os.makedirs(path, mode=0o700, exist_ok=True)
    if os.stat(path).st_uid != os.getuid() or os.path.islink(path):
        raise UserError(f"[elastic] {path} is another's; remove it")
    return path


class Launch:
    """Which device each worker is, in this attempt of a launch. Made by all workers together.

    A worker keeps the device that it was at first, by its launcher and its place there; a new one takes one that nobody has.
    """

    def __init__(self, native, cluster):
        devices = len(cluster)
        self.local = os.environ.get("LOCAL_RANK", "0")
        self.folder = _folder_of_launcher()
        self.note = os.path.join(self.folder, f"worker-{self.local}.json")
        mine = {"device": -1, "attempt": -1}
        with contextlib.suppress(OSError, ValueError):
            with open(self.note, encoding="ascii") as file:
                mine = json.load(file)
        mine.update(machine=f"{socket.gethostname()} {self.folder}", pid=os.getpid())
        rows = [json.loads(text) for text in native.gather_texts(json.dumps(mine))]
        self.attempt = 1 + max(row["attempt"] for row in rows)
        taken = [row["device"] for row in rows if row["device"] >= 0]
        if len(rows) > devices:
            raise UserError(
                f"[distribute] the cluster has {devices} devices, but {len(rows)} workers were started; start {devices} at most"
            )
        if len(set(taken)) < len(taken) or max(taken, default=0) >= devices:
            raise UserError("[elastic] two workers say that they are the same device; start the launchers again")
        free = [device for device in range(devices) if device not in taken]
        is_now = [row["device"] if row["device"] >= 0 else free.pop(0) for row in rows]
        self.mine = is_now[native.rank]
        self.order = sorted(range(len(rows)), key=lambda rank: is_now[rank])  # launcher's ranks in the order of their devices
        self.devices = sorted(is_now)
        self.machines = [rows[rank]["machine"] for rank in self.order]  # [device that is there]
        self.beside = [row["pid"] for row in rows if row["machine"] == mine["machine"]]  # processes of this machine
        self.run = native.gather_texts(secrets.token_hex(3))[0]
        self._write_down()
        self.graph, self.options = None, {}  # of rank 0's plan() for the first step
        self.whole, self.cluster = cluster, cluster if len(rows) == devices else cluster.part(self.devices)

    def _write_down(self):
        """What this worker is, for the one that is started in its place."""
        with open(self.note + ".part", "w", encoding="ascii") as file:
            json.dump({"device": self.mine, "attempt": self.attempt}, file)
        os.replace(self.note + ".part", self.note)

    def end_stopped(self):
        """Ends workers of this machine that are stopped: the launcher would wait half a minute for each."""
        for pid in self.beside:
            if _process(pid)[:1] == ["T"]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    # ---- plans -------------------------------------------------------------------------------------------------------

    def _plan_file(self, devices):
        return os.path.join(self.folder, f"plan-{'-'.join(map(str, devices))}.json")

    def search(self, graph, cluster, **options):
        """As plan(), but within a second where workers were lost before; or a plan that was made for that."""
        self.graph, self.options = graph, options
        if self.attempt == 0:
            return make_plan(graph, cluster, **options)
        options = for_devices(options, len(self.devices))
        try:
            with open(self._plan_file(self.devices) + ".devices", encoding="ascii") as file:
                devices = json.load(file)
            made = Plan(_motley.load_plan(self._plan_file(self.devices)), devices=devices, made_for=(cluster.name, len(cluster)))
            if made.redundancy == options.get("redundancy", 0) and made.optimizer == options["optimizer"] and made.graph().text_without_model() == graph.text_without_model():
                return made
        except (OSError, ValueError, UserError):  # there is none
            pass
        return self.search_again(graph, cluster)

    def search_again(self, graph, cluster):
        """A plan within a second if there is one so fast."""
        options = for_devices(self.options, len(cluster))
        limit = options.pop("time_limit", None)
        for seconds in (_PLAN_S, 10 * _PLAN_S, limit):
            try:
                return make_plan(graph, cluster, time_limit=min(seconds, limit or seconds) if seconds else None, **options)
            except NoPlanError:
                if seconds != limit:
                    continue
                if not options.get("redundancy"):
                    raise
                warn("[elastic] what is left has no room for state kept twice; goes on without")
                self.options = {**self.options, "redundancy": 0}
                return self.search_again(graph, cluster)

    def keep(self, plan):
        """Of the devices that are there, where it is not known yet."""
        file = self._plan_file(self.devices)
        with contextlib.suppress(OSError):
            with open(file + ".devices", "w", encoding="ascii") as said:
                json.dump(plan.devices, said)
            plan.save(file)

    def prepare(self):
        """Makes plans for the loss of any one machine, by a process that gets a core when nobody else wants it."""
        left = [[d for d, of in zip(self.devices, self.machines) if of != machine] for machine in dict.fromkeys(self.machines)]
        left = [devices for devices in left if devices and not os.path.exists(self._plan_file(devices))]
        if not left:
            return
        try:
            graph = os.path.join(self.folder, "graph.json")
            self.graph.save(graph, None)
            job = {"graph": graph, "cluster": self.whole.text(), "options": self.options, "limit": _PLAN_S,
                   "parts": [[devices, self._plan_file(devices)] for devices in left]}  # fmt: skip
            job = json.dumps(job).encode()
        except (OSError, TypeError, UserError):  # then they are made when they are needed
            return
        process = subprocess.Popen([sys.executable, "-m", "motley._prepare", str(os.getpid())], stdin=subprocess.PIPE,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        util.Finalize(None, process.kill, exitpriority=60)
        threading.Thread(target=process.communicate, args=(job,), daemon=True).start()
