"""Plans that leave a device out: three workers of which one is idle, the last or rank 0 itself."""

import os
import subprocess
import sys
import tempfile
import unittest

import support

WORKER = os.path.join(support.HERE, "idle_worker.py")
IDLE, USED = {"first": 0, "last": 2}, {"first": (1, 2), "last": (0, 1)}


class Idle(unittest.TestCase):
    def test_everything_works_with_a_worker_that_is_idle(self):
        for which in ("last", "first"):
            with self.subTest(which), tempfile.TemporaryDirectory() as folder:
                output = support.launch(3, WORKER, which, folder)
                done = [line.split()[1] for line in output.splitlines() if line.startswith("done")]
                self.assertEqual(
                    done,
                    ["training", "own_steps", "evaluation", "checkpoint", "splitter", "one_device", "given_plans", "emulated",
                     "at_the_end"],
                )  # fmt: skip
                self.assertIn("the others had ended", output)

    def said(self, which, case):
        """What each of three workers says, without torchrun, which would end the others by itself."""
        port = str(support.free_port())
        processes = [
            subprocess.Popen(
                [sys.executable, WORKER, which, os.devnull, case], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=dict(os.environ, RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1"),
            )
            for rank in range(3)
        ]  # fmt: skip
        said = [process.communicate(timeout=50) for process in processes]
        return [out for out, _ in said], [error for _, error in said], [process.returncode for process in processes]

    def test_a_worker_that_fails_is_missed(self):
        for which in ("last", "first"):
            with self.subTest(which):
                out, errors, codes = self.said(which, "one_fails")
                one, other = USED[which]
                self.assertIn("a worker's own mistake", errors[other])
                self.assertRegex(out[one], rf"lost {one} \[run\] rank {one} lost ranks?[ ,\d]* {other}[ ,\d]* during")
                self.assertIn(f"lost {IDLE[which]} [run] rank {IDLE[which]} lost rank", out[IDLE[which]])
                self.assertEqual(codes, [int(rank == other) for rank in range(3)])

    def test_an_idle_worker_that_ends_early_is_missed(self):
        for which in ("last", "first"):
            with self.subTest(which):
                out, errors, codes = self.said(which, "idle_ends_early")
                for rank in USED[which]:
                    self.assertIn(f"lost {rank} ", out[rank], errors[rank])
                self.assertEqual(codes, [0, 0, 0])


if __name__ == "__main__":
    unittest.main()
