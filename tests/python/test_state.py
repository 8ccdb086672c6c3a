"""The state of a model put together by one worker alone, whatever the others do."""

import os
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
             "load_after_state", "dropped", "at_the_end"],
        )  # fmt: skip
        self.assertIn("the others had ended", output)

    def test_a_worker_that_fails_is_missed(self):
        with self.assertRaises(AssertionError) as caught:  # the launch fails with the worker
            support.launch(3, WORKER, "one_fails")
        text = str(caught.exception)
        self.assertIn("a worker's own mistake", text)
        self.assertIn("lost 0 rank 0 asked rank 2 for its part of the state", text)
        self.assertIn("lost 1", text)

    def test_a_worker_that_ends_early_is_missed(self):
        output = support.launch(3, WORKER, "one_ends_early")
        self.assertIn("lost 0", output)
        self.assertIn("lost 1", output)


if __name__ == "__main__":
    unittest.main()
