"""Plans over process groups that torch.distributed makes: equal to plain PyTorch, or refused in one line."""

import os
import unittest

import torch

import motley
import support

NEW = hasattr(getattr(torch._C, "_distributed_c10d", None), "_resolve_process_group")


class Backends(unittest.TestCase):
    @unittest.skipUnless(NEW, "needs torch 2.4")
    def test_equal_to_plain_pytorch(self):
        cases = [f"{name}:{engine}" for name in ("gloo", "other", "parts") for engine in ("spmd", "pipeline")]
        said = support.launch(3, os.path.join(support.HERE, "backend_worker.py"), *cases)
        for case in cases:
            self.assertIn("done " + case.replace(":", " "), said)

    def test_what_is_not_there_is_refused(self):
        model = torch.nn.Linear(2, 2)
        batch = torch.zeros(4, 2), torch.zeros(4, 2)
        with self.assertRaisesRegex(motley.UserError, "backend.*'smoke'"):
            motley.distribute(model, batch, torch.nn.functional.mse_loss, support.ONE, backend="smoke")


if __name__ == "__main__":
    unittest.main()
