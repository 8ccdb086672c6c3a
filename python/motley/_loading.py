"""Loads torch and the extension, and says what to install where that fails."""

import importlib
import sys


def _version(text):
    return ".".join(text.split("+")[0].split(".")[:2])


def load():
    """Imports torch, then the extension; ImportError in one line otherwise."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        built = importlib.import_module("motley._built")
    except ImportError:
        built = None
    if built is not None and built.python != python:
        raise ImportError(
            f"motley was built for Python {built.python}, but this is Python {python} ({sys.executable}): run "
            f"{built.program}, or build motley again with `{sys.executable} -m pip install .` in its source tree"
        )
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(
            f"motley needs torch, which {sys.executable} (Python {python}) does not have ({error}): install it there "
            "(Debian: apt-get install python3-torch, and run /usr/bin/python3)"
        ) from None
    not_built = (
        "motley's extension is not built: install it in a virtual environment as docs/python.md says, or run `./dev build` and set "
        "PYTHONPATH=build/python"
    )
    if built is None:
        raise ImportError(not_built)
    if _version(built.torch) != _version(torch.__version__):
        raise ImportError(
            f"motley was built with torch {built.torch}, but this interpreter has torch {torch.__version__}: build it again "
            f"with `{sys.executable} -m pip install .` in its source tree, or install torch {_version(built.torch)}"
        )
    try:
        importlib.import_module("motley._motley")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "motley._motley":
            raise ImportError(not_built) from None
        raise ImportError(
            f"motley's extension cannot be loaded ({error}): a library that it was built with is missing, libtorch or another; "
            "install it (Debian: apt-get install libtorch1.13 python3-torch, all packages are in tools/packages.txt), or build "
            f"motley again with `{sys.executable} -m pip install .` in its source tree"
        ) from None
