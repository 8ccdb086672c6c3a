"""The motley program that comes with the package, as a command; without importing torch, which would take longer than most commands."""

import importlib.util
import os
import re
import sys


def _folder(package):
    """Where a package lies; '' if it is not there."""
    spec = importlib.util.find_spec(package)
    return spec.submodule_search_locations[0] if spec is not None and spec.submodule_search_locations else ""


def _torch_in(file):
    """The version of torch that a file names, and its major and minor number."""
    with open(file) as text:
        version = re.search(r"""^(?:torch|__version__)\s*=\s*['"](.*?)['"]""", text.read(), re.MULTILINE)[1]
    return version, version.split("+")[0].split(".")[:2]


def main():
    motley, torch = _folder("motley"), _folder("torch")
    (built, wanted), (here, found) = _torch_in(os.path.join(motley, "_built.py")), ("none", [])
    if torch:
        here, found = _torch_in(os.path.join(torch, "version.py"))
    if found != wanted:
        print(
            f"motley: this wheel was built with torch {built}, but {sys.executable} has {here}: install torch {'.'.join(wanted)}, or build "
            f"motley again with `{sys.executable} -m pip install .` in its source tree",
            file=sys.stderr,
        )
        sys.exit(2)
    program = os.path.join(motley, "bin", "motley")
    os.execv(program, [program, *sys.argv[1:]])
