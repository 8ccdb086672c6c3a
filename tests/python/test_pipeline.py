"""Pipeline plans of distribute() under torchrun, and what planning them asks of a model."""

import os
import tempfile
import unittest

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support


class Pipeline(unittest.TestCase):
    def test_training_on_stages(self):
        with tempfile.TemporaryDirectory() as folder:
            output = support.launch(3, os.path.join(support.HERE, "pipeline_worker.py"), folder)
            done = [line.split()[1] for line in output.splitlines() if line.startswith("done")]
            self.assertEqual(done, ["pipeline", "grid"])

    def test_losses(self):
        output = support.launch(3, os.path.join(support.HERE, "losses_worker.py"), "pipeline", "grid")
        self.assertIn("done", output)
        self.assertEqual(output.count("\nequal ") + output.startswith("equal "), 32)
        self.assertEqual(output.count("\nrefused "), 14)

    def test_the_fastest_engine_is_chosen(self):
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
        graph = motley.capture(nn.Sequential(*layers, nn.Linear(64, 10)), (x, y), F.cross_entropy)
        plans = {engine: motley.plan(graph, support.CLUSTER, engine=engine) for engine in ("spmd", "pipeline", "grid", "auto")}
        for plan in plans.values():
            self.assertEqual(plan.check(), [])
        steps = {engine: motley.simulate(plan)["step_s"] for engine, plan in plans.items()}
        self.assertAlmostEqual(steps["auto"], min(steps.values()))

    def test_a_graph_file_is_planned_for_pipelines_too(self):
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
        graph = motley.capture(nn.Sequential(*layers, nn.Linear(64, 10)), (x, y), F.cross_entropy)
        with tempfile.TemporaryDirectory() as folder:
            motley.save(graph, f"{folder}/graph.json")
            again = motley.load(f"{folder}/graph.json")
            self.assertEqual(str(again.at(8)), str(graph.at(8)))
            plans = [motley.plan(g, support.CLUSTER, engine="pipeline") for g in (graph, again)]
        self.assertEqual(*map(str, plans))

    def test_graph_files_are_as_true_as_the_model(self):
        """What grows in steps, from a least size on, or as a square or a root of the batch has one batch in its file."""
        sizes = {
            "tenth": lambda n: n // 10, "at least": lambda n: max(n, 24), "pairs": lambda n: n * (n - 1) // 2,
            "root": lambda n: int(n**0.5), "odd": lambda n: n + n % 2,
        }  # fmt: skip
        for name, size in sizes.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                model, x = nn.Linear(6, 1), torch.randn(20, 6)
                loss_fn = lambda y, size=size: (y.square().sum() * torch.ones(size(20), 1).sum()) * size(y.shape[0])  # noqa: E731
                graph = motley.capture(model, (x,), loss_fn)
                with self.assertWarnsRegex(UserWarning, "has the graph at batch 20 alone"):
                    motley.save(graph, f"{folder}/graph.json")
                again = motley.load(f"{folder}/graph.json")
                self.assertEqual(str(again), str(graph))
                self.assertFalse(hasattr(again, "at"))
        with tempfile.TemporaryDirectory() as folder:  # a scale of 1 / B is no such thing
            graph = motley.capture(nn.Linear(6, 1), (torch.randn(20, 6),), lambda y: y.square().sum() / y.shape[0])
            motley.save(graph, f"{folder}/graph.json")
            again = motley.load(f"{folder}/graph.json")
            for samples in (3, 7, 40, 1000):
                self.assertEqual(str(again.at(samples)), str(graph.at(samples)))

    def test_messages(self):
        x = torch.randn(8, 6)
        mask = torch.ones(6)
        graph = motley.capture(nn.Linear(6, 6), (x, mask), lambda y, m: (y * m).mean())
        self.assertEqual(motley.plan(graph, support.CLUSTER, engine="grid").check(), [])  # the mask is whole everywhere
        similar = motley.capture(nn.Linear(6, 6), (x, mask), lambda y, m: (y @ y.t()).mean())
        with self.assertRaisesRegex(motley.UserError, "the loss is not a sum over samples, since samples are mixed by node"):
            motley.plan(similar, support.CLUSTER, engine="pipeline")
        with self.assertRaisesRegex(motley.UserError, "no engine 'fast'; give one of auto, grid, spmd"):
            motley.plan(graph, support.CLUSTER, engine="fast")
        with self.assertRaisesRegex(motley.UserError, "ratios are shares of engine='spmd'"):
            motley.plan(graph, support.CLUSTER, engine="grid", ratios=[1, 1, 1])


if __name__ == "__main__":
    unittest.main()
