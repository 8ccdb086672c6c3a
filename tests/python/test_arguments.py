"""Arguments that nobody can mean: one line that says what to give."""

import unittest

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support

GIVEN = {
    "seed": (-1, 1.5, "a", True, 1 << 63), "threads": (0, 1.5), "micro_batch": (0, "2"), "memory_limit": (3, None), "recompute": ("no",),
    "all_devices": ("yes",), "fix": ({"pp": 2},), "strategy": (3,), "ratios": ("1", [float("nan")], [0], [-1]), "graph": (3,),
    "time_limit": (0, float("nan")), "redundancy": (2, -1, "1", True, 1),
}  # fmt: skip


class Arguments(unittest.TestCase):
    def test_of_plan(self):
        graph = motley.capture(nn.Linear(3, 4), (torch.randn(6, 3), torch.arange(6) % 4), F.cross_entropy)
        for name, values in GIVEN.items():
            for value in values:
                with self.subTest(name, value=value), self.assertRaisesRegex(motley.UserError, rf"^\[plan\] {name} (is|are) .*; give [^\n]*$"):
                    motley.plan(**{"graph": graph, "cluster": support.ONE, name: value})

    def test_of_others(self):
        batch = torch.randn(6, 3), torch.arange(6) % 4
        for call in (
            lambda: motley.simulate(3),
            lambda: motley.load(3),
            lambda: motley.distribute(nn.Linear(3, 4), batch, F.cross_entropy, support.ONE, "sgd", seed=-1),
            lambda: motley.distribute(nn.Linear(3, 4), batch, F.cross_entropy, support.ONE, "sgd", emulate="no"),
            lambda: motley.distribute(nn.Linear(3, 4), batch, F.cross_entropy, support.ONE, "sgd", verify=2),
            lambda: motley.distribute(nn.Linear(3, 4), batch, F.cross_entropy, support.ONE, "sgd", redundancy=1),
        ):
            with self.assertRaisesRegex(motley.UserError, r"^\[\w+\] \w+ is [^\n]*; give [^\n]*$"):
                call()


if __name__ == "__main__":
    unittest.main()
