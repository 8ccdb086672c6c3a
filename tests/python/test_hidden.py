"""State of a model that is no buffer: counters, lists and tables that a forward pass changes."""

import copy
import time
import unittest

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support

class Hidden(unittest.TestCase):
    class Model(nn.Module):
        def __init__(self, forward):
            super().__init__()
            self.layer, self.steps, self.counts, self.history, self.table = nn.Linear(6, 4), 0, {"all": 0}, [], None
            self.function = forward

        def forward(self, x):
            return self.function(self, x)

    def train(self, forward, steps=3):
        batch = torch.randn(8, 6), torch.randint(4, (8,))
        model = self.Model(forward)
        dist = motley.distribute(model, batch, F.cross_entropy, support.ONE, "sgd")
        return [dist.train_step(*batch) for _ in range(steps)]

    def test_what_the_next_step_depends_on(self):
        """A captured graph cannot repeat it; distribute() does."""
        def counted(m, x):
            m.steps += 1
            return m.layer(x) * m.steps

        def counted_in_a_table(m, x):
            m.counts["all"] += 1
            return m.layer(x) / m.counts["all"]

        def remembered(m, x):
            m.history.append(x.shape[0])
            return m.layer(x) + len(m.history)

        def first_step_is_special(m, x):
            y = m.layer(x) if m.steps else m.layer(x) * 0.1
            m.steps = 1
            return y

        for forward, name in ((counted, "steps"), (counted_in_a_table, "counts"), (remembered, "history"), (first_step_is_special, "steps")):
            with self.subTest(forward.__name__):
                batch = torch.randn(8, 6), torch.randint(4, (8,))
                plain = self.Model(forward)
                mine = copy.deepcopy(plain)
                with self.assertRaisesRegex(motley.CaptureError, f"Model.{name} changes from .* next step"):
                    motley.capture(mine, batch, F.cross_entropy)
                optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, mine)]
                dist = motley.distribute(mine, batch, F.cross_entropy, support.ONE, optimizers[1])
                for wanted in support.plain_training(plain, F.cross_entropy, [batch] * 5, optimizers[0]):
                    self.assertAlmostEqual(dist.train_step(*batch), wanted, places=5)
                self.assertEqual((mine.steps, mine.counts, mine.history), (plain.steps, plain.counts, plain.history))

    def test_what_it_does_not_depend_on_costs_a_capture(self):
        def counted(m, x):
            m.steps += 1
            m.counts["all"] += 1
            return m.layer(x)

        with self.assertWarnsRegex(UserWarning, "Model.steps changes from 7 to 8 in the forward pass, so that the step is captured"):
            self.train(counted, 9)

    def test_tables_made_on_the_way_are_fine(self):
        def cached(m, x):
            if m.table is None or m.steps != x.shape[1]:
                m.table, m.steps = torch.arange(x.shape[1]) * 0.1, x.shape[1]
            return m.layer(x + m.table)

        self.assertEqual(len(set(self.train(cached))), 3)

    def test_a_model_that_is_another_each_time(self):
        with self.assertRaisesRegex(motley.UserError, "another one each time the plain model runs"):
            self.train(lambda m, x: m.layer(x) * (1 + time.perf_counter_ns() % 1000))


if __name__ == "__main__":
    unittest.main()
