"""Profilers and debuggers around motley.distribute() and motley.capture()."""

import cProfile
import sys
import unittest

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
        profile = cProfile.Profile()
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


if __name__ == "__main__":
    unittest.main()
