"""After an error on one worker the others end with it."""

import os
import subprocess
import sys
import time
import unittest

import support

WORKER = os.path.join(support.HERE, "failing_worker.py")
SECONDS = 20  # that everything may take to end

# (what goes wrong, where, what is said)
WAYS = [
    ("capture", 0, "planted in the forward pass"), ("planning", 0, "lacks"), ("construction", 2, "planted in the construction"),
    ("optimizer", 1, "a parameter that the model has not"), ("exception", 2, "planted in the loop"),
    ("after forward", 0, "planted after"), ("quiet exit", 1, ""), ("hard exit", 1, ""), ("interrupt", 0, "KeyboardInterrupt"),
    ("operator", 2, "index out of range"), ("pipeline operator", 2, "index out of range"), ("evaluation", 1, "index out of range"),
    ("waiting thread", 1, "planted in the loop"), ("thread", 2, "planted in the loop"),
]  # fmt: skip


class Failures(unittest.TestCase):
    def test_all_end(self):
        for way, rank, words in WAYS:
            with self.subTest(way=way, rank=rank):
                command = [sys.executable, "-m", "motley.launch", "--nproc_per_node", "3", "--master_addr", "127.0.0.1",
                           "--master_port", str(support.free_port()), WORKER, way, str(rank)]  # fmt: skip
                done = subprocess.run(command, env=support.environment(), timeout=100, capture_output=True, text=True)
                ended = time.time()
                failing = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("failing")]
                if way != "thread":  # which does not decide how its process ends
                    self.assertNotEqual(done.returncode, 0)
                self.assertIn(words, done.stderr)
                self.assertTrue(failing, done.stderr)
                self.assertLess(ended - max(failing), SECONDS)


if __name__ == "__main__":
    unittest.main()
