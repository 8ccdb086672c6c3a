"""The state of a model put together by one worker alone, whatever the others do."""

import os
import subprocess
import sys
import unittest

import support

WORKER = os.path.join(support.HERE, "state_worker.py")


class State(unittest.TestCase):
    def test_one_worker_alone(self):
        output = support.launch(3, WORKER)
        done = [line.split()[1] for line in output.splitlines() if line.startswith("done")]
        self.assertEqual(
            done,
            ["one_alone", "ordinary_optimizer_calls", "own_steps", "between_forward_and_step", "evaluation",
             "load_after_state", "dropped", "by_the_model", "changed_in_place", "at_the_end"],
        )  # fmt: skip
        self.assertIn("the others had ended", output)

    def test_a_worker_that_fails_is_missed(self):
        # Without torchrun, which would end the others by itself.
        port = str(support.free_port())
        processes = [
            subprocess.Popen(
                [sys.executable, WORKER, "one_fails"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=dict(os.environ, RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1"),
            )
            for rank in range(3)
        ]  # fmt: skip
        said = [process.communicate(timeout=120) for process in processes]
        self.assertIn("a worker's own mistake", said[2][1])
        self.assertIn("lost 0 rank 0 asked rank 2 for its part of the state", said[0][0], said[0][1])
        self.assertIn("lost 1", said[1][0], said[1][1])
        self.assertEqual([process.returncode for process in processes], [0, 0, 1])

    def test_a_worker_that_ends_early_is_missed(self):
        output = support.launch(3, WORKER, "one_ends_early")
        self.assertIn("lost 0", output)
        self.assertIn("lost 1", output)


if __name__ == "__main__":
    unittest.main()
