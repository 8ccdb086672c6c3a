"""Plans that all workers agree on: rank 0 captures and plans, and every rank gets the plan, or the same error.

Every rank captures the step too, for what it read: a rank whose model changes later is noticed by that rank alone.
"""

import json
import re
import warnings

import torch

from . import _motley, _optim, _torch
from ._capture import capture_step
from ._errors import UserError
from ._plan import Plan, load
from ._plan import plan as make_plan
from ._watch import Reads, Watch


def send_text(group, text):
    """Rank 0's text on every rank."""
    if group.size == 1:
        return text
    data = torch.tensor(list(text.encode()) if group.rank == 0 else [], dtype=torch.uint8)
    size = torch.tensor([len(data)], device=group.device)
    group.all_reduce(size)
    body = torch.zeros(int(size), dtype=torch.uint8)
    if group.rank == 0:
        body.copy_(data)
    body = body.to(group.device)
    group.all_reduce(body)
    return bytes(_torch.bytes_of(body.cpu())).decode()


def captured(step):
    """The graph of a step, and a Watch of what it took as constant."""
    reads = Reads()
    repeated = []
    graph = capture_step(step, type(step.model).__name__, reads=reads, repeated=repeated)
    watch = Watch(step, reads, graph.outside)
    watch.repeated, watch.prepared = repeated, graph.prepared
    watch.of = hash(graph.text_without_model())
    return graph, watch


class Agreed:
    """A plan, this worker's Watch of its step, and what the optimizer was found to do."""

    def __init__(self, plan, watch, trial=None):
        self.plan, self.watch, self.trial = plan, watch, trial


def _agreed(group, make, step):
    """An Agreed of (plan, trial) that rank 0's make(graph) returns, on every rank; or rank 0's error."""
    made, failure, watch, text = None, None, None, ""
    try:
        with warnings.catch_warnings():
            if group.rank > 0:  # rank 0 says it
                warnings.simplefilter("ignore")
            graph, watch = captured(step)
        if group.rank == 0:
            made, trial = make(graph)
            text = "plan" + json.dumps([made.devices, *made._made_for, trial and vars(trial)]) + "\n" + made._native.text()
    except Exception as error:
        failure, text = error, "fail" + str(error)
    text = send_text(group, text)
    if failure is not None and (group.rank == 0 or not text.startswith("fail")):
        raise failure
    if text.startswith("fail"):
        raise UserError(text[4:])
    head, text = text[4:].split("\n", 1)
    devices, name, size, trial = json.loads(head)
    if made is None:
        made = Plan(_motley.parse_plan(text, "the plan of rank 0"), devices=devices, made_for=(name, size))
    return Agreed(made, watch, trial and _optim.Trial(**trial))


def agreed_plan(step, group, cluster, optimizer, plan, options, search=make_plan):
    """The plan of distribute(), as an Agreed; collective. `search`: plan(), or what does as it does."""

    def make(graph):
        trial = None if optimizer is None else _optim.tried(optimizer, group.device)
        memory_of = "adamw" if trial is None else trial.plan_name()
        if plan is None:
            made = search(graph, cluster, optimizer=memory_of, **options)
        else:
            made = plan if isinstance(plan, Plan) else load(plan)
            _check_plan(made, step, None if optimizer is None else memory_of)
        name, size = made._made_for
        if size != group.size:
            raise UserError(
                f"[distribute] the cluster has {size} devices, but {group.size} worker{'s were' if group.size > 1 else ' was'} "
                f"started; start {size}, for example with torchrun --nproc_per_node={size}"
            )
        return made, trial

    return _agreed(group, make, step)


def _check_plan(plan, step, optimizer):
    if not isinstance(plan, Plan):
        raise UserError("[distribute] plan is a graph; give a plan file or a plan of motley.plan()")
    problems = plan.check(False)
    if problems:
        raise UserError(f"[distribute] the plan is not sound: {problems[0]}; see motley check")
    if plan.batch != step.batch_size():
        raise UserError(
            f"[distribute] the plan is for another model or batch: its global batch is {plan.batch}, that of example_inputs "
            f"{step.batch_size()}; plan this model again"
        )
    graph = capture_step(step, type(step.model).__name__, repeated=[])
    if plan.precision != "f32":
        graph = graph.in_precision(plan.precision)
    theirs = plan.graph()
    for kind in ("parameters", "buffers", "inputs"):
        ours, wanted = getattr(graph, kind), getattr(theirs, kind)
        for name in list(ours) + list(wanted):
            if ours.get(name) != wanted.get(name):
                raise UserError(
                    f"[distribute] the plan is for another model or batch: {kind[:-1]} {name} is {ours.get(name)}, in the "
                    f"plan {wanted.get(name)}; plan this model again"
                )
    if theirs.text_without_model() != graph.text_without_model():
        raise UserError("[distribute] the plan is for a model that computes something else; plan this model again")
    if optimizer is not None and plan.optimizer not in (optimizer, optimizer.removeprefix("fused-")):
        raise UserError(
            f"[distribute] the plan counts the memory of {plan.optimizer}, but the optimizer needs that of {optimizer}; plan with "
            f"optimizer={optimizer!r}"
        )


# ---- plans for what has changed ---------------------------------------------------------------------------------------


def _structure(graph_lines):
    """The lines of a graph without sizes and numbers."""
    return [re.sub(r"(?<![%\w])-?(\d[\w.+]*|inf|nan)", "#", re.sub(r"\[[^\[\]]*\]", "[]", line)) for line in graph_lines]


def _transplanted(plan, step, graph):
    """The plan's program for another graph that differs in sizes and numbers alone; None if it does not suit."""
    text = json.loads(plan._native.text())
    batch = step.batch_size()
    if "pipeline" in text:
        count, rest = divmod(batch, plan.micro_batches)
        if rest or count < 1:
            return None
        text["pipeline"]["micro_batch"] = count
    if plan.precision != "f32":
        graph = graph.in_precision(plan.precision)
    lines = str(graph).rstrip("\n").split("\n")
    if _structure(lines) != _structure(text["graph"]):
        return None
    text["graph"], text["batch"] = lines, batch
    text.pop("predicted", None)
    try:
        made = Plan(_motley.parse_plan(json.dumps(text), "the plan"), devices=plan.devices, made_for=plan._made_for)
        return None if made.check(False) else made
    except UserError:
        return None


def replanner(cluster, first, options):
    """replan(graph) for distribute(): as its first plan was made, or for the devices of a plan that was given."""

    def replan(graph):
        if cluster is not None:
            return make_plan(graph, cluster, optimizer=first.optimizer, **options)
        engine = first.engine if first.engine in ("pipeline", "grid") else "spmd"
        precision = {"bf16": "bf16", "f16": "fp16"}.get(first.precision)
        made = make_plan(graph, first.cluster, optimizer=first.optimizer, engine=engine, precision=precision, all_devices=True)
        return Plan(made._native, devices=first.devices, made_for=first._made_for)

    return replan


def followed_plan(step, group, plans, replan):
    """A plan for a step that differs from those of `plans`, as an Agreed; collective.

    The program of an earlier plan where it suits, which leaves all pieces where they are; otherwise replan(graph).
    """

    def make(graph):
        for plan in plans:
            made = _transplanted(plan, step, graph)
            if made is not None:
                return made, None
        return replan(graph), None

    return _agreed(group, make, step)
