"""pip install from the source tree, without a network: into a virtual environment, as docs/python.md says, and into a folder."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import support

ROOT = os.path.dirname(os.path.dirname(support.HERE))
EXAMPLE = """
import motley, torch
from torch import nn
x = torch.randn(4, 3)
g = motley.capture(nn.Linear(3, 3), (x, x), nn.functional.mse_loss)
cluster = "name: one\\nlink: {bandwidth: 1 Gbps, latency: 1 us}\\ngroups: [{name: m, link: {bandwidth: 1 Gbps, latency: 1 us}, devices: [{type: p}]}]\\ndevice_types:\\n" \\
          "  - {name: p, flops: 1 GFLOPS, memory: 1 GiB, memory_bandwidth: 1 GB/s, overhead: 1 us}\\n"
d = motley.distribute(nn.Linear(3, 3), (x, x), nn.functional.mse_loss, cluster, "sgd")
losses = [d.train_step(x, x) for _ in range(3)]
assert losses[2] < losses[0], losses
print(motley.__file__, len(motley.plan(g, 'hap-a100-p100', all_devices=True).ratios))
"""


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, **options)


class Install(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        # pip leaves its traces in the source tree, so it gets one of its own; the build folder is used again.
        self.tree = os.path.join(self.folder, "motley")
        os.makedirs(self.tree)
        for name in ("pyproject.toml", "setup.py", "CMakePresets.json", "LICENSE"):
            shutil.copy2(os.path.join(ROOT, name), self.tree)
        for name in ("python", "clusters"):
            shutil.copytree(os.path.join(ROOT, name), os.path.join(self.tree, name))
        for name in ("CMakeLists.txt", "cmake", "src", "tests", "bench", "docs", "examples"):
            os.symlink(os.path.join(ROOT, name), os.path.join(self.tree, name))
        self.environment = dict(os.environ, MOTLEY_BUILD_DIR=os.environ["MOTLEY_BINARY_DIR"], MOTLEY_SOURCE_DIR=ROOT)
        self.environment.pop("PYTHONPATH")

    def works(self, python, where, **environment):
        done = run([python, "-c", EXAMPLE], env={**self.environment, **environment}, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(os.path.realpath(done.stdout.split()[0]).startswith(os.path.realpath(where)), done.stdout)
        self.assertTrue(done.stdout.strip().endswith(" 4"), done.stdout)

    def test_virtual_environment(self):
        """As documented; the interpreter of the environment sees Debian's torch."""
        where = os.path.join(self.folder, "environment")
        done = run([sys.executable, "-m", "venv", "--system-site-packages", where], env=self.environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        python = os.path.join(where, "bin", "python")
        done = run(
            [python, "-m", "pip", "install", "--no-build-isolation", "--no-index", "--disable-pip-version-check", self.tree],
            env=self.environment,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.works(python, where)
        # Its own modules are run as documented.
        done = run([python, "-m", "motley.launch", "--help"], env=self.environment, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("--nproc_per_node", done.stdout)

    def test_target(self):
        target = os.path.join(self.folder, "installed")
        done = run(
            [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-index", "--no-deps",
             "--disable-pip-version-check", "--target", target, self.tree], env=self.environment,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.works(sys.executable, target, PYTHONPATH=target)


if __name__ == "__main__":
    unittest.main()
