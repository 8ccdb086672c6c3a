"""plan(), simulate(), load() and save(): what needs a graph and a cluster, but no workers."""

import json
import math
import numbers
import os

import torch

from . import _motley
from ._capture import capture
from ._errors import NoPlanError, UserError, flag, warn, whole_number

_CLUSTERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "clusters")


def cluster_of(cluster):
    """A cluster file, the name of a shipped cluster, or the YAML text of one."""
    if isinstance(cluster, _motley.Cluster):
        return cluster
    if isinstance(cluster, os.PathLike):
        cluster = os.fspath(cluster)
    if not isinstance(cluster, str):
        raise UserError(f"[plan] cluster is a {type(cluster).__name__}; give a file, a shipped name or YAML text")
    if "\n" in cluster:
        return _motley.parse_cluster(cluster, "cluster")
    shipped = os.path.join(_CLUSTERS, cluster + ".yaml")
    return _motley.load_cluster(shipped if os.path.exists(shipped) else cluster)


def cluster(file, profile=None):
    """A cluster to plan for, with the measured numbers of a profile (motley.discover, motley calibrate) in the place of its own.

    cluster = motley.cluster("cluster.yaml", profile="cluster.profile")
    dist = motley.distribute(model, batch, loss_fn, cluster=cluster, optimizer=optimizer)
    """
    if profile is None:
        return cluster_of(file)
    for what, path in (("file", file), ("profile", profile)):
        if not isinstance(path, (str, os.PathLike)):
            raise UserError(f"[cluster] {what} is a {type(path).__name__}; give a path")
    return _motley.measured_cluster(os.fspath(file), os.fspath(profile))


class Plan:
    """A distributed program for a graph on a cluster; print it to read it in words.

    predicted_step_s, lower_bound_s   seconds: of this plan, and of any program at its shares
    cluster, devices                  the devices that the plan uses, and their numbers in the cluster that it was made for
    ratios                            share of each device of what is cut
    peak_memory_bytes                 of each device
    baselines                         what the usual strategies would take (of a plan just made)
    """

    def __init__(self, native, baselines=(), search_s=0.0, reason="", devices=None, made_for=None):
        self._native, self.baselines, self.search_s, self.reason = native, list(baselines), search_s, reason
        self.devices = list(range(len(native.cluster))) if devices is None else list(devices)
        self._made_for = made_for or (native.cluster.name, len(native.cluster))  # a cluster's name and devices

    def __getattr__(self, name):
        if name in ("engine", "model", "batch", "ratios", "cluster", "predicted_step_s", "lower_bound_s",
                    "peak_memory_bytes", "optimizer", "precision", "inexact", "micro_batches", "stages", "redundancy"):
            return getattr(self._native, name)
        raise AttributeError(name)

    def __str__(self):
        name, size = self._made_for
        if len(self.devices) == size:
            return str(self._native)
        return f"{self._native}  devices     {_motley.part_in_words(self.devices, size, name)}\n"

    def check(self, memory_limit=True):
        """What is wrong with the plan, by the independent checker; an empty list if it is sound."""
        return self._native.check(memory_limit)

    def graph(self):
        return self._native.graph()

    def save(self, path):
        self._native.save(os.fspath(path))


_PRECISIONS = {
    None: None, "fp32": None, torch.float32: None, "bf16": "bf16", torch.bfloat16: "bf16", "fp16": "f16", "f16": "f16", torch.float16: "f16",
}  # fmt: skip


def precision_of(precision):
    """The name of a type of 16 bits as graphs have it; None: the type of the parameters."""
    try:
        return _PRECISIONS[precision]
    except (KeyError, TypeError):
        raise UserError(f"[plan] precision is {precision!r}; give 'bf16' or 'fp16', or None for the type of the parameters") from None



def plan(graph, cluster, *, optimizer="adamw", memory_limit=True, time_limit=None, seed=0, ratios=None, engine="spmd",
         all_devices=False, precision=None, strategy=None, fix=None, virtual_devices="auto", segments=1, micro_batch=None,
         layers=None, recompute=True, threads=None, duplex="auto", redundancy=0, example_inputs=None, loss_fn=None):  # fmt: skip
    """The fastest program found for a graph on a cluster; what `motley plan` finds for the same question.

    graph         of capture(); or a model, with the example_inputs and loss_fn that capture() takes
    cluster       a cluster file, the name of a shipped cluster, or the YAML text of one
    engine        'spmd': one program. 'pipeline', 'grid': stages of the model, fed with micro-batches, if loss and gradients
                  are provably sums over them; a UserError names what mixes samples otherwise. Batch normalisation sees a
                  micro-batch at a time, with a warning. 'auto': the fastest of all that computes what one device would.
    optimizer     'adamw', 'amsgrad' or 'sgd': how much state each parameter has; 'fused-adamw' and so on: as torch's fused ones,
                  without temporaries
    precision     'bf16' or 'fp16': computes in 16 bits, with parameters, gradients and optimizer state in the parameters' type
    memory_limit  whether plans must fit the devices' memory, by what is planned (docs/memory.md)
    recompute     whether activations may be computed again where memory is short
    time_limit    seconds that it may take; the best plan found in them is returned. None: 5 for up to 64 devices and 20,000
                  operators, else 10, as of `motley plan`; math.inf: until nothing is left to try
    seed          of the search
    threads       that search; None: one for each core. The plan does not depend on it

    Of one program:
    ratios        shares of the devices; without them they are searched too
    all_devices   whether it has to use every device; otherwise it leaves out those without which the step is faster, and
                  the plan's `devices` says which it uses. Given ratios are of all devices
    segments      parts of the model with shares of their own: a number, 'auto', or a list of names of modules
    duplex        parts of a batch of which one communicates while another computes: a number, 'auto' (two where engine='auto'
                  finds that faster), or 'off'
    redundancy    1: what a device holds alone is kept by a second one too, so that the loss of one loses nothing (docs/elastic.md)
    strategy      one of the usual strategies in the place of a search: 'dp-ev', 'dp-cp', 'zero', 'expert-parallel',
                  'tensor-parallel'

    Of stages and replicas:
    fix              choices that the grid has to keep, such as 'pp=2,dp=2'
    virtual_devices  machines as single devices, with data parallelism inside: 'auto', 'off', 'machine', or devices of each
    micro_batch      samples of a micro-batch; None: searched
    layers           pieces that the pipeline engine cuts the model into, about; None: the finest

    Raises NoPlanError where nothing fits.
    """
    if isinstance(graph, torch.nn.Module):
        if example_inputs is None:
            raise UserError("[plan] a model needs example_inputs, a global batch: give (inputs, targets), and loss_fn as for capture()")
        graph = capture(graph, example_inputs, loss_fn)
    elif example_inputs is not None or loss_fn is not None:
        raise UserError("[plan] example_inputs and loss_fn go with a model; a graph has its own")
    if not isinstance(graph, _motley.Graph):
        raise UserError(f"[plan] graph is a {type(graph).__name__}; give what capture() returns, or a model and its example_inputs")
    if not isinstance(optimizer, str) or optimizer.removeprefix("fused-") not in ("adamw", "amsgrad", "sgd"):
        raise UserError(f"[plan] optimizer is {optimizer!r}; give 'adamw', 'amsgrad' or 'sgd', or one of them as 'fused-adamw'")
    if not isinstance(engine, str):
        raise UserError(f"[plan] engine is {engine!r}; give a name, such as 'spmd' or 'auto'")
    for what, value in (("memory_limit", memory_limit), ("recompute", recompute), ("all_devices", all_devices)):
        flag("plan", what, value)
    whole_number("plan", "seed", seed)
    for what, value in (("threads", threads), ("micro_batch", micro_batch)):
        if value is not None:
            whole_number("plan", what, value, 1)
    for what, value in (("strategy", strategy), ("fix", fix)):
        if value is not None and not isinstance(value, str):
            raise UserError(f"[plan] {what} is {value!r}; give a text, or None")
    whole_number("plan", "redundancy", redundancy)
    if redundancy > 1:
        raise UserError(f"[plan] redundancy is {redundancy}; give 0 or 1")
    name = precision_of(precision)
    devices = cluster_of(cluster)
    if redundancy and len(devices) < 2:
        raise UserError(f"[plan] redundancy is 1, but {devices.name} has one device; give 0, or a cluster of two")
    if ratios is not None and not (all(isinstance(r, numbers.Real) and 0 <= r < math.inf for r in ratios) and sum(ratios) > 0):
        raise UserError(f"[plan] ratios are {ratios!r}; give a number from 0 on for each device, and one above 0")
    if ratios is not None and len(ratios) != len(devices):
        raise UserError(f"[plan] ratios has {len(ratios)} numbers; the cluster has {len(devices)} devices")
    if ratios is not None and engine != "spmd":
        raise UserError(f"[plan] ratios are shares of engine='spmd'; engine is {engine!r}")
    if time_limit is not None and not (isinstance(time_limit, (int, float)) and time_limit > 0):
        raise UserError(f"[plan] time_limit is {time_limit!r}; give seconds, more than 0, or None")
    duplex = str(duplex)
    if duplex not in ("auto", "off") and engine == "spmd":
        engine = "duplex"  # one program, in parts
    segments = ",".join(segments) if isinstance(segments, (list, tuple)) else str(segments)
    options = dict(
        engine=engine, optimizer=optimizer, precision=name, memory_limit=memory_limit, recompute=recompute, time_limit=time_limit,
        seed=seed, threads=threads, ratios=ratios, all_devices=all_devices, segments=segments, strategy=strategy, fix=fix,
        virtual_devices=str(virtual_devices), duplex=duplex, micro_batch=micro_batch, layers=None if layers is None else str(layers),
        redundancy=redundancy,
    )  # fmt: skip
    found = _motley.plan(graph, devices, {key: value for key, value in options.items() if value is not None})
    if not found.found:
        if found.refusal and engine != "auto":
            raise UserError(found.refusal)
        where = f"[plan] no plan for {graph.model} on {devices.name}"
        if found.out_of_time:
            limit = "time" if time_limit is None else f"{time_limit:g} s"
            raise NoPlanError(f"{where} was found in {limit}: {found.why_not}; give a longer time_limit")
        raise NoPlanError(f"{where} fits: {found.why_not}; use more or larger devices, a smaller batch, or memory_limit=False")
    details = found.baselines, found.search_s, found.reason, found.devices or None, (devices.name, len(devices))
    best = Plan(found.take_best(), *details)
    if best.inexact:
        warn(f"[plan] {best.inexact}, unlike on one device; engine='spmd' computes the same as one device")
    return best


def simulate(plan, trace=None):
    """Simulates one step of a plan, device by device.

    Returns a dict: step_s, overlap, load_balance, and for each of devices busy_s, comm_s, exposed_comm_s, idle_s,
    peak_memory_bytes, which it was planned for, and allocated_bytes, what is held at most at a time. `trace` names a file to
    write for ui.perfetto.dev.
    """
    if not isinstance(plan, Plan):
        raise UserError(f"[simulate] plan is a {type(plan).__name__}; give what plan() or load() returns")
    return plan._native.simulate("" if trace is None else os.fspath(trace))


def save(thing, path):
    """Writes a graph or a plan to a file that the motley program reads too.

    A graph just captured is captured at a few more batches: the file then gives it at others too, if its sizes grow with the
    batch in a straight line. If not, a warning says so, and the file has this batch alone.
    """
    if isinstance(thing, Plan):
        thing.save(path)
        return
    alone, differs = thing.save(os.fspath(path), getattr(thing, "at", None))
    if differs:
        warn(f"[save] {path} has the graph at batch {thing.batch} alone: {alone}")


def load(path):
    """A plan or a graph from a file."""
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"[load] path is a {type(path).__name__}; give the name of a file")
    path = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise UserError(f"[load] {path} cannot be read: {error.strerror}; give a file that save() wrote") from None
    except (ValueError, RecursionError):
        raise UserError(f"[load] {path} is not JSON; give a file that save() or the motley program wrote") from None
    if isinstance(content, dict) and "motley_graph" in content:
        batch = content.get("batch")
        graph = _motley.load_graph(path, batch if isinstance(batch, int) and 0 <= batch < 2**62 else 0)
        if "other" in content:
            graph.at = lambda samples: _motley.load_graph(path, samples)
        return graph
    return Plan(_motley.load_plan(path))
