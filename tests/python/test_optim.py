"""Optimizers, schedulers and gradients on three unequal workers."""

import os
import subprocess
import tempfile
import time
import unittest

import torch

import motley
import optimizers
import support
from motley import _optim

WORKER = os.path.join(support.HERE, "optim_worker.py")


class Narrowed(torch.nn.Module):
    def forward(self, x):
        return x.float()


class Cases(unittest.TestCase):
    def run_cases(self, *cases):
        with tempfile.TemporaryDirectory() as folder:
            output = support.launch(3, WORKER, folder, *cases)
        self.assertEqual([line.split()[1] for line in output.splitlines() if line.startswith("done")], list(cases))


class Fused(Cases):
    def test_steps_in_one_kernel(self):
        self.run_cases("fused")


class Optimizers(Cases):
    def test_optimizers(self):
        self.run_cases("of_torch", "written", "not_possible", "more_states", "groups")

    def test_the_users_optimizer(self):
        self.run_cases("schedulers", "stays_live", "having_stepped", "checkpoints")

    def test_gradients(self):
        self.run_cases("in_place", "norms", "own_steps")

    def test_scaled_losses_and_16_bits(self):
        self.run_cases("scaler", "precision")

    def test_precision_as_the_program_plans_it(self):
        model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
        x = torch.randn(64, 512)
        graph = motley.capture(model, (x, x), torch.nn.functional.mse_loss)
        program = os.path.join(os.environ["MOTLEY_BINARY_DIR"], "motley")
        with tempfile.TemporaryDirectory() as folder:
            file, made = os.path.join(folder, "graph.json"), os.path.join(folder, "plan.json")
            motley.save(graph, file)
            for precision in ("fp32", "bf16", "fp16"):
                ours = motley.plan(graph, "hap-a100-p100", precision=precision, memory_limit=False)
                subprocess.run(
                    [program, "plan", file, "--cluster", "hap-a100-p100", "--batch", "64", "--engine", "spmd", "--precision", precision,
                     "--memory-limit", "off", "-o", made], check=True, capture_output=True,
                )  # fmt: skip
                theirs = motley.load(made)
                self.assertEqual(ours.precision, theirs.precision)
                self.assertEqual(ours.check(False), [])
                self.assertAlmostEqual(ours.predicted_step_s / theirs.predicted_step_s, 1, places=9)
        with self.assertRaisesRegex(motley.UserError, "precision is 'bf32'"):
            motley.plan(graph, "hap-a100-p100", precision="bf32")
        pair = torch.nn.Sequential(torch.nn.Linear(512, 4), Narrowed(), torch.nn.Linear(4, 4))
        pair[0].double()
        graph = motley.capture(pair, (x.double(),), lambda y: y.square().mean())
        with self.assertRaisesRegex(motley.UserError, "parameters of one type"):
            motley.plan(graph, "hap-a100-p100", precision="bf16")

    def test_time_limit(self):
        """Of all engines together, in seconds of CPU, which other processes do not change."""
        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True), 6)
        x = torch.randn(64, 16, 64)
        graph = motley.capture(model, (x, x), torch.nn.functional.mse_loss)
        for limit in (0.01, 0.3, 1, None):  # None: 5
            before = time.process_time()
            try:
                plan = motley.plan(graph, "hap-64", engine="auto", time_limit=limit)
                self.assertEqual(plan.check(), [])
            except motley.NoPlanError as error:
                self.assertIn("longer time_limit", str(error))
            self.assertLess(time.process_time() - before, ((limit or 5) + 0.5) * os.cpu_count() + 1)
        for wrong in (0, -1, float("nan"), "1"):
            with self.assertRaisesRegex(motley.UserError, "time_limit is"):
                motley.plan(graph, "hap-64", time_limit=wrong)

    def test_states_are_counted(self):
        model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.LayerNorm(200), torch.nn.Conv2d(3, 8, 3))
        for make, by_element, states in (
            (lambda p: torch.optim.SGD(p, 0.1), True, 0), (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), True, 1),
            (lambda p: torch.optim.AdamW(p), True, 2), (lambda p: torch.optim.Adam(p, amsgrad=True), True, 3),
            (lambda p: torch.optim.Adagrad(p), True, 1), (lambda p: optimizers.Lion(p), True, 1),
            (lambda p: optimizers.Lookahead(torch.optim.AdamW(p)), True, 3), (lambda p: optimizers.LAMB(p), False, 2),
            (lambda p: optimizers.Adafactor(p, least=128, clip=False), False, 1),
        ):  # fmt: skip
            parameters = list(model.parameters())
            before = [(p._version, p.detach().clone()) for p in parameters]
            torch.manual_seed(3)
            optimizer = make(parameters)
            found = _optim.tried(optimizer)
            self.assertEqual((found.by_element, round(found.states, 6)), (by_element, states), optimizer)
            drawn = torch.rand(1)
            torch.manual_seed(3)
            self.assertEqual(drawn, torch.rand(1))
            for p, (version, value) in zip(parameters, before):
                self.assertEqual(p._version, version)
                self.assertIsNone(p.grad)
                self.assertTrue(torch.equal(p, value))
            self.assertFalse(any("exp_avg" in values for values in optimizer.state.values()))


if __name__ == "__main__":
    unittest.main()
