"""Process groups of torch.distributed for a plan's tensors: of any backend that it knows, made at run time."""

import contextlib
import datetime
import os

import torch

from ._errors import UserError

_TIMEOUT = datetime.timedelta(minutes=30)  # of one collective, waiting for slower workers included


begun = False  # torch.distributed, by begin(): its store is not at MASTER_PORT


@contextlib.contextmanager
def _patient_threads():
    """Threads that are started meanwhile do not interrupt others: gloo's thread for its sockets would wait until the system's next
    tick for a lock whose holder it interrupted (src/comm/gloo.cc)."""
    plain = os.SCHED_OTHER if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER else None
    with contextlib.suppress(OSError):
        if plain is not None:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        if plain is not None:
            os.sched_setscheduler(0, plain, os.sched_param(0))


_made = {}  # how many groups of which ranks


def make_groups(ranks, backend):
    """The names under which c10d knows three groups of these ranks: for collectives, for messages to higher and to lower ranks."""
    return [_group(tuple(ranks), backend) for _ in range(3)]


def _group(ranks, backend):
    """Called by the group's members alone. The name that new_group would give it counts all groups that a process is in, which
    differ from member to member."""
    c10d = torch.distributed.distributed_c10d
    _made[ranks] = _made.get(ranks, 0) + 1
    name = f"motley_{'_'.join(map(str, ranks))}_{_made[ranks]}"
    plain, c10d._process_group_name = c10d._process_group_name, lambda *_, **__: name
    # Groups of a process that is bound to a device (init_process_group's device_id) send all their messages one after the other,
    # whoever they are for; a plan's wait for one another, and those of other groups do not.
    every = c10d._get_default_group()
    bound = getattr(every, "bound_device_id", None)
    if bound is not None:
        every.bound_device_id = None
    try:
        with _patient_threads():
            made = torch.distributed.new_group(list(ranks), timeout=_TIMEOUT, backend=backend, use_local_synchronization=True)
    finally:
        c10d._process_group_name = plain
        if bound is not None:
            every.bound_device_id = bound
    return made.group_name


def check(backend, device):
    """Refuses a backend that torch.distributed cannot make, or whose groups cannot hold tensors of the device, even by copies."""
    distributed = torch.distributed
    if not distributed.is_available() or not hasattr(torch._C._distributed_c10d, "_resolve_process_group"):
        raise UserError(f"[distribute] backend={backend!r} needs torch 2.4 or newer; leave it out: gloo is used")
    if not isinstance(backend, str) or backend.lower() not in distributed.Backend.backend_list:
        known = ", ".join(name for name in distributed.Backend.backend_list if name != "undefined")
        raise UserError(f"[distribute] backend is {backend!r}, which torch.distributed does not know; give one of {known}")
    here = {"nccl": distributed.is_nccl_available, "mpi": distributed.is_mpi_available, "gloo": distributed.is_gloo_available,
            "ucc": distributed.is_ucc_available}  # fmt: skip
    if not here.get(backend, lambda: True)():
        raise UserError(f"[distribute] backend is {backend!r}, which this torch was built without; leave it out, or give gloo")
    takes = getattr(distributed.Backend, "backend_capability", {}).get(backend.lower())
    if takes and device not in takes and "cpu" not in takes:
        raise UserError(f"[distribute] backend {backend!r} has tensors on {', '.join(takes)}, not on {device}; leave it out, or give gloo")


def begin(native):
    """Starts torch.distributed where the script has not; collective."""
    distributed = torch.distributed
    if distributed.is_initialized():
        return
    store, port = None, torch.zeros(1, dtype=torch.int64)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if native.rank == 0:
        store = distributed.TCPStore(host, 0, native.size, True, wait_for_workers=False)
        port[0] = store.port
    native.tell(port)
    if native.rank != 0:
        store = distributed.TCPStore(host, int(port), native.size, False)
    global begun
    begun = True
    with _patient_threads():
        distributed.init_process_group("gloo", store=store, rank=native.rank, world_size=native.size)
