"""The kernel that makes random numbers of CUDA devices, compiled by the C++ compiler and called where torch would call it."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
import unittest
import unittest.mock
import warnings

import torch
from torch import nn

import motley
from motley import _device_numbers, _motley
from test_guard import ONE

_CALLER = """
extern "C" void make_KIND(const KIND* row, long long rows, const KIND* column, long long columns, const long long* numbers, KIND* out) {
  for (long long r = 0; r < rows; ++r)
    for (long long c = 0; c < columns; ++c) out[r * columns + c] = NAME<KIND>(row[r], column[c], NUMBERS);
}
"""
_COMPILER = shutil.which("g++") or shutil.which("c++")


class OnTheCpu:
    """In place of torch's jiterator: the same source as a loop over elements."""

    def __init__(self, folder):
        self.folder, self.calls = folder, []

    def __call__(self, source, numbers):
        parsed = torch.cuda.jiterator._CodeParser(source)
        name = parsed.function_name
        values = ", ".join(f"numbers[{i}]" for i in range(len(numbers)))
        path = os.path.join(self.folder, name)
        with open(path + ".cc", "w") as file:
            file.write(source)
            for kind in "float", "double":
                file.write(_CALLER.replace("KIND", kind).replace("NAME", name).replace("NUMBERS", values))
        command = [_COMPILER, "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC", path + ".cc", "-o", path + ".so"]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(path + ".so")

        def call(rows, columns, **given):
            assert list(given) == list(numbers)
            assert all(isinstance(n, int) and -(1 << 63) <= n < 1 << 63 for n in given.values())
            self.calls.append((name, rows.numel(), columns.numel()))
            out = torch.empty(rows.shape[0], columns.shape[1], dtype=rows.dtype)
            make = getattr(library, "make_" + {torch.float32: "float", torch.float64: "double"}[rows.dtype])
            row, column = rows.contiguous(), columns.contiguous()
            make(
                ctypes.c_void_p(row.data_ptr()), ctypes.c_longlong(row.numel()), ctypes.c_void_p(column.data_ptr()),
                ctypes.c_longlong(column.numel()), (ctypes.c_longlong * len(given))(*given.values()), ctypes.c_void_p(out.data_ptr()),
            )  # fmt: skip
            return out

        return call


def mixed(x):
    """mix64 of src/core/rng.h."""
    full = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & full
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & full
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & full
    return x ^ (x >> 31)


def signed(bits):
    return bits - (1 << 64) if bits >> 63 else bits


@unittest.skipUnless(_COMPILER, "there is no C++ compiler")
class Kernels(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.jiterator = OnTheCpu(cls.folder.name)
        cls.kernels = _device_numbers.Kernels(cls.jiterator)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @contextlib.contextmanager
    def installed(self, kernels=None):
        _motley.set_numbers_kernel("cpu", kernels or self.kernels)
        try:
            yield
        finally:
            _device_numbers.register()

    def test_numbers(self):
        """Thousands of streams, maps and places, also beyond 32 bits and with the highest bits set."""
        random = torch.Generator().manual_seed(3)

        def below(n):
            return int(torch.randint(n, (), generator=random))

        for case in range(3000):
            big = case % 3 == 0
            maps = []
            for _ in range(below(3)):
                length = 1 + below(1 << 33 if big else 50)
                maps.append([length + below(9), length, 1 + below(1 << 20 if big else 60), below(9)])
            stream = below(1 << 62) * 4 + below(4)
            first, width = below(1 << 40 if big else 5000), 1 + below(40)
            numbers = [signed(stream), first, width]
            for size, length, inner, begin in maps + [[0, 1, 1, 0]] * (2 - len(maps)):
                numbers += [size, length, inner, begin]
            rows, columns = torch.arange(3).view(3, 1), torch.arange(width).view(1, width)
            wanted = []
            for i in range(3 * width):
                index = first + i
                for size, length, inner, begin in maps:
                    index = (index // (inner * length) * size + begin + index // inner % length) * inner + index % inner
                wanted.append(mixed(stream ^ mixed(index & ((1 << 64) - 1))) >> 11)
            got = self.kernels(rows.double(), columns.double(), numbers, False)
            self.assertEqual(got.flatten().tolist(), [bits / (1 << 53) for bits in wanted])
            limit = wanted[below(len(wanted))] + below(2)
            got = self.kernels(rows.float(), columns.float(), numbers + [limit], True)
            self.assertEqual(got.flatten().tolist(), [float(bits < limit) for bits in wanted])

    def test_operators(self):
        """What operators draw by it is what they draw without."""
        for name, numbers in ("bernoulli.p", [0, 0.3]), ("rand", []), ("randn", []), ("uniform", [0, -1, 3]), ("exponential", [0, 2]):
            for kind in "f32", "f64", "bf16", "f16":
                for shape in [3, 5, 7], [2048, 64], [1 << 20 | 1], [0]:
                    asked = "aten::" + name, numbers, shape, kind, 12345, 6, 7
                    expected, before = _motley.draw(*asked), len(self.jiterator.calls)
                    with self.installed():
                        got = _motley.draw(*asked)
                    self.assertTrue(torch.equal(got, expected), asked)
                    self.assertEqual(len(self.jiterator.calls) > before, 0 not in shape)

    def test_one_call(self):
        before = len(self.jiterator.calls)
        with self.installed():
            _motley.draw("aten::bernoulli.p", [0, 0.1], [4096, 1024], "f32", 1, 2, 3)
        self.assertEqual(self.jiterator.calls[before:], [("motley_mask", 4096, 1024)])

    def test_training(self):
        """A step of the package, with dropout, whose executor calls it without Python's lock."""
        losses = []
        for kernels in None, self.kernels:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.4), nn.Linear(16, 4))
            data = torch.randn(12, 8), torch.randn(12, 4)
            dist = motley.distribute(
                model, data, nn.functional.mse_loss, ONE, device="cpu", optimizer=torch.optim.SGD(model.parameters(), 0.1)
            )
            before = len(self.jiterator.calls)
            with self.installed(kernels) if kernels else contextlib.nullcontext():
                losses.append([dist.train_step(*data) for _ in range(4)])
            self.assertEqual(len(self.jiterator.calls) > before, kernels is not None)
        self.assertEqual(*losses)

    def test_failure(self):
        """One line, once, and the numbers stay the same."""
        asked = "aten::rand", [], [500], "f64", 1, 2, 3
        expected, calls = _motley.draw(*asked), []

        def fails(source, numbers):
            calls.append(source)
            raise RuntimeError("source\nlog\nnvrtc: error: failed to open libnvrtc-builtins.so")

        with self.installed(_device_numbers.Kernels(fails)), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                self.assertTrue(torch.equal(_motley.draw(*asked), expected))
        self.assertEqual(len(calls), 1)
        self.assertEqual(
            [str(w.message) for w in said],
            ["[distribute] random numbers are drawn by many kernels instead of one, which is slower: nvrtc: error: failed to open "
             "libnvrtc-builtins.so"],
        )  # fmt: skip

    def test_out_of_memory(self):
        def full(source, numbers):
            raise RuntimeError("CUDA out of memory. Tried to allocate")

        with self.installed(_device_numbers.Kernels(full)), self.assertRaisesRegex(RuntimeError, "out of memory"):
            _motley.draw("aten::rand", [], [500], "f64", 1, 2, 3)


class Graphs(unittest.TestCase):
    def test_capture(self):
        """A CUDA graph would repeat the numbers of the step in which it was captured."""
        for dropout in 0.0, 0.4:
            model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout) if dropout else nn.Identity(), nn.Linear(16, 4))
            data = torch.randn(12, 8), torch.randn(12, 4)
            dist = motley.distribute(model, data, nn.functional.mse_loss, ONE, device="cpu", verify=False)
            dist(*data)
            whole = dist._group
            with unittest.mock.patch.object(whole, "device", "cuda:0"), unittest.mock.patch("torch.cuda.is_current_stream_capturing", lambda: True):
                if dropout:
                    with self.assertRaisesRegex(motley.UserError, "a CUDA graph would draw again at every replay"):
                        dist(*data)
                else:
                    with unittest.mock.patch.object(dist, "_ready", side_effect=KeyError("it goes on")), self.assertRaises(KeyError):
                        dist(*data)


if __name__ == "__main__":
    unittest.main()
