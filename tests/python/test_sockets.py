"""The socket on which a worker answers others (_state.py), whatever comes there: it goes on answering, prints nothing and takes no memory."""

import contextlib
import io
import json
import os
import random
import resource
import socket
import struct
import threading
import time
import types
import unittest

import torch

import support  # noqa: F401
from motley import _state


class Group:
    """Two workers, of which this is one."""

    size, rank, sockets, device, lost = 2, 0, [], torch.device("cpu"), ""

    def all_reduce(self, tensor):
        """The other one has nothing to say; its row is this one's."""
        if tensor.dtype == torch.uint8:
            tensor[1] = tensor[0]

    def close(self):
        pass


def held():
    """A model of one parameter, as a worker holds it."""
    worker = types.SimpleNamespace(part=lambda kind, name: (1, 4, 1, 0, 4, 0, 0, 4), holds=lambda kind, name: True, published=lambda name: torch.ones(2))
    one = _state.Held(worker, ["weight"], ["mean"])
    one.pieces["weight"] = one.handed_out["weight"] = torch.arange(4.0)
    one.optimizer = types.SimpleNamespace(state={})
    one.batches = types.SimpleNamespace(awaits=lambda number: False, known=lambda number: None, refused="")
    return one


QUESTIONS = [
    {"ask": "layout", "model": 0, "count": 0, "moved": False},
    {"ask": "pieces", "model": 0, "count": 0, "moved": False, "want": [["parameter", "weight"], ["buffer", "mean"]], "changes": {"weight": [0, True]}},
    {"ask": "batch", "model": 0, "count": 0, "number": 3},
    {"ask": "pass", "model": 0, "count": 5, "entered": 0},
    {"ask": "leave", "entered": 0},
]


def framed(text):
    return struct.pack("<Q", len(text)) + text


def changed(rng, value):
    """A message with something else in some places."""
    if rng.random() < 0.25:
        return rng.choice([None, -1, 1 << 80, 0.5, "", "weight", [], {}, [[]], True, "x" * 5000, {"count": {}}])
    if isinstance(value, dict):
        return {rng.choice([key, key, key, "ask", "count"]): changed(rng, item) for key, item in value.items() if rng.random() < 0.9}
    if isinstance(value, list):
        return [changed(rng, item) for item in value for _ in range(rng.choice([0, 1, 1, 1, 2]))]
    return value


def bytes_of(rng):
    """What somebody may send behind the token."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return struct.pack("<Q", rng.choice([1 << 62, 1 << 30, (1 << 24) + 1, 3])) + rng.randbytes(8)
    if kind == 2:
        return framed(b"[" * rng.choice([10, 100000]))
    if kind == 3:
        text = bytearray(framed(json.dumps(rng.choice(QUESTIONS)).encode()))
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        return bytes(text)
    return framed(json.dumps(changed(rng, rng.choice(QUESTIONS))).encode())


class Sockets(unittest.TestCase):
    def setUp(self):
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        self.peers = _state.Peers(Group())
        one = held()
        one.number, self.peers.held[0], self.peers.next = 0, one, 1
        _, self.port, self.token = self.peers.addresses[0]

    def tearDown(self):
        self.peers.held.clear()

    def connection(self, token=None):
        made = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        made.sendall(framed(json.dumps({"token": self.token if token is None else token}).encode()))
        return made

    def answers(self):
        """Whether the worker still says what it holds."""
        with self.connection() as made:
            made.sendall(framed(json.dumps(QUESTIONS[0]).encode()))
            answer = _state._receive_header(made, until=time.monotonic() + 20)
        self.assertEqual(answer["parts"]["parameter"]["weight"], [1, 4, 1, 0, 4, 0, 0, 4])

    def test_whatever_comes(self):
        rng, said = random.Random(3), io.StringIO()
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        hook, threading.excepthook = threading.excepthook, lambda error: said.write(f"{error.exc_type} {error.exc_value}\n")
        try:
            for number in range(int(os.environ.get("MOTLEY_FUZZ_SOCKETS", 1500))):
                with contextlib.suppress(OSError), self.connection(token=rng.choice([None, None, None, "", 7, "x" * 2000])) as made:
                    for _ in range(rng.randint(1, 3)):
                        made.sendall(bytes_of(rng))
                    made.shutdown(socket.SHUT_WR)
                    made.settimeout(0.02 if number % 50 else 1)
                    made.recv(1 << 16)
                if number % 300 == 0:
                    self.answers()
            self.answers()
        finally:
            threading.excepthook = hook
        self.assertEqual(said.getvalue(), "")
        self.assertLess(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun, 400 << 10, "KiB more")

    def test_strangers_who_say_nothing_keep_nobody_out(self):
        silent = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(3 * _state._STRANGERS)]
        time.sleep(_state._HELLO + 1)  # theirs is over
        self.answers()
        for one in silent:
            one.close()


if __name__ == "__main__":
    unittest.main()
