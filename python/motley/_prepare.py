"""Plans for the loss of a machine, made beside a training that may lose one: python -m motley._prepare PARENT < job (_elastic.py)."""

import ctypes
import json
import os
import signal
import sys


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the worker that asked
    if os.getppid() != int(sys.argv[1]):
        return
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    from . import _motley
    from ._errors import UserError
    from ._launched import for_devices
    from ._plan import load, plan

    job = json.load(sys.stdin)
    cluster = _motley.parse_cluster(job["cluster"], "cluster")
    options = {**job["options"], "time_limit": job["limit"]}
    for devices, file in job["parts"]:
        try:
            made = plan(load(job["graph"]), cluster.part(devices), **for_devices(options, len(devices)))
            with open(file + ".devices", "w", encoding="ascii") as said:
                json.dump(made.devices, said)
            made.save(file + ".part")
            os.replace(file + ".part", file)
        except (UserError, OSError):
            continue


if __name__ == "__main__":
    main()
