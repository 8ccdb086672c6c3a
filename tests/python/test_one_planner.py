"""motley.plan() and `motley plan` give the same plan for the same question."""

import json
import os
import subprocess
import tempfile
import unittest

import torch
import torch.nn.functional as F
from torch import nn

import motley

PROGRAM = os.path.join(os.environ["MOTLEY_BINARY_DIR"], "motley")
MIXED = """name: mixed
link: {bandwidth: 1 Gbps, latency: 20 us}
groups:
  - {name: a, link: {bandwidth: 10 Gbps, latency: 2 us}, devices: [{type: fast, count: 2}]}
  - {name: b, link: {bandwidth: 10 Gbps, latency: 2 us}, devices: [{type: slow, count: 2}]}
device_types:
  - {name: fast, flops: 80 GFLOPS, memory: 1 GiB, memory_bandwidth: 20 GB/s, overhead: 2 us}
  - {name: slow, flops: 30 GFLOPS, memory: 1 GiB, memory_bandwidth: 10 GB/s, overhead: 4 us}
"""


def perceptron():
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))
    return model, (torch.randn(16, 64), torch.randint(64, (16,)))


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(512, 10))
    return model, (torch.randn(16, 3, 8, 8), torch.randint(10, (16,)))


def attention():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 50), nn.Flatten(2))
    return nn.Sequential(*model, Last()), (torch.randint(50, (16, 6)), torch.randint(50, (16,)))


class Last(nn.Module):
    def forward(self, x):
        return x[:, -1]


QUESTIONS = [
    ({"engine": "spmd"}, "--engine spmd"),
    ({"engine": "pipeline"}, "--engine pipeline"),
    ({"engine": "grid"}, "--engine grid"),
    ({"engine": "auto"}, ""),
    ({"engine": "auto", "virtual_devices": 2}, "--virtual-devices 2"),
    ({"engine": "spmd", "segments": 2}, "--engine spmd --segments 2"),
    ({"engine": "spmd", "strategy": "dp-ev"}, "--engine spmd --strategy dp-ev"),
    ({"engine": "auto", "fix": "pp=2,dp=2"}, "--fix pp=2,dp=2"),
    ({"engine": "pipeline", "micro_batch": 4, "layers": 3}, "--engine pipeline --micro-batch 4 --layers 3"),
    ({"engine": "spmd", "optimizer": "sgd", "precision": "bf16"}, "--engine spmd --optimizer sgd --precision bf16"),
    ({"engine": "spmd", "memory_limit": False, "recompute": False, "seed": 3}, "--engine spmd --memory-limit off --recompute off --seed 3"),
]  # fmt: skip


class OnePlanner(unittest.TestCase):
    def compare(self, build):
        torch.manual_seed(0)
        model, example = build()
        graph = motley.capture(model, example, F.cross_entropy)
        with tempfile.TemporaryDirectory() as folder:
            names = [os.path.join(folder, name) for name in ("graph.json", "cluster.yaml", "theirs.json", "ours.json")]
            motley.save(graph, names[0])
            with open(names[1], "w", encoding="utf-8") as file:
                file.write(MIXED)
            for options, words in QUESTIONS:
                with self.subTest(words=words):
                    ours = motley.plan(graph, names[1], **options)
                    ours.save(names[3])
                    command = [PROGRAM, "plan", names[0], "--cluster", names[1], "--batch", "16", "--time-limit", "600", "-o", names[2],
                               *words.split()]
                    subprocess.run(command, check=True, capture_output=True)
                    plans = []
                    for name in names[2:]:
                        with open(name, encoding="utf-8") as file:
                            plans.append(json.load(file))
                        plans[-1].pop("model")  # the name of the file, and of the class
                    self.assertEqual(plans[0], plans[1])

    def test_perceptron(self):
        self.compare(perceptron)

    def test_convolutions(self):
        self.compare(convolutions)

    def test_attention(self):
        self.compare(attention)


class OfAModel(unittest.TestCase):
    def test_captures_by_itself(self):
        model, batch = perceptron()
        of_graph = motley.plan(motley.capture(model, batch, F.cross_entropy), MIXED)
        of_model = motley.plan(model, MIXED, example_inputs=batch, loss_fn=F.cross_entropy)
        self.assertEqual(str(of_model), str(of_graph))
        with self.assertRaisesRegex(motley.UserError, "needs example_inputs"):
            motley.plan(model, MIXED)
        with self.assertRaisesRegex(motley.UserError, "go with a model"):
            motley.plan(motley.capture(model, batch, F.cross_entropy), MIXED, loss_fn=F.cross_entropy)


if __name__ == "__main__":
    unittest.main()
