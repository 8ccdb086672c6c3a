"""What workers hold of a model's state, for others to ask for: one worker alone can put the whole together.

Every worker answers from a thread of its own, over TCP, so that `if rank == 0: dist.state_dict()` works whatever the others
do meanwhile. All workers make the same calls in the same order; each counts those that change the state (a step's forward
pass, a step of the optimizer, a state that is loaded). A question carries the asker's count, and is answered when the
worker that is asked has the same: at once if it waits for the asker, later if it is still behind. Pieces are sent under a
lock that the next change takes too. A step costs nothing but that lock.

A worker that ends waits for the others to end as well, or to wait for it in a collective, which fails then. A message is
a header, JSON behind its length, and raw tensors.
"""

import contextlib
import gc
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from multiprocessing import util

import torch

from . import _motley, _torch
from ._agreement import same_batch
from ._errors import PeerLost, UserError
from ._pieces import plain
from ._threads import Threads

_ROW = 128  # bytes of a worker's "address port token"
_PATIENCE = 60  # seconds until a worker that waits to end says so
_HELLO = 5  # seconds for the token of a connection
_MOST_OF_QUESTION = 1 << 24  # bytes; of answers, which others of the run send, 1 << 28
_STRANGERS = 32  # connections at once that have not given it


def _rank_0():
    return os.environ.get("MASTER_ADDR") or os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")


def _own(host):
    """The address of a name on this machine; '' if it has none, or only here that of the machine itself."""
    if host == "localhost" or host.startswith("127."):
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            if address[0].startswith("127.") or address[0] == "::1":
                continue
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return address[0].split("%")[0]
    return ""


def _receive(connection, size, into=None, until=None, lost=None):
    """As many bytes. `until`: when time is over; `lost()`: why there is nothing to wait for, asked every second."""
    into = memoryview(bytearray(size)) if into is None else into
    at = 0
    while at < size:
        try:
            connection.settimeout(max(0.001, until - time.monotonic()) if until is not None else None if lost is None else 1)
            got = connection.recv_into(into[at:], size - at)
        except socket.timeout:
            if until is not None:
                raise
            if lost is not None and lost():
                raise ConnectionError(lost()) from None
            continue
        finally:
            connection.settimeout(None)
        if got == 0:
            raise ConnectionError("the connection was closed")
        at += got
    return into


def _send_header(connection, header):
    text = json.dumps(header).encode()
    connection.sendall(struct.pack("<Q", len(text)) + text)


def _receive_header(connection, limit=1 << 28, until=None, lost=None):
    (size,) = struct.unpack("<Q", _receive(connection, 8, None, until, lost))
    if size > limit:
        raise ConnectionError("this is no message of motley")
    return json.loads(bytes(_receive(connection, size, None, until, lost)))


def place(whole, part, piece):
    """Writes a worker's piece into the whole tensor, which is contiguous; part is that of Worker.part()."""
    outer, size, inner, begin, length, _, first, count = part
    into = whole.view(outer, size, inner).narrow(1, begin, length)
    if count == outer * length * inner:
        into.copy_(piece.reshape(outer, length, inner))
    else:
        flat = into.reshape(-1)
        flat[first : first + count] = piece.reshape(-1)
        if flat.data_ptr() != into.data_ptr():  # a copy of what does not lie together
            into.copy_(flat.view(outer, length, inner))


def changes_of(piece):
    return getattr(piece, "changes", 0)


class Held:
    """What a worker holds of one model. `count` counts changes, `collective` says that it is inside a call of all."""

    def __init__(self, worker, parameters, buffers):
        self.pieces, self.optimizer, self.count, self.settled = {}, None, 0, True
        self.handed_out = {}  # also the empty pieces of parameters that this worker has no part of
        self.dropped, self.own_steps, self.mark = False, False, 0
        self.nobodys = {}  # {name: whole tensor} of what no stage of a pipeline reads; it does not change
        self.mirror = None  # a weak reference to the Mirror of the model
        self.batches = None  # what is said of them
        self.asked_at, self.stepping = -1, False
        self.lay_out(worker, parameters, buffers)

    def lay_out(self, worker, parameters, buffers):
        """Which pieces they are: those of a plan's worker."""
        self.worker = worker
        self.parts = {
            kind: {name: worker.part(kind, name) for name in names if worker.holds(kind, name)}
            for kind, names in (("parameter", parameters), ("buffer", buffers))
        }

    def tensor(self, kind, name):
        return plain(self.pieces[name]) if kind == "parameter" else self.worker.published(name)

    def values(self, kind, name):
        """[(key, tensor or number)] of one question."""
        if kind != "state":
            return [("", self.tensor(kind, name))]
        return list(self.optimizer.state.get(self.pieces[name], {}).items())

    def versions(self):
        """How often the pieces were changed in place: who steps them himself does not tell."""
        pieces = list(self.pieces.values())
        return sum(_motley.versions(pieces)) + sum(changes_of(piece) for piece in pieces)

    def changes(self, names):
        """{name: [how often the user changed this worker's piece, whether it has one]}; where the optimizer is not ours nobody counts."""
        return {} if self.own_steps else {name: [changes_of(self.handed_out[name]), name in self.pieces] for name in names}

    def behind(self, asked):
        """Whether the user has changed less here than where somebody asks, who has counted `asked`."""
        return any(changes_of(self.pieces[name]) < count for name, (count, _) in asked.items() if name in self.pieces)

    def ahead(self, asked):
        """Whether the user has changed more here."""
        return any(own and changes_of(self.pieces[name]) > count for name, (count, own) in asked.items() if name in self.pieces)

    def wanted(self):
        """Whether somebody may still ask for it here."""
        return not self.dropped or (self.mirror is not None and self.mirror() is not None)

    def moved(self):
        """Whether they were since the last forward pass, where that is not known from the optimizer.

        None: a worker without pieces cannot tell.
        """
        if self.own_steps and not self.pieces:
            return None
        return self.own_steps and self.versions() != self.mark


class Peers:
    """This worker among the others: what it holds, and the questions it asks. Making one is collective."""

    def __init__(self, group):
        self.group, self.changed = group, threading.Condition(threading.RLock())
        self.held, self.next = {}, 0  # by the number of the model: distribute() is called in the same order everywhere
        self.entered, self.inside, self.leaving = 0, False, False
        self.asking, self.connections, self.layouts = threading.RLock(), {}, {}
        self.addresses = [None] * group.size
        self.callers = set()  # threads that call what all workers do together
        if group.size == 1:
            return
        here = self._own_address()
        family = socket.AF_INET6 if ":" in here else socket.AF_INET
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.listener.bind((here, 0))
        self.strangers = threading.BoundedSemaphore(_STRANGERS)
        self.listener.listen(4 * group.size + 16)
        self.token = secrets.token_hex(16)
        row = f"{here or '-'} {self.listener.getsockname()[1]} {self.token}".encode()
        table = torch.zeros(group.size, _ROW, dtype=torch.uint8)
        table[group.rank, : len(row)] = torch.tensor(list(row), dtype=torch.uint8)
        table = table.to(group.device)
        group.all_reduce(table)
        for rank, cells in enumerate(table.cpu().tolist()):
            address, port, token = bytes(cells).rstrip(b"\0").decode().split()
            self.addresses[rank] = (_rank_0() if address == "-" else address, int(port), token)
        self.threads = Threads(at_the_end=2 * (group.size - 1) + 4)  # one to and one from each other worker
        threading.Thread(target=self._listen, daemon=True).start()
        self._watch_errors()
        util.Finalize(None, self._leave, exitpriority=100)  # at the end of processes of multiprocessing too

    def _watch_errors(self):
        """Where an error ends this worker's part, the others see it at once, though this process may have more to wait for."""
        of_main, of_threads = sys.excepthook, threading.excepthook

        def main_failed(*error):
            of_main(*error)
            self.cut_off()

        def thread_failed(error):
            of_threads(error)
            if error.thread is not None and error.thread.ident in self.callers:
                self.cut_off()

        sys.excepthook, threading.excepthook = main_failed, thread_failed

    def cut_off(self):
        """Ends the connections to the other workers: whatever they wait for from this one fails there."""
        for number in self.group.sockets:
            if number >= 0:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def _own_address(self):
        """Where the others reach this worker: its end of a connection that the group has. Over NCCL, which shows none, the
        address of MASTER_ADDR for rank 0, and for others the one from which they reach it. '' (all) where that is no address
        of rank 0's machine."""
        for number in self.group.sockets:
            if number >= 0:
                with socket.socket(fileno=os.dup(number)) as connection:
                    return connection.getsockname()[0].split("%")[0]
        if self.group.rank == 0:
            return _own(_rank_0())
        family, kind, protocol, _, address = socket.getaddrinfo(_rank_0(), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]

    # ---- what this worker holds -----------------------------------------------------------------------------------

    def add(self, held, owner):
        """Lets the others ask for a model that `owner` trains; after it is gone too, until it is gone everywhere. Collective."""
        with self.changed:
            numbers = sorted(self.held)
        if numbers:
            for _ in range(2):  # an owner that only a cycle keeps is gone, and then the model that it kept
                gc.collect()
            kept = torch.tensor([self.held[n].wanted() for n in numbers], dtype=torch.int32, device=self.group.device)
            with self.collective():
                self.group.all_reduce(kept)
            for n, count in zip(numbers, kept.tolist()):
                if count == 0:
                    del self.held[n]
                    self.layouts = {key: value for key, value in self.layouts.items() if key[0] != n}
        with self.changed:
            held.number, self.next = self.next, self.next + 1
            self.held[held.number] = held
            weakref.finalize(owner, setattr, held, "dropped", True).atexit = False
            self.changed.notify_all()

    @contextlib.contextmanager
    def collective(self):
        """Around what all workers do together."""
        self.entered += 1
        self.inside = True
        self.callers.add(threading.get_ident())
        try:
            yield
        except BaseException:
            self.entered -= 1  # whoever waits in it for this worker, which is not coming, need not be waited for
            raise
        finally:
            self.inside = False

    @contextlib.contextmanager
    def change(self, held, alone=True):
        """Around what changes the state of a model; `alone`: without a collective in which all have just met.

        Where all workers ask for the state, the first to have it must not change its own before the last has asked.
        """
        if alone and held.asked_at == held.count:
            with self.asking:
                with self.changed:
                    held.stepping = True
                    self.changed.notify_all()
                for rank in range(self.group.size):
                    if rank != self.group.rank:
                        self._ask(rank, held, {"ask": "pass", "entered": self.entered})
        with self.changed:
            try:
                yield
            finally:
                held.count, held.stepping = held.count + 1, False
                self.changed.notify_all()

    def forget_layouts(self, held):
        """What is known of the pieces of others, where all lay them out anew."""
        self.layouts = {key: value for key, value in self.layouts.items() if key[0] != held.number}

    def settle(self, held, settled):
        """Whether nobody steps the pieces now, where that is not known from the optimizer."""
        with self.changed:
            held.settled = settled
            self.changed.notify_all()

    # ---- answers --------------------------------------------------------------------------------------------------

    def _listen(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            if not self.strangers.acquire(blocking=False):
                connection.close()
                continue
            self.threads.run(self._answer, connection)

    def _answer(self, connection):
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = _receive_header(connection, 1024, time.monotonic() + _HELLO)
            finally:
                self.strangers.release()
            if not isinstance(hello, dict) or not secrets.compare_digest(str(hello["token"]).encode(), self.token.encode()):
                return
            while True:
                question = _receive_header(connection, _MOST_OF_QUESTION)
                if question["ask"] == "leave":
                    self._answer_leave(connection, question)
                elif question["ask"] == "pass":
                    self._answer_pass(connection, question)
                elif question["ask"] == "batch":
                    self._answer_batch(connection, question)
                else:
                    self._answer_pieces(connection, question)

    def _answer_leave(self, connection, question):
        with self.changed:
            # In a collective that the asker has not entered, this worker waits for nobody else.
            while not (self.leaving or (self.inside and self.entered > question["entered"])):
                self.changed.wait(0.2)
        _send_header(connection, {"go": True})

    def _answer_pass(self, connection, question):
        with self.changed:
            while question["model"] in self.held and not self.leaving:
                held = self.held[question["model"]]
                if held.count > question["count"] or (held.count == question["count"] and held.stepping):
                    break
                if self.inside and self.entered > question["entered"]:
                    break
                self.changed.wait(0.2)
        _send_header(connection, {"go": True})

    def _answer_batch(self, connection, question):
        with self.changed:
            while not self.leaving and question["model"] in self.held:
                if not self.held[question["model"]].batches.awaits(question["number"]):
                    break
                self.changed.wait(0.2)
            held = self.held.get(question["model"])
        known, refused = (None, "") if held is None else (held.batches.known(question["number"]), held.batches.refused)
        _send_header(connection, {"go": True, "batch": known, "refused": refused})

    def _ready(self, number, count):
        """Whether the question after a model's `count` changes can be answered, if only with no."""
        if self.leaving or number not in self.held:
            return self.leaving or number < self.next
        held = self.held[number]
        return held.count > count or (held.count == count and held.settled)

    def _answer_pieces(self, connection, question):
        number, count = question["model"], question["count"]
        with self.changed:
            asked = question.get("changes", {})
            while not self._ready(number, count):
                self.changed.wait()
            while not self.leaving and number in self.held and self.held[number].count == count and self.held[number].behind(asked):
                self.changed.wait(0.02)
            held = self.held.get(number)
            moved = held is not None and held.moved()
            apart = held is not None and (held.behind(asked) or held.ahead(asked))
            if held is None or held.count != count or apart or (None not in (moved, question["moved"]) and moved != question["moved"]):
                _send_header(connection, {"count": -1 if held is None else held.count, "refused": "" if held is None else held.batches.refused})
                return
            if question["ask"] == "layout":
                _send_header(connection, {"count": count, "parts": held.parts})
                return
            answer, tensors = [], []
            for kind, name in question["want"]:
                row = []
                for key, value in held.values(kind, name):
                    if isinstance(value, torch.Tensor):
                        tensors.append(value)
                        row.append([key, str(value.dtype).split(".")[1], list(value.shape)])
                    else:
                        row.append([key, None, value])
                answer.append(row)
            _send_header(connection, {"count": count, "moved": moved, "values": answer})
            for tensor in tensors:
                connection.sendall(_torch.bytes_of(tensor.detach().cpu()))

    def _lost(self):
        """Why there is no answer to wait for: a worker is hung; '' if none is."""
        return self.group.lost

    # ---- questions ------------------------------------------------------------------------------------------------

    def _connection(self, rank):
        if rank not in self.connections:
            address, port, token = self.addresses[rank]
            connection = socket.create_connection((address, port), timeout=_PATIENCE)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            _send_header(connection, {"token": token})
            self.connections[rank] = connection
        return self.connections[rank]

    def _ask(self, rank, held, question):
        """The answer of another worker and the connection where its tensors come."""
        try:
            connection = self._connection(rank)
            _send_header(connection, {**question, "model": held.number, "count": held.count, "moved": held.moved()})
            answer = _receive_header(connection, lost=self._lost)
        except (OSError, ValueError) as error:
            self.connections.pop(rank, None)
            raise PeerLost(f"rank {self.group.rank} asked rank {rank} for its part of the state, and it is gone ({error})") from None
        if not answer.keys() & {"values", "parts", "go"}:
            raise self._apart(rank, held, answer)
        return answer, connection

    def batch_of(self, rank, held, number):
        """(what another worker says of a batch, None if it does not know; why it refused a step)."""
        answer, _ = self._ask(rank, held, {"ask": "batch", "number": number})
        return answer["batch"], answer["refused"]

    def _apart(self, rank, held, answer):
        if answer.get("refused"):  # it made no further step, since batches differed
            return UserError(answer["refused"])
        return UserError(
            f"[distribute] rank {rank} is at another step than rank {self.group.rank} ({answer['count']} and {held.count} "
            "changes of the state); one worker alone may ask for the state only after dist.step(), not between a forward "
            "pass and its step, and every worker has to make the same calls"
        )

    def _parts(self, rank, held):
        """{kind: {name: part}} of what a worker holds."""
        if rank == self.group.rank:
            return held.parts
        if (held.number, rank) not in self.layouts:
            self.layouts[held.number, rank] = self._ask(rank, held, {"ask": "layout"})[0]["parts"]
        return self.layouts[held.number, rank]

    def _cover(self, held, kind, name):
        """{rank: part} of workers that hold all of a tensor together; empty if nobody holds it."""
        ranks = [self.group.rank] + [r for r in range(self.group.size) if r != self.group.rank]
        groups = {}
        for rank in ranks:
            part = self._parts(rank, held)[kind].get(name)
            if part is None:
                continue
            outer, size, inner, _, _, group, _, count = part
            if count == outer * size * inner:
                return {rank: part}
            if count > 0:
                groups.setdefault(group, {})[rank] = part
            for cover in groups.values():
                if sum(p[7] for p in cover.values()) == outer * size * inner:
                    return cover
        return {}

    def whole(self, held, wanted):
        """{(kind, name): tensor}, or for optimizer states {(kind, name): {key: tensor or number}}, on the CPU or as held here.

        wanted: [(kind, name, shape)]; kind is 'parameter', 'buffer' or 'state'. What nobody holds is left out.
        """
        with self.asking:
            held.asked_at = held.count
            questions, result, covers = {}, {}, {}
            for kind, name, shape in wanted:
                covers[kind, name] = self._cover(held, "parameter" if kind == "state" else kind, name)
                for rank in covers[kind, name]:
                    questions.setdefault(rank, []).append((kind, name, shape))
            moved = held.moved()
            for rank in sorted(questions, key=lambda r: r != self.group.rank):
                asked = questions[rank]
                if rank == self.group.rank:
                    for kind, name, shape in asked:
                        values = held.values(kind, name)
                        self._put(result, covers, rank, kind, name, shape, values)
                    continue
                changes = held.changes([name for kind, name, _ in asked if kind == "parameter"])
                answer, connection = self._ask(rank, held, {"ask": "pieces", "want": [row[:2] for row in asked], "changes": changes})
                try:
                    for (kind, name, shape), row in zip(asked, answer["values"]):
                        values = []
                        for key, type_name, value in row:
                            if type_name is not None:
                                value = torch.empty(value, dtype=getattr(torch, type_name))
                                buffer = _torch.bytes_of(value)
                                _receive(connection, len(buffer), buffer, lost=self._lost)
                            values.append((key, value))
                        self._put(result, covers, rank, kind, name, shape, values)
                except OSError as error:
                    self.connections.pop(rank, None)
                    raise PeerLost(f"rank {rank} ended while it sent its part of the state ({error})") from None
                if None not in (moved, answer["moved"]) and moved != answer["moved"]:
                    raise self._apart(rank, held, answer)
                moved = answer["moved"] if moved is None else moved
            return result

    def all_of(self, held, parameters, buffers):
        """{name: whole tensor} of slots, from whoever holds them; they may be this worker's own."""
        if held.own_steps:
            self.settle(held, True)
        wanted = [("parameter", slot.name, slot.tensor.shape) for slot in parameters]
        wanted += [("buffer", slot.name, slot.tensor.shape) for slot in buffers]
        found = self.whole(held, wanted)
        return {name: found[kind, name] if (kind, name) in found else held.nobodys[name] for kind, name, _ in wanted}

    @staticmethod
    def _put(result, covers, rank, kind, name, shape, values):
        """Puts a worker's piece where it belongs."""
        cover = covers[kind, name]
        outer, size, inner, _, _, _, _, count = cover[rank]
        for key, value in values:
            if isinstance(value, torch.Tensor) and count != outer * size * inner and value.numel() == count and (
                value.dim() > 0 or kind != "state"
            ):
                old = result.get((kind, name), {}).get(key) if kind == "state" else result.get((kind, name))
                whole = torch.empty(shape, dtype=value.dtype) if old is None else old
                place(whole, cover[rank], value)
                value = whole
            if kind == "state":
                result.setdefault((kind, name), {}).setdefault(key, value)
            else:
                result[kind, name] = value

    # ---- the end --------------------------------------------------------------------------------------------------

    def _leave(self):
        """Answers until nobody can ask any more."""
        failed = getattr(sys, "last_type", None) is not None
        for held in [] if failed else [held for held in self.held.values() if not held.batches.refused]:
            try:
                same_batch(self, held)
            except UserError as error:
                print(f"motley: {error}", file=sys.stderr, flush=True)
        with self.changed:
            self.leaving = True
            for held in self.held.values():
                held.settled = True
            self.changed.notify_all()
        if failed:  # the others must see it end
            return
        done = threading.Event()
        ranks = [r for r in range(self.group.size) if r != self.group.rank]
        left = [len(ranks)]

        def say(rank):
            with contextlib.suppress(OSError, ValueError):
                address, port, token = self.addresses[rank]
                with socket.create_connection((address, port), timeout=5) as connection:
                    connection.settimeout(None)
                    _send_header(connection, {"token": token})
                    _send_header(connection, {"ask": "leave", "entered": self.entered})
                    _receive_header(connection)
            with self.changed:
                left[0] -= 1
                if left[0] == 0:
                    done.set()

        for rank in ranks:
            self.threads.run(say, rank)
        said = time.monotonic() + _PATIENCE
        while not done.wait(1):
            if self._lost():  # a hung worker ends no more, and the others end without it
                return
            if said is not None and time.monotonic() > said:
                said = None
                print(
                    f"motley: rank {self.group.rank} is done and waits for the others to end, since they may ask for its part "
                    "of the state", file=sys.stderr, flush=True,
                )  # fmt: skip
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        if not self.inside:  # by a thread that this process does not wait for
            self.group.close()  # its threads must not outlive the libraries that they run in
