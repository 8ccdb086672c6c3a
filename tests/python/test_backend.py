"""Plans over process groups that torch.distributed makes: equal to plain PyTorch, or refused in one line."""

import os
import subprocess
import tempfile
import unittest

import torch

import motley
import support

NEW = hasattr(getattr(torch._C, "_distributed_c10d", None), "_resolve_process_group")


class Backends(unittest.TestCase):
    @unittest.skipUnless(NEW, "needs torch 2.4")
    def test_equal_to_plain_pytorch(self):
        cases = [f"{name}:{engine}" for name in ("gloo", "other", "parts", "bound") for engine in ("spmd", "pipeline")]
        said = support.launch(3, os.path.join(support.HERE, "backend_worker.py"), *cases)
        for case in cases:
            self.assertIn("done " + case.replace(":", " "), said)

    @unittest.skipUnless(NEW, "needs torch 2.4")
    def test_two_fabrics_and_one_between(self):
        said = support.launch(4, os.path.join(support.HERE, "backend_worker.py"), "fabrics:spmd", "fabrics:pipeline")
        for engine in ("spmd", "pipeline"):
            self.assertIn(f"done fabrics {engine}", said)

    @unittest.skipUnless(NEW, "needs torch 2.4")
    def test_discovery_over_a_fabric_inside_of_machines(self):
        with tempfile.TemporaryDirectory() as folder:
            file, plan = (os.path.join(folder, name) for name in ("found.yaml", "plan.json"))
            said = support.launch(4, os.path.join(support.HERE, "discover_worker.py"), file)
            self.assertIn("done inside", said)
            with open(file, encoding="utf-8") as found:
                text = found.read()
            self.assertEqual(text.count("backend: fabric"), 2, text)
            self.assertRegex(text, "(?m)^backend: gloo")
            subprocess.run([os.path.join(os.environ["MOTLEY_BINARY_DIR"], "motley"), "plan", "mlp", "--cluster", file, "--batch", "8",
                            "-o", plan], check=True, capture_output=True)  # fmt: skip

    def test_a_backend_that_is_not_for_the_device_is_refused(self):
        model = torch.nn.Linear(2, 2)
        batch = torch.zeros(4, 2), torch.zeros(4, 2)
        cluster = support.ONE if "\n" in support.ONE else open(support.ONE, encoding="utf-8").read()
        with self.assertRaisesRegex(motley.UserError, "nccl"):
            motley.distribute(model, batch, torch.nn.functional.mse_loss, "backend: nccl\n" + cluster, device="cpu")

    def test_a_plan_file(self):
        program = os.path.join(os.environ["MOTLEY_BINARY_DIR"], "motley")
        with tempfile.TemporaryDirectory() as folder:
            plan = os.path.join(folder, "plan.json")
            for precision in ("fp32", "fp16"):
                subprocess.run([program, "plan", "mlp:layers=2,hidden=16,in=8,classes=4", "--cluster", support.CLUSTER, "--batch",
                                "12", "--engine", "spmd", "--precision", precision, "-o", plan], check=True, capture_output=True)  # fmt: skip
                if precision == "fp32":
                    backend = ["--backend", "gloo"] if NEW else []
                    said = support.launch(3, "-m", "motley.run", plan, "--steps", 3, *backend)
                    self.assertRegex(said, "^3 steps; median step .* predicted")
                else:
                    with self.assertRaisesRegex(AssertionError, "precision is f16, which trains only with loss scaling"):
                        support.launch(3, "-m", "motley.run", plan)

    def test_what_is_not_there_is_refused(self):
        model = torch.nn.Linear(2, 2)
        batch = torch.zeros(4, 2), torch.zeros(4, 2)
        with self.assertRaisesRegex(motley.UserError, "backend.*'smoke'"):
            motley.distribute(model, batch, torch.nn.functional.mse_loss, support.ONE, backend="smoke")


if __name__ == "__main__":
    unittest.main()
