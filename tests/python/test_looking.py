"""What people look at a step with: profilers, debuggers, anomaly detection and assertions."""

import cProfile
import sys
import unittest
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support


def model():
    return nn.Linear(6, 3)


def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g)


class Branches(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class Asserts(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        assert torch.isfinite(y).all(), "a number is too large"
        return y


class AssertsOfShapes(nn.Linear):
    def forward(self, x):
        assert x.shape[0] == 7
        return super().forward(x)


class Assertions(unittest.TestCase):
    def test_about_numbers(self):
        with self.assertWarnsRegex(UserWarning, r"looking.py:\d+: assert torch.isfinite\(y\).all\(\), .* left out of the graph"):
            graph = motley.capture(Asserts(6, 3), batch(), F.cross_entropy)
        self.assertNotIn("aten::isfinite", graph.ops)
        with self.assertRaisesRegex(AssertionError, "too large"):
            Asserts(6, 3)(torch.full((2, 6), float("inf")))  # made as before, and in the first steps
        x, y = batch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist = motley.distribute(Asserts(6, 3), batch(), F.cross_entropy, support.ONE)
        with self.assertRaisesRegex(AssertionError, "too large"):
            dist(x / 0.0, y)

    def test_about_shapes(self):
        with self.assertRaises(AssertionError):
            motley.capture(AssertsOfShapes(6, 3), batch(), F.cross_entropy)


class Anomalies(unittest.TestCase):
    def test_are_not_looked_for(self):
        with torch.autograd.detect_anomaly():
            dist = motley.distribute(model(), batch(), F.cross_entropy, support.ONE)
            with self.assertWarnsRegex(UserWarning, "detect_anomaly"):
                dist(*batch())


def after_it():
    pass


def calls_seen_by(tool):
    """Names of the functions that a profiler or debugger written in Python sees."""
    seen = []
    tool(lambda frame, event, _: seen.append(frame.f_code.co_name))
    return seen


class Profilers(unittest.TestCase):
    """While a step is captured the calls of this thread are motley's to see; afterwards a profiler sees them again."""

    def distributed(self):
        return motley.distribute(model(), batch(), F.cross_entropy, support.ONE)

    def test_of_c(self):
        profile = cProfile.Profile(builtins=False)  # with them, Python 3.12's and newer ones lose callers, also of other modules
        profile.enable()
        dist = self.distributed()
        after_it()
        profile.disable()
        dist(*batch())
        names = [entry.code.co_name for entry in profile.getstats() if hasattr(entry.code, "co_name")]
        self.assertIn("distribute", names)
        self.assertIn("after_it", names)

    def test_of_torch(self):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profile:
            self.distributed()
            after_it()
            torch.zeros(3).cos()
        self.assertIn("aten::cos", {event.name for event in profile.events()})

    def test_of_python(self):
        seen = calls_seen_by(sys.setprofile)
        before = sys.getprofile()
        try:
            self.distributed()
            self.assertIs(sys.getprofile(), before)
            after_it()
        finally:
            sys.setprofile(None)
        self.assertIn("after_it", seen)

    def test_debuggers(self):
        seen = calls_seen_by(sys.settrace)
        before = sys.gettrace()
        try:
            with self.assertRaisesRegex(motley.CaptureError, "reads a number"):
                motley.capture(Branches(6, 3), batch(), F.cross_entropy)
            self.assertIs(sys.gettrace(), before)
            after_it()
        finally:
            sys.settrace(None)
        self.assertIn("after_it", seen)


class Memory(unittest.TestCase):
    def trained(self, mine):
        plain = nn.Linear(6, 3)
        plain.load_state_dict({name: tensor.clone() for name, tensor in mine.state_dict().items()})
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)
        dist = motley.distribute(mine, batch(), F.cross_entropy, support.ONE, optimizer)
        theirs = torch.optim.SGD(plain.parameters(), 0.1)
        for _ in range(3):
            theirs.zero_grad()
            F.cross_entropy(plain(batch()[0]), batch()[1]).backward()
            theirs.step()
            dist.train_step(*batch())
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], tensor)
        return {name: piece.data_ptr() for name, piece in dist.named_parameters()}

    def test_a_parameter_lies_where_its_piece_does(self):
        mine = model()
        pieces = self.trained(mine)
        self.assertEqual({name: p.data_ptr() for name, p in mine.named_parameters()}, pieces)

    def test_parameters_of_one_memory_stay_there(self):
        mine, flat = model(), torch.randn(21)
        mine.weight.data, mine.bias.data = flat[:18].view(3, 6), flat[18:]
        pieces = self.trained(mine)
        self.assertEqual(mine.bias.data_ptr(), mine.weight.data_ptr() + 18 * 4)
        self.assertNotEqual(mine.weight.data_ptr(), pieces["weight"])


if __name__ == "__main__":
    unittest.main()
