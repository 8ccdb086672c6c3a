"""The guard where it compares with more digits than the plan computes in."""

import json
import re
import unittest
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import motley
from motley import _agree
from test_guard import batch, distributed, linear, sgd


def by_faulty_plan(plan, model, loss, data):
    """Trains by the plan with a constant 0.75 that is 0.7515."""
    text = json.loads(plan._native.text())
    faulty = [re.sub(r"0\.75\b", "0.7515", line) if "div.Tensor" in line else line for line in text["graph"]]
    assert faulty != text["graph"]
    text["graph"] = faulty
    plan = motley.Plan(motley._motley.parse_plan(json.dumps(text), "a plan"))
    checked, _agree._check_plan = _agree._check_plan, lambda *_: None
    try:
        return motley.distribute(model, data, loss, plan=plan, optimizer=sgd(model))
    finally:
        _agree._check_plan = checked


class ThirtyTwoBits(unittest.TestCase):
    """Where rounding turns a unit on or off gradients differ by more than rounding; the same step in 64 bits decides."""

    class Turned:
        """A worker whose gradients differ a little from the plan's."""

        def __init__(self, worker, share):
            self._worker, self._share = worker, share

        def __getattr__(self, name):
            return getattr(self._worker, name)

        def step(self, *given):
            loss, gradients = self._worker.step(*given)
            return loss, [gradient * (1 + self._share) for gradient in gradients]

    def trained(self, share):
        dist = distributed(nn.Sequential(linear(), nn.BatchNorm1d(2)).float(), data=[tensor.float() for tensor in batch()])
        dist._run.worker = self.Turned(dist._run.worker, share)
        dist.train_step(*(tensor.float() for tensor in batch()))

    def test_what_rounding_may_turn_passes_where_64_bits_are_equal(self):
        self.trained(1e-2)
        with self.assertRaisesRegex(motley.MismatchError, "the gradient differs by 2.0e-01"):
            self.trained(0.2)

    def test_a_small_fault_of_the_plan_does_not(self):
        data, model = [tensor.float() for tensor in batch()], linear().float()

        def loss(output, target):  # its value is that of the sound plan
            return F.mse_loss(output, target) + (output / 0.75).sum() - (output.detach() / 0.75).sum()

        dist = by_faulty_plan(distributed(model, loss, data).plan, model, loss, data)
        with self.assertRaises(motley.MismatchError):
            dist.train_step(*data)


class SixteenBits(unittest.TestCase):
    """Plans that compute in 16 bits are compared in 32, where a fault of a thousandth is seen."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = SixteenBits.body()

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.body(x)

    @staticmethod
    def body():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 2))

    @staticmethod
    def loss(output, target):
        return 0.5 * F.mse_loss(output.float(), target.float())

    def test_equal_and_planted(self):
        x, y = batch()
        for name, make, data, precision in (
            ("precision", self.body, (x, y), "bf16"),
            ("model", lambda: self.body().bfloat16(), (x.bfloat16(), y.bfloat16()), None),
            ("autocast", self.Cast, (x, y), None),
        ):
            with self.subTest(name):
                model = make()
                dist = distributed(model, self.loss, data, precision=precision)
                for _ in range(3):
                    dist.train_step(*data)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    self.assertEqual(dist.verify(*data), "")
                dist = by_faulty_plan(dist.plan, make(), self.loss, data)
                with self.assertRaisesRegex(motley.MismatchError, "computed in 32 bits"):
                    dist.train_step(*data)

    def test_a_model_that_converts_by_itself(self):
        class Converts(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = linear()

            def forward(self, x):
                return self.layer(x.bfloat16().float())

        dist = distributed(Converts())
        with self.assertWarnsRegex(UserWarning, "converts to 16 bits itself"):
            dist.train_step(*batch())


if __name__ == "__main__":
    unittest.main()
