"""A wheel, from the source tree, in a fresh environment with torch alone."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
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

TWO = """
import copy, motley, torch
from torch import nn
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
cluster = "name: two\\nlink: {bandwidth: 10 Gbps, latency: 1 us}\\ngroups: [{name: m, link: {bandwidth: 10 Gbps, latency: 1 us}, devices: [{type: p}, {type: q}]}]\\n" \\
          "device_types:\\n  - {name: p, flops: 10 MFLOPS, memory: 1 GiB, memory_bandwidth: 10 MB/s, overhead: 1 us}\\n" \\
          "  - {name: q, flops: 5 MFLOPS, memory: 1 GiB, memory_bandwidth: 5 MB/s, overhead: 1 us}\\n"
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
plain = copy.deepcopy(model)
optimizer, usual = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
batches = [(torch.randn(12, 8), torch.randint(4, (12,))) for _ in range(5)]
dist = motley.distribute(model, batches[0], nn.functional.cross_entropy, cluster, optimizer, all_devices=True)
for x, y in batches:
    loss = dist(x, y)
    loss.backward()
    dist.step()
    wanted = nn.functional.cross_entropy(plain(x), y)
    wanted.backward()
    usual.step()
    usual.zero_grad()
    assert abs(loss.item() - wanted.item()) < 1e-9, (loss.item(), wanted.item())
state = dist.state_dict()
for name, value in plain.state_dict().items():
    assert (state[name] - value).abs().max() < 1e-9, name
print("equal", flush=True)
"""
# A machine with torch has these.
SYSTEM = re.compile(r"linux-vdso|ld-linux|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|util)\.so")


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

    def test_trains_as_plain_torch(self):
        """Two workers of torchrun."""
        script = os.path.join(self.folder, "two.py")
        with open(script, "w") as file:
            file.write(TWO)
        torchrun = os.path.join(self.where, "bin", "torchrun")
        done = run([torchrun, "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={support.free_port()}", script],
                   env=self.environment, cwd=self.folder)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stdout.count("equal"), 2, done.stdout)

    def test_another_torch(self):
        """The package and the program say so, in one line each."""
        there = os.path.join(self.folder, "other")
        shutil.rmtree(there, ignore_errors=True)
        os.makedirs(os.path.join(there, "torch"))
        for name, text in (("version.py", "__version__ = '9.9.0+cpu'\n"), ("__init__.py", "from .version import __version__\n")):
            with open(os.path.join(there, "torch", name), "w") as file:
                file.write(text)
        environment = dict(self.environment, PYTHONPATH=there)
        for command, code in (([self.python, "-c", "import motley"], 1), ([os.path.join(self.where, "bin", "motley"), "models"], 2)):
            done = run(command, env=environment, cwd=self.folder)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertRegex(done.stderr.strip().splitlines()[-1], r"built with torch .* has .*9\.9\.0\+cpu.* install")
        self.assertEqual(len(done.stderr.strip().splitlines()), 1)

    def test_no_library_of_the_system_is_needed(self):
        """What the extension and the programs need comes in the wheel, but for torch, libc and libstdc++."""
        site = os.path.realpath(
            subprocess.check_output([self.python, "-c", "import motley; print(motley.__path__[0])"], text=True, env=self.environment, cwd=self.folder).strip()
        )
        (extension,) = [name for name in os.listdir(site) if name.startswith("_motley.")]
        seen = set()
        for file in (extension, "bin/motley", "bin/motley-torch"):
            for line in subprocess.check_output(["ldd", os.path.join(site, file)], text=True).splitlines():
                name, _, place = line.strip().partition(" => ")
                if SYSTEM.match(os.path.basename(name.split(" ")[0])):
                    continue
                seen.add(name.split(".so")[0])
                self.assertTrue(os.path.realpath(place.split(" ")[0]).startswith((site, os.path.join(os.path.dirname(site), "torch"))), line)
        self.assertLessEqual({"libClp", "libmetis", "libfmt", "libspdlog", "libyaml-cpp", "libtorch_cpu"}, {name.split("-0")[0] for name in seen})


@unittest.skipUnless(importlib.util.find_spec("scikit_build_core"), "there is no scikit-build-core in this environment")
class Sources(unittest.TestCase):
    def test_holds_what_a_build_needs_and_no_more(self):
        """What `python -m build` makes its wheel of, in a tree in which things were built."""
        with tempfile.TemporaryDirectory() as folder:
            command = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
            done = run([sys.executable, "-c", command, folder], cwd=ROOT)
            self.assertEqual(done.returncode, 0, done.stderr)
            (name,) = os.listdir(folder)
            with tarfile.open(os.path.join(folder, name)) as archive:
                names = {member.name.split("/", 1)[-1] for member in archive.getmembers()}
        self.assertLessEqual({"CMakeLists.txt", "src/core/yaml.cc", "python/motley/__init__.py", "clusters/hap-64.yaml"}, names)
        self.assertEqual([name for name in names if name.startswith(("build", "tests/", "bench/", ".torch2", ".peers"))], [])


if __name__ == "__main__":
    unittest.main()
