"""Builds the extension with CMake for `pip install .`; the rest is in pyproject.toml.

MOTLEY_BUILD_DIR names a build folder to use again; otherwise build/pip is made.
"""

import contextlib
import os
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = os.path.dirname(os.path.abspath(__file__))


def interpreter(build):
    """This interpreter as the build folder knows it; not by a virtual environment's name, which may be gone when it is used again."""
    program = getattr(sys, "_base_executable", None) or sys.executable
    with contextlib.suppress(OSError), open(os.path.join(build, "CMakeCache.txt")) as cache:
        for line in cache:
            if line.startswith("MOTLEY_PYTHON_PROGRAM:"):
                known = line.strip().split("=", 1)[1]
                if os.path.exists(known) and os.path.samefile(known, program):
                    return known
    return program


class CMakeBuild(build_ext):
    def run(self):
        try:
            import torch
        except ImportError as error:
            raise SystemExit(
                f"motley: {sys.executable} has no torch ({error}); install it (Debian: apt-get install python3-torch, and "
                "use /usr/bin/python3), then pip install with --no-build-isolation"
            )
        if shutil.which("cmake") is None:
            raise SystemExit("motley: there is no cmake; run ./dev setup, or install the packages of tools/packages.txt")
        build = os.environ.get("MOTLEY_BUILD_DIR", os.path.join(ROOT, "build", "pip"))
        configure = ["cmake", "--preset", "release", "-B", build, f"-DMOTLEY_PYTHON_PROGRAM={interpreter(build)}",
                     f"-DMOTLEY_TORCH_VERSION={torch.__version__}"]  # fmt: skip
        root = os.environ.get("MOTLEY_SOURCE_DIR", ROOT)
        subprocess.run(configure, cwd=root, check=True)
        subprocess.run(["cmake", "--build", build, "--target", "motley_python"], cwd=ROOT, check=True)
        made = os.path.join(build, "python", "motley")
        to = os.path.join(ROOT, "python", "motley") if self.inplace else os.path.join(self.build_lib, "motley")
        os.makedirs(to, exist_ok=True)
        for name in os.listdir(made):
            if name.startswith("_motley.") or name == "_built.py":
                shutil.copy2(os.path.join(made, name), to)
        shutil.copytree(os.path.join(ROOT, "clusters"), os.path.join(to, "clusters"), dirs_exist_ok=True)


setup(ext_modules=[Extension("motley._motley", [])], cmdclass={"build_ext": CMakeBuild})
