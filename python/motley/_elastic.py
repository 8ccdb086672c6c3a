"""Going on when workers are lost, or come: distribute(elastic=...) under torchrun --nnodes=MIN:MAX --max-restarts=K.

    dist = motley.distribute(model, batch, loss_fn, cluster="cluster.yaml", optimizer=optimizer, elastic="saved")
    while dist.steps < 1000:
        dist.train_step(*batch_of(dist.steps))

When a worker ends, its launcher starts all of them again, on the machines that are left. A step costs nothing for that but
one small collective: a worker that survives leaves its pieces when it notices, in memory of its machine that outlives it, and those
that are started next put them together (_pieces_files.py). What was on lost machines alone comes from the last checkpoint.

Before the optimizer's step all workers meet (`commit`). Who has passed it knows that all have their gradients; who has not, when another
is lost, leaves both the state before the step and the one after it. So there is always a step that all survivors have.
"""

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
import time
from multiprocessing import util

import torch

from . import _motley, _pieces_files, _second
from ._agreement import same_batch
from ._errors import NoPlanError, UserError, warn, whole_number
from ._pieces import plain
from ._pieces_files import decoded, encoded
from ._plan import Plan
from ._plan import plan as make_plan
from ._replanning import Replanning

_PLAN_S = 1.0  # that a plan for what is left may take
_GRACE_S = 2.0  # from a launcher's wish that this worker ends until what it waits for is cut off
_folders, _keepers = set(), 0  # of checkpoints, and how many models, in this process


class Elastic:
    """How a run goes on when workers are lost.

    folder       for checkpoints, and to go on from where the memory of the survivors does not hold everything
    every        optimizer steps from one checkpoint to the next; 0: none is written
    keep         complete checkpoints that stay
    beside       objects with state_dict() and load_state_dict() that go on with the model, such as a scheduler or a sampler
    hang_seconds that a worker may say nothing, from 0.1 on
    replan       'advise': a device that is slower than planned is named; 'auto': besides, training goes on by a plan for its speed,
                 where that saves more than moving the state costs, over as many steps as were made so far
    """

    def __init__(self, folder, every=50, keep=2, beside=(), hang_seconds=30.0, replan="advise"):
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            raise UserError(f"[elastic] folder is {folder!r}; give a path for checkpoints")
        whole_number("elastic", "every", every)
        whole_number("elastic", "keep", keep, 1)
        if isinstance(hang_seconds, bool) or not isinstance(hang_seconds, (int, float)) or not 0.1 <= hang_seconds <= 86400:
            raise UserError(f"[elastic] hang_seconds is {hang_seconds!r}; give seconds from 0.1 to 86400")
        if replan not in ("advise", "auto"):
            raise UserError(f"[elastic] replan is {replan!r}; give 'advise' or 'auto'")
        beside = list(beside) if isinstance(beside, (list, tuple)) else [beside]
        for one in beside:
            if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
                raise UserError(f"[elastic] beside has a {type(one).__name__}; give objects with state_dict() and load_state_dict()")
            encoded(one.state_dict())
        self.folder, self.every, self.keep, self.beside, self.hang_seconds = os.path.abspath(folder), every, keep, beside, hang_seconds
        self.replan = replan


def asked(elastic, cluster, optimizer, redundancy=0):
    """The Elastic that distribute() was given, or None."""
    if elastic is None or elastic is False:
        if redundancy:
            raise UserError("[distribute] redundancy is 1, which is for runs that go on when workers are lost; give elastic too, or redundancy=0")
        return None
    if elastic is True:
        raise UserError("[distribute] elastic is True; give a folder for checkpoints")
    if isinstance(elastic, (str, os.PathLike)):
        elastic = Elastic(elastic)
    if not isinstance(elastic, Elastic):
        raise UserError(f"[distribute] elastic is a {type(elastic).__name__}; give a folder for checkpoints, or a motley.Elastic")
    if cluster is None:
        raise UserError("[distribute] elastic plans for the devices that are left; give a cluster instead of a plan")
    if optimizer is None:
        raise UserError("[distribute] elastic keeps the optimizer's state; give the optimizer to distribute()")
    os.environ.setdefault("MOTLEY_HANG_SECONDS", f"{elastic.hang_seconds:g}")
    return elastic


def for_devices(options, count):
    """The options of plan() for so many devices: one alone keeps nothing twice."""
    return {**options, "redundancy": 0} if count < 2 else dict(options)


# ---- the launch ------------------------------------------------------------------------------------------------------


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


# ---- while training --------------------------------------------------------------------------------------------------


class Keeper:
    """One worker's part: what it leaves, when, and what it goes on from."""

    def __init__(self, asked, launch, dist):
        global _keepers
        if asked.folder in _folders:
            raise UserError(f"[elastic] two models have checkpoints in {asked.folder}; give each a folder of its own")
        _folders.add(asked.folder)
        self.asked, self.launch, self.dist, self.lock = asked, launch, dist, threading.RLock()
        self.busy, self.left, self.ending = False, set(), False
        self.updates, self.steps, self.buffers, self.beside, self.ready = 0, 0, {}, None, False
        self.writing, self.failed, self.first, self.left_updates = None, "", True, 0
        self.memory = os.path.join(launch.folder, f"left-{_keepers}")
        _keepers += 1
        _motley.set_fault_rank(dist._group.rank, launch.attempt)
        self.replanning = Replanning(dist) if asked.replan == "auto" else None
        self.second = None  # of another worker's state; see _second.py
        self._boundary()
        self._watch()

    # ---- points of a step -------------------------------------------------------------------------------------------

    def begins(self):
        """Before a forward pass of training."""
        _motley.fault_point("step")
        if self.ending:
            self._end()
        if self.replanning is not None:
            self.replanning.follow()
        if not self.ready:
            self.beside, self.ready, self.steps = self._goes_with(), True, self.dist._steps
            if self.asked.every and self.updates and self.updates % self.asked.every == 0:
                self._checkpoint()
            if self.first and self.left_updates != self.updates:  # all have made a step: nobody needs what was left before
                self.first = False
                _pieces_files.remove(self.memory, lambda steps, run: run == self.launch.run)

    @contextlib.contextmanager
    def update(self):
        """Around the optimizer's step."""
        lost = None
        try:
            if self.second is not None:
                self.second.receive()
            with self.dist._group.peers.collective():
                self.dist._group.native.tell(torch.zeros(1))
        except UserError:
            raise
        except Exception as error:
            lost = error
            self._leave()  # others may not have come to it
        with self.lock:
            self.busy = True
            yield
            if self.second is not None:
                self.second.step()
            self.busy = False
            self._boundary(1)
        if lost is not None:
            self._leave()
            raise lost

    def lost(self):
        """Another worker is gone, or this one fails: its pieces stay for those that are started next."""
        self.launch.end_stopped()
        with self.lock:
            if not self.busy:
                self._leave()

    def keep_second(self):
        """Begins to keep another worker's state, where the plan says so, or does it anew for another plan; collective."""
        self.second = None
        if self.dist.plan.redundancy:
            _second.check(self.dist.optimizer, self.dist._wholes is None)
            if self.dist._worker.kept_second():
                self.second = _second.SecondCopies(self.dist)

    def _boundary(self, more=0):
        held = self.dist._held
        self.updates, self.steps, self.ready = self.updates + more, self.dist._steps, False
        self.buffers = {name: (part, held.worker.published(name)) for name, part in held.parts["buffer"].items()}

    # ---- what it leaves ----------------------------------------------------------------------------------------------

    def _goes_with(self):
        optimizer = self.dist.optimizer
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return encoded(groups), [encoded(one.state_dict()) for one in self.asked.beside]

    def _state(self, copied):
        """(rows, tensors, numbers) of all that this worker holds; `copied`: tensors of their own."""
        dist, rows, tensors, numbers = self.dist, [], [], []
        held = dist._held

        def add(kind, name, part, tensor):
            tensor = tensor.detach().to("cpu", copy=copied).contiguous()
            rows.append([kind, name, None if part is None else list(part), str(tensor.dtype).split(".")[1], list(tensor.shape)])
            tensors.append(tensor)

        for name, piece in held.pieces.items():
            add("", name, held.parts["parameter"][name], plain(piece))
        for name, (part, tensor) in self.buffers.items():
            add("", name, part, tensor)
        for name, tensor in held.nobodys.items():
            add("", name, None, tensor)
        for name, part, values in dist._optimizer_values():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    add("state " + key, name, None if part is None or value.numel() != part[7] else part, plain(value))
                else:
                    numbers.append([name, key, encoded(value)])
        if self.second is not None and not copied:  # a checkpoint has all workers' own
            for row in self.second.rows():
                add(*row)
        return rows, tensors, numbers

    def _said(self, numbers):
        groups, beside = self.beside if self.ready else self._goes_with()
        return {"steps": self.steps, "updates": self.updates, "run": self.launch.run, "rank": self.dist._group.rank,
                "ready": self.ready, "groups": groups, "beside": beside, "numbers": numbers}  # fmt: skip

    def _leave(self):
        if self.updates in self.left:
            return
        self.left.add(self.updates)
        _motley.fault_point("boundary")
        try:
            rows, tensors, numbers = self._state(copied=False)
            _pieces_files.write(self.memory, self._said(numbers), rows, tensors)
        except Exception as error:  # training goes on from another's, or a checkpoint
            print(f"motley: [elastic] rank {self.dist._group.rank} cannot leave its pieces: {error}", file=sys.stderr, flush=True)

    def _checkpoint(self):
        """Begins to write a checkpoint of the step that is over; waits for the one before."""
        self.wait()
        same_batch(self.dist._group.peers, self.dist._held)
        rows, tensors, numbers = self._state(copied=True)
        said = self._said(numbers)
        folder, every, keep, updates = self.asked.folder, self.asked.every, self.asked.keep, self.updates

        def write():
            try:
                _motley.fault_point("checkpoint")
                _pieces_files.write(folder, said, rows, tensors)
                # The one before is complete on all workers: they would not have come here.
                if self.launch.local == "0":
                    self._thin_out(folder, updates - every * keep)
            except Exception as error:
                self.failed = f"[elastic] a checkpoint cannot be written to {folder}: {str(error).splitlines()[0]}; training goes on without"

        self.writing = threading.Thread(target=write)
        self.writing.start()

    def _thin_out(self, folder, least):
        old = {}
        for entry in _pieces_files.found(folder):
            old[entry.steps, entry.run] = entry.updates
        _pieces_files.remove(folder, lambda steps, run: old.get((steps, run), least) >= least)

    def wait(self):
        if self.writing is not None:
            self.writing.join()
            self.writing = None
        if self.failed:
            warn(self.failed)
            self.failed = ""

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _watch(self):
        """The launcher's wish that this worker ends, and errors that end it."""
        before = sys.excepthook

        def failed(*error):
            self.lost()
            before(*error)

        sys.excepthook = failed
        util.Finalize(None, self._done, exitpriority=50)  # when the others are done too
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return  # the script has its own way to end
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(reading, True)

        def wait():
            while os.read(reading, 1) != bytes([signal.SIGTERM]):
                pass
            self.ending = True  # the main thread ends at its next step; where it waits for others, that fails
            time.sleep(_GRACE_S)
            self.dist._group.peers.cut_off()
            time.sleep(_GRACE_S / 2)
            self._end()

        signal.signal(signal.SIGTERM, lambda *_: None)  # so that it is told; by the number, at once, whatever the main thread does
        other = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if other != -1:  # the script is told too: then it is not for us
            signal.set_wakeup_fd(other)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return
        threading.Thread(target=wait, daemon=True).start()

    def _end(self):
        with self.lock:
            if not self.busy:
                self._leave()
            self.wait()
            self.dist._group.peers.cut_off()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + signal.SIGTERM)

    def _done(self):
        """This process ends by itself."""
        self.wait()
        if getattr(sys, "last_type", None) is not None:
            return
        with contextlib.suppress(OSError):
            os.remove(self.launch.note)
        if self.launch.local == "0":
            shutil.rmtree(self.memory, ignore_errors=True)
            for name in os.listdir(self.launch.folder):
                if name.startswith(("plan-", "graph.json")):
                    with contextlib.suppress(OSError):
                        os.remove(os.path.join(self.launch.folder, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.launch.folder)

    # ---- going on ----------------------------------------------------------------------------------------------------

    def go_on(self):
        """Takes what workers before these left; collective. Returns what it went on from, in words."""
        _motley.fault_point("rendezvous")
        native, rank = self.dist._group.native, self.dist._group.rank
        mine, bad = [], []
        if self.launch.local == "0":
            for place, folder in (("memory", self.memory), ("folder", self.asked.folder)):
                for entry in _pieces_files.found(folder):
                    entry.place = place
                    mine.append(entry)
        while True:
            mine = [entry for entry in mine if entry.key not in bad]
            texts = native.gather_texts(json.dumps([[entry.place, entry.said] for entry in mine]))
            entries = []
            for at, text in enumerate(texts):
                for number, (place, said) in enumerate(json.loads(text)):
                    entry = _pieces_files.Entry(None, {**said, "at": at})
                    entry.number, entry.place = number, place
                    entries.append(entry)
            source = _pieces_files.newest(entries, self._wanted())
            if source is None:
                return ""
            files, problem = {}, []
            for entry in source.entries:
                if entry.at == rank:
                    tensors = _pieces_files.tensors_of(mine[entry.number])
                    files[id(entry)] = tensors
                    if tensors is None:
                        problem.append(entry.key)
                        warn(f"[elastic] {mine[entry.number].where} is damaged; it is left out")
            bad = [tuple(key) for text in native.gather_texts(json.dumps(problem)) for key in json.loads(text)]
            if not bad:
                break
        self._take(source, files)
        return f"step {source.steps}, of {'the memory of the workers' if source.entries[0].place == 'memory' else 'a checkpoint'}"

    def _wanted(self):
        step = self.dist._step_spec
        return [(slot.name, slot.tensor.numel()) for slot in step.parameters + step.buffers]

    def _take(self, source, files):
        dist, step = self.dist, self.dist._step_spec
        slots = {slot.name: slot for slot in step.parameters + step.buffers}

        def whole(kind, name, shape, dtype):
            """A tensor that workers give together, on all of them."""
            tensor = torch.zeros(torch.Size(shape).numel(), dtype=dtype)
            if tensor.numel() > 0:
                for entry, number, part, new in source.giving(kind, name, tensor.numel()):
                    if entry.at == dist._group.rank:
                        _pieces_files.put(tensor, files[id(entry)][number], part, new)
            return dist._sum(tensor).reshape(shape)

        for name, slot in slots.items():  # one at a time: there may be no room for all
            dist._set_whole({name: whole("", name, slot.tensor.shape, slot.tensor.dtype)})
        kept = {}
        for kind, name in source.table:
            if kind and name in slots:
                entry, number, part = source.table[kind, name][0]
                _, _, _, type_name, shape = entry.rows[number]
                shape = shape if part is None else slots[name].tensor.shape
                value = whole(kind, name, shape, getattr(torch, type_name))
                kept.setdefault(name, {})[kind[6:]] = value if part is None else dist._piece_of_state(name, value)
        for (name, key), value in source.numbers().items():
            kept.setdefault(name, {})[key] = decoded(value)
        dist._set_optimizer(kept, decoded(source.said("groups")))
        for one, its in zip(self.asked.beside, source.said("beside")):
            one.load_state_dict(decoded(its))
        if not source.ready:
            warn("[elastic] what goes with the step, such as a learning rate, may be that of the step before")
        dist._run.unchecked = min(dist._run.unchecked, 1)  # the same step was compared before
        dist._steps, self.updates, self.left_updates = source.steps, source.updates, source.updates
        self._boundary()


def begin(asked, dist, began):
    """Goes on from what is there, and says so; collective."""
    launch = dist._group.launch
    dist._keeper = Keeper(asked, launch, dist)
    went_on = dist._keeper.go_on()
    dist._keeper.keep_second()
    if dist._group.rank != 0:
        return
    launch.keep(dist.plan)
    launch.prepare()
    if went_on or launch.attempt > 0:
        missing = sorted(set(range(len(launch.whole))) - set(launch.devices))
        which = f"without device{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else "on all devices"
        print(f"motley: [elastic] goes on {which}, from {went_on or 'the beginning'}; ready in {time.monotonic() - began:.1f} s",
              file=sys.stderr, flush=True)  # fmt: skip
