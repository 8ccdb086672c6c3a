"""motley.discover on emulated clusters: what it finds is what their files set; files that plans can be made with."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

import random_clusters

BUILD = os.environ["MOTLEY_BINARY_DIR"]
MOTLEY = os.path.join(BUILD, "motley")


def motley(*words):
    return subprocess.run([MOTLEY, *words], capture_output=True, text=True, timeout=120)


class Discover(unittest.TestCase):
    def test_links_and_devices_are_those_of_the_file(self):
        for seed in (3, 4):
            text, truth = random_clusters.random_cluster(seed)
            # Wider than what is measured alone (bench/discover_bench.py), and once more where
            # something else held the machine: a mistake is there both times.
            for attempt in ("first", "second"):
                with tempfile.TemporaryDirectory() as folder:
                    report, _ = random_clusters.discovered(MOTLEY, sys.executable, text, folder, "--no-profile")
                errors = random_clusters.errors(truth, report, report["flops"])
                wrong = [f"{what} {error:+.0%}" for what, error in errors if abs(error) >= 0.25]
                if not wrong:
                    break
            self.assertEqual(wrong, [], f"seed {seed}, {attempt} attempt")

    def test_a_plan_is_made_with_the_files(self):
        text, _ = random_clusters.random_cluster(1)
        with tempfile.TemporaryDirectory() as folder:
            report, found = random_clusters.discovered(MOTLEY, sys.executable, text, folder)
            self.assertLess(report["seconds"], 60)
            profile = found.replace(".yaml", ".profile")
            plan = motley("plan", "mlp", "--cluster", found, "--profile", profile, "--batch", "32", "--json")
            self.assertEqual(plan.returncode, 0, plan.stderr)
            self.assertGreater(json.loads(plan.stdout)["predicted_step_s"], 0)
            self.assertEqual(sorted(os.listdir(folder)), ["found.profile", "found.yaml", "set.yaml"])

    def test_alone_and_refusals(self):
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run(
                [sys.executable, "-m", "motley.discover", "-o", os.path.join(folder, "c.yaml"), "--no-profile"],
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            self.assertEqual(run.returncode, 0, run.stderr)
            self.assertIn("rank 0", run.stdout)
            self.assertEqual(motley("plan", "mlp", "--cluster", os.path.join(folder, "c.yaml"), "--batch", "8").returncode, 0)
            run = subprocess.run(
                [sys.executable, "-m", "motley.discover", "-o", os.path.join(folder, "none", "c.yaml")],
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            self.assertEqual(run.returncode, 2)
            self.assertEqual(len(run.stderr.splitlines()), 1, run.stderr)
            self.assertIn("none", run.stderr)
        run = subprocess.run([sys.executable, "-m", "motley.discover", "-o", "x", "--device", "cuda"], capture_output=True, text=True)
        self.assertEqual((run.returncode, len(run.stderr.splitlines())), (2, 1), run.stderr)


if __name__ == "__main__":
    unittest.main()
