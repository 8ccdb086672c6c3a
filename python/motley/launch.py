"""torchrun, where torch's own cannot start.

    python3 -m motley.launch --nproc_per_node=3 script.py

takes the arguments of torchrun and is torchrun. Under Python 3.11 and later the torchrun of torch 1 ends with "'NoneType'
object has no attribute 'get'"; here it does not. And however the launcher ends, its workers end with it.
"""

import ctypes
import os
import signal
import subprocess

from . import _torch
from ._launched import remove_folder

_PR_SET_PDEATHSIG = 1


def _tie_workers():
    """Processes that this one starts are killed when it ends, also when it is killed itself."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # found before a fork
    launcher = os.getpid()

    def tie():
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended meanwhile
            os._exit(1)

    class Tied(subprocess.Popen):
        def __init__(self, *arguments, **options):
            options.setdefault("preexec_fn", tie)
            super().__init__(*arguments, **options)

        def send_signal(self, number):
            super().send_signal(number)
            if number == signal.SIGTERM:  # one that is stopped would not see it
                super().send_signal(signal.SIGCONT)

    subprocess.Popen = Tied


def main():
    _tie_workers()  # before torch takes the name
    from torch.distributed import run

    _torch.fix_launcher()
    # With it, launchers that come later wait for an address that nobody writes down again (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        run.main()
    finally:
        remove_folder(os.getpid())


if __name__ == "__main__":
    main()
