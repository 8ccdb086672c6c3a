"""What workers say of their batches, at once and one step later; between workers it is tested by test_guard.py."""

import types
import unittest

import torch

from motley import _agreement, _motley
from test_guard import batch


class Agreement(unittest.TestCase):
    def test_digests(self):
        x, y = batch()
        large = torch.rand(4096, 64)
        base = _agreement.digest(3, 0, [x, y, large], [], False)
        self.assertEqual(base, _agreement.digest(3, 0, [x.clone(), y, large], [], False))
        other = x.clone()
        other[2, 1] += 1e-3
        for different, words in (
            (_agreement.digest(3, 0, [other, y, large], [], False), "different batches"),
            (_agreement.digest(3, 0, [x, y, large.roll(1, 0)], [], False), "different batches"),
            (_agreement.digest(3, 0, [x.double(), y, large], [], False), "different batches"),
            (_agreement.digest(3, 0, [x, y, large], [("inputs.t", 0.5)], False), "different batches"),
            (_agreement.digest(3, 1, [x, y, large], [], False), "changed on one"),
            (_agreement.digest(4, 0, [x, y, large], [], False), "another step"),
        ):
            self.assertIn(words, _agreement.differs(base, different))
        self.assertEqual(_agreement.differs(base, base), "")


    def test_elements_that_come_later(self):
        """The checksum of elements that were copied aside is that of the tensors as they were."""
        generator = torch.Generator().manual_seed(1)
        kinds = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128]
        shapes = [(), (0, 3), (5,), (7, 3), (300, 41), (3, 70000), (40000,), (65, 65, 65)]
        for number in range(60):
            tensors = []
            for _ in range(1 + number % 4):
                kind, shape = (some[int(torch.randint(len(some), (), generator=generator))] for some in (kinds, shapes))
                tensor = torch.randint(0, 100, shape, generator=generator).to(kind)
                tensors.append(tensor.transpose(0, -1) if number % 3 == 0 and tensor.dim() > 1 else tensor)
            if number % 2 == 0:
                tensors.append(torch.rand(100, 900, generator=generator, requires_grad=True))
            for step in (0, 1, 17, 123456 + number):
                at_once = _motley.checksum(tensors, 0, step)
                kept = [tensor.detach().clone() for tensor in tensors]
                coming = _agreement._Coming(tensors, step)
                with torch.no_grad():
                    for tensor in tensors:
                        tensor.zero_()
                self.assertEqual(coming.checksum(), at_once)
                self.assertEqual(coming.checksum(7), coming.checksum(7))
                with torch.no_grad():
                    for tensor, before in zip(tensors, kept):
                        tensor.copy_(before)
                other = [tensor.detach().clone() for tensor in tensors]
                largest = max(other, key=torch.Tensor.numel)
                if largest.numel() > 0:
                    flat = largest.as_strided((largest.numel(),), (1,))
                    at = int(torch.randint(flat.numel(), (), generator=generator))
                    flat[at] = (flat[at] == 0).to(flat.dtype)
                    same = _motley.checksum(other, 0, step) == at_once
                    self.assertEqual(_agreement._Coming(other, step).checksum() == at_once, same)

        there = [torch.empty(300, 300, device="meta").t(), torch.empty(5, device="meta", dtype=torch.bool)]
        self.assertEqual([part.shape for part in _motley.Samples(there, 3).parts()], [(4 * 300 + 5,)], "no element is asked for")

    def test_what_is_said_of_batches(self):
        x, y, rows = *batch(), torch.zeros(2, 3)
        alone = _agreement.Batches(types.SimpleNamespace(size=1, device="cuda:0"))
        alone.take(3, ["no tensor: nobody looks at it"], [], [None], False)
        self.assertEqual(alone.digest(3, 1), alone.digest(3, 1))
        streams, capturing = _agreement.has_streams, _agreement.capturing
        self.assertEqual([streams(device) for device in ("cpu", "meta", "cuda:1")], [False, False, True])
        group = types.SimpleNamespace(size=2, device="cpu")
        at_once = _agreement.Batches(group)
        _agreement.has_streams = lambda device: True
        try:
            one, two = _agreement.Batches(group), _agreement.Batches(group)

            def taken(step, mine, theirs, rows=False):
                one.take(step, mine, [("t", 0.5)], [y], rows)
                two.take(step, theirs, [("t", 0.5)], [y], False)
                self.assertEqual(one.step, two.step)
                return one.step, _agreement.differs(one.digest(step, 0), two.digest(step, 0))

            self.assertEqual(taken(5, [x], [y]), (5, ""))
            self.assertIn("changed on one", _agreement.differs(one.digest(5, 0), two.digest(5, 1)))
            self.assertIn("another step", _agreement.differs(one.digest(5, 0), two.digest(6, 0)))
            self.assertEqual(taken(6, [x], [x]), (5, _agreement.OTHER_BATCH))
            self.assertEqual(taken(7, [rows], [x], True), (6, ""))
            self.assertEqual(taken(8, [x], [y]), (7, ""))
            _agreement.capturing = lambda: True
            self.assertEqual(taken(9, [y], [x]), (9, ""))
            self.assertEqual(one.count, 4)
            _agreement.capturing = capturing
            self.assertEqual(taken(10, [x], [x]), (8, _agreement.OTHER_BATCH))
            at_once.take(10, [x], [("t", 0.5)], [y], False)
            self.assertEqual(_agreement.differs(at_once.digest(10, 0), two.digest(10, 0)), "")
            two.take(11, [y], [("t", 0.5)], [y], False)
            self.assertEqual(at_once.digest(10, 0) & _agreement._BATCH, two.digest(11, 0) & _agreement._BATCH)
            self.assertEqual(two.known(2), one.known(2))
            self.assertIsNone(two.known(1))
        finally:
            _agreement.has_streams, _agreement.capturing = streams, capturing


if __name__ == "__main__":
    unittest.main()
