"""A wheel, from the source tree, in a fresh environment with torch alone."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch

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


@unittest.skipUnless(importlib.util.find_spec("scikit_build_core"), "there is no scikit-build-core in this environment")
class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # The build folder is used again.
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", cls.folder, ROOT,
                   f"--config-settings=build-dir={os.environ['MOTLEY_BINARY_DIR']}", "--config-settings=cmake.define.MOTLEY_TESTS=ON"]  # fmt: skip
        done = run(command, env=cls.environment)
        assert done.returncode == 0, done.stdout + done.stderr
        (cls.wheel,) = [os.path.join(cls.folder, name) for name in os.listdir(cls.folder) if name.endswith(".whl")]
        cls.where = os.path.join(cls.folder, "environment")
        subprocess.run([sys.executable, "-m", "venv", cls.where], check=True)
        cls.python = os.path.join(cls.where, "bin", "python")
        done = run([cls.python, "-m", "pip", "install", "-q", f"torch=={torch.__version__.split('+')[0]}"], env=cls.environment)
        if done.returncode != 0:
            raise unittest.SkipTest("the Python package index does not answer")
        done = run([cls.python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", cls.wheel], env=cls.environment)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_trains(self):
        done = run([self.python, "-c", EXAMPLE], env=self.environment, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(os.path.realpath(done.stdout.split()[0]).startswith(os.path.realpath(self.where)), done.stdout)
        self.assertTrue(done.stdout.strip().endswith(" 4"), done.stdout)

    def test_program(self):
        """The program is on the path, knows the clusters, and runs plans."""
        program, plan = os.path.join(self.where, "bin", "motley"), os.path.join(self.folder, "plan.json")
        done = run([program, "plan", "mlp", "--cluster", "hap-a100-p100", "--batch", "64", "-o", plan], env=self.environment, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        done = run([program, "verify", plan], env=self.environment, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_examples(self):
        done = run([self.python, "-m", "motley.launch", "--nproc_per_node=3", os.path.join(ROOT, "examples", "02_after.py")],
                   env=self.environment, cwd=self.folder)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_no_library_of_the_system_is_missing(self):
        """What the extension needs comes in the wheel, but for torch, libc and libstdc++."""
        site = subprocess.check_output([self.python, "-c", "import motley; print(motley.__path__[0])"], text=True, env=self.environment, cwd=self.folder)
        files = [os.path.join(site.strip(), "bin", name) for name in ("motley", "motley-torch")]
        for file in files:
            for line in subprocess.check_output(["ldd", file], text=True).splitlines():
                name, _, place = line.strip().partition(" => ")
                if name.split(".so")[0] in ("libClp", "libmetis", "libfmt", "libspdlog", "libyaml-cpp", "libCoinUtils"):
                    self.assertIn(os.path.realpath(site.strip()), os.path.realpath(place.split(" ")[0]))


if __name__ == "__main__":
    unittest.main()
