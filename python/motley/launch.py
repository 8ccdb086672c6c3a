"""torchrun, where torch's own cannot start.

    python3 -m motley.launch --nproc_per_node=3 script.py

takes the arguments of torchrun and is torchrun. Under Python 3.11 and later the torchrun of torch 1 ends with "'NoneType'
object has no attribute 'get'"; here that is mended.
"""

from . import _torch


def main():
    from torch.distributed import run

    _torch.mend_launcher()
    run.main()


if __name__ == "__main__":
    main()
