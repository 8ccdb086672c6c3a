"""distribute() under torchrun: three workers, then two that go on from their checkpoint."""

import os
import tempfile
import unittest

import support


class Distribute(unittest.TestCase):
    def test_three_workers_and_then_two(self):
        with tempfile.TemporaryDirectory() as folder:
            output = support.launch(3, os.path.join(support.HERE, "distribute_worker.py"), folder)
            done = [line.split()[1] for line in output.splitlines() if line.startswith("done")]
            self.assertEqual(
                done,
                ["ddp_style", "twice", "groups", "states", "evaluation", "dropout", "splitter", "checkpoint",
                 "errors_everywhere", "beside_torch_distributed"],
            )  # fmt: skip
            output = support.launch(2, os.path.join(support.HERE, "resume_worker.py"), folder)
            self.assertEqual(sorted(output.split()), ["parted", "parted", "resumed"])


if __name__ == "__main__":
    unittest.main()
