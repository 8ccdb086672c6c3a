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
import shutil
import signal
import sys
import threading
import time
from multiprocessing import util

import torch

from . import _motley, _pieces_files, _second, _shards
from ._agreement import same_batch
from ._errors import UserError, warn, whole_number
from ._pieces import plain
from ._pieces_files import decoded, encoded
from ._replanning import Replanning

_GRACE_S = 2.0  # from a launcher's wish that this worker ends until what it waits for is cut off
_folders, _keepers = set(), 0  # of checkpoints, and how many models, in this process


class Elastic:
    """How a run goes on when workers are lost.

    folder       for checkpoints, and to go on from where the memory of the survivors does not hold everything
    every        optimizer steps from one checkpoint to the next; 0: none is written
    keep         complete checkpoints that stay
    beside       objects with state_dict() and load_state_dict() that go on with the model, such as a scheduler or a sampler
    hang_seconds that a worker may say nothing, or neither compute nor wait for others while one of them waits, from 0.1 on
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
        _motley.say_when_idle()
        self.replanning = Replanning(dist) if asked.replan == "auto" else None
        self.second = None  # of another worker's state; see _second.py
        self.gone, self.wrote, self.all_wrote = threading.Event(), threading.Event(), threading.Event()  # this worker ends; files of a checkpoint
        self.shards = None  # what of checkpoints stays while the plan does
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
        self.gone.set()
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

    def _written_here(self):
        """Names whose pieces this worker writes into checkpoints: one of those that hold the same does. Collective."""
        dist, rows, holders = self.dist, [], {}  # holders: of a piece, ranks
        for table in dist._held.parts.values():
            rows += [[name, [*part[:5], *part[6:]]] for name, part in table.items()]
        rows += [[name, None] for name in dist._held.nobodys]
        for rank, text in enumerate(dist._group.native.gather_texts(json.dumps(rows))):
            for name, part in json.loads(text):
                holders.setdefault((name, None if part is None else tuple(part)), []).append(rank)
        elements, mine = [0] * dist._group.size, set()
        for (name, part), ranks in sorted(holders.items(), key=str):
            rank = min(ranks, key=lambda r: elements[r])
            elements[rank] += 1 if part is None else part[6]
            if rank == dist._group.rank:
                mine.add(name)
        return mine

    def _state(self, copied, names=None):
        """(rows, tensors, numbers) of all that this worker holds; `copied`: tensors of their own; `names`: of these parameters and buffers."""
        dist, rows, tensors, numbers = self.dist, [], [], []
        held = dist._held

        def add(kind, name, part, tensor):
            if names is not None and name not in names:
                return
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
                elif names is None or name in names:
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
        if self.writing is not None:
            self.wrote.wait()
        same_batch(self.dist._group.peers, self.dist._held)
        self.all_wrote.set()
        self.wait()
        self.wrote.clear(), self.all_wrote.clear()
        if self.shards is None or self.shards[0] is not self.dist._run:  # the same on all workers
            self.shards = self.dist._run, self._written_here(), _shards.layout(self.dist)
        _, names, layout = self.shards
        rows, tensors, numbers = self._state(True, names)
        said = self._said(numbers)
        folder, every, keep, updates = self.asked.folder, self.asked.every, self.asked.keep, self.updates
        index = _shards.Index(layout, decoded(said["groups"]), said["steps"]) if layout else None

        def cut_up(row, tensor):
            return _shards.cut_up(tensor, row[4] if row[2] is None else layout.shapes[row[1]], row[2])

        def write():
            try:
                _motley.fault_point("checkpoint")
                at = _pieces_files.write(folder, said, rows, tensors, cut_up if layout else None)
                # The one before is complete on all workers: they would not have come here.
                if self.launch.local == "0":
                    self._thin_out(folder, updates - every * keep)
                self.wrote.set()
                if self.dist._group.rank == 0:
                    self._complete(at, index)
            except Exception as error:
                self.failed = f"[elastic] a checkpoint cannot be written to {folder}: {str(error).splitlines()[0]}; training goes on without"
            finally:
                self.wrote.set()

        self.writing = threading.Thread(target=write)
        self.writing.start()

    def _complete(self, at, index):
        """Waits for the other workers' files of a checkpoint, and writes its index; on rank 0, beside training."""
        size, until = self.dist._group.size, time.monotonic() + max(self.asked.hang_seconds, 5)
        while True:
            last = self.all_wrote.is_set() or time.monotonic() > until
            entries = _pieces_files.of_step(at)
            if len(entries) == size:
                break
            if self.gone.wait(0.05):
                return
            if last:
                raise OSError(f"{len(entries)} of {size} workers' files are there; give a folder that all machines see")
        if index is not None:
            source = _pieces_files.Source(entries)
            numbers = {key: decoded(value) for key, value in source.numbers().items()}
            index.write(at, source.entries, numbers, _pieces_files.synced)

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
        self.gone.set()
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
