"""pip install from the source tree, without a network, into a folder of its own."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import support

ROOT = os.path.dirname(os.path.dirname(support.HERE))


class Install(unittest.TestCase):
    def test_pip(self):
        with tempfile.TemporaryDirectory() as folder:
            # pip leaves its traces in the source tree, so it gets one of its own; the build folder is used again.
            tree = os.path.join(folder, "motley")
            os.makedirs(tree)
            for name in ("pyproject.toml", "setup.py", "CMakePresets.json", "LICENSE"):
                shutil.copy2(os.path.join(ROOT, name), tree)
            for name in ("python", "clusters"):
                shutil.copytree(os.path.join(ROOT, name), os.path.join(tree, name))
            for name in ("CMakeLists.txt", "cmake", "src", "tests", "bench", "docs", "examples"):
                os.symlink(os.path.join(ROOT, name), os.path.join(tree, name))
            target = os.path.join(folder, "installed")
            environment = dict(os.environ, MOTLEY_BUILD_DIR=os.environ["MOTLEY_BINARY_DIR"], MOTLEY_SOURCE_DIR=ROOT)
            environment.pop("PYTHONPATH")
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-index", "--no-deps",
                 "--disable-pip-version-check", "--target", target, tree],
                env=environment, capture_output=True, text=True,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            environment["PYTHONPATH"] = target
            code = (
                "import motley, torch; from torch import nn; x = torch.randn(4, 3);"
                "g = motley.capture(nn.Linear(3, 3), (x, x), nn.functional.mse_loss);"
                "print(motley.__file__, len(motley.plan(g, 'hap-a100-p100', all_devices=True).ratios))"
            )
            done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(done.stdout.startswith(target), done.stdout)
            self.assertTrue(done.stdout.strip().endswith(" 4"), done.stdout)


if __name__ == "__main__":
    unittest.main()
