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

    def test_messages(self):
        x = torch.randn(8, 6)
        mask = torch.ones(6)
        graph = motley.capture(nn.Linear(6, 6), (x, mask), lambda y, m: (y * m).mean())
        with self.assertRaisesRegex(motley.UserError, "targets is \\[6\\]; a pipeline takes batches in parts"):
            motley.plan(graph, support.CLUSTER, engine="pipeline")
        with self.assertRaisesRegex(motley.UserError, "engine is 'fast'; give 'spmd'"):
            motley.plan(graph, support.CLUSTER, engine="fast")
        with self.assertRaisesRegex(motley.UserError, "ratios are shares of engine='spmd'"):
            motley.plan(graph, support.CLUSTER, engine="grid", ratios=[1, 1, 1])
        with tempfile.TemporaryDirectory() as folder:
            motley.save(graph, f"{folder}/graph.json")
            with self.assertRaisesRegex(motley.UserError, "a graph from a file has one batch"):
                motley.plan(motley.load(f"{folder}/graph.json"), support.CLUSTER, engine="grid")


if __name__ == "__main__":
    unittest.main()
