"""One of three workers: faults that are planted between the model and the numbers, each caught by the guard.

The faults of plans go past the checker, which would refuse most of them: what is tried is the guard alone.
"""

import json
import os
import re
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support
from motley import _agree, _agreement, _following, _guard

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
RANK = int(os.environ["RANK"])
CENTRE = torch.linspace(-1, 1, 6)


class Model(nn.Module):
    def __init__(self, beta=1.5, drop=0.25):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.three, self.layer = nn.Linear(8, 8), nn.LayerNorm(8)
        self.out, self.drop = nn.Linear(8, 4), nn.Dropout(drop)
        self.register_buffer("mask", (torch.arange(8) % 3 > 0).double())
        self.beta = beta

    def forward(self, x):
        y = self.drop(torch.tanh(self.norm(self.one(x - CENTRE))))
        y = y + self.beta * self.two(y) * self.mask
        z = torch.softmax(self.three(self.layer(y)), -1)
        return self.out(y * z + y.relu())


def loss_fn(output, targets):
    return F.cross_entropy(output, targets, ignore_index=1)


def batch(seed=1, size=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


RATIOS = [0.4, 0.35, 0.25]


def planned(model=None, loss=loss_fn, data=None):
    """A plan that cuts batch and parameters, as its file holds it."""
    graph = motley.capture(model or Model(), data or batch(), loss)
    return json.loads(motley.plan(graph, support.CLUSTER, optimizer="sgd", ratios=RATIOS, all_devices=True)._native.text())


def distributed(plan=None, model=None, **options):
    model = model or Model()
    plan = motley.Plan(motley._motley.parse_plan(json.dumps(plan or planned()), "a plan"))
    return motley.distribute(model, batch(), loss_fn, plan=plan, optimizer=sgd(model), **options)


def changed(pattern, to, section="graph", count=1, which=0):
    """A fault in a plan's text: the match number `which` of a pattern in its lines, `count` of them."""

    def plant(plan):
        hits = [i for i, line in enumerate(plan[section]) if re.search(pattern, line)]
        assert len(hits) >= which + count, (pattern, "\n".join(plan[section]))
        for i in hits[which : which + count]:
            plan[section][i] = re.sub(pattern, to, plan[section][i])
        return plan

    return plant


def without(pattern, section="graph"):
    def plant(plan):
        kept = [line for line in plan[section] if not re.search(pattern, line)]
        assert len(kept) == len(plan[section]) - 1, (pattern, "\n".join(plan[section]))
        plan[section] = kept
        return plan

    return plant


def swapped(one, other):
    """Two gradients of one shape change places."""

    def plant(plan):
        at = [next(i for i, line in enumerate(plan["graph"]) if line.startswith(f'gradient "{name}"')) for name in (one, other)]
        values = [plan["graph"][i].split()[-1] for i in at]
        for i, name, value in zip(at, (one, other), reversed(values)):
            plan["graph"][i] = f'gradient "{name}" {value}'
        return plan

    return plant


def reduced(groups):
    """All-reduces of all workers become those of some."""

    def plant(plan):
        step = {"collective": "all_reduce", "groups": groups}
        plan["reductions"] = [{"from_bytes": 0, "fixed_s": 0.0, "seconds_per_byte": 0.0, "steps": [step]}]
        return plan

    return plant


# Each makes the text of a plan wrong, as a capture, a rewrite, a rule or a search might.
OF_PLANS = {
    "gradient doubled": changed(r"aten::full\(\[\], 1.0", "aten::full([], 2.0"),
    "mean over all targets, ignored ones too": changed(r"aten::ne.Scalar\((%\d+), 1\)", r"aten::ne.Scalar(\1, -100)"),
    "another class ignored": changed(r"(nll_loss_forward.*, 2), 1\)", r"\1, 2)"),
    "ignored class trained in the backward pass": changed(r"(nll_loss_backward.*, 2), 1,", r"\1, -100,"),
    "stale attribute": changed(r"(mul.Tensor\(%\d+), 1.5\)", r"\1, 1.0)", count=2),
    "stale attribute in the backward pass": changed(r"(mul.Tensor\(%\d+), 1.5\)", r"\1, 1.0)", which=1),
    "dropout of another share": changed(r"(bernoulli.p\(%\d+), 0.75", r"\1, 0.5"),
    "dropout not scaled": changed(r"(div.Tensor\(%\d+), 0.75", r"\1, 1.0"),
    "dropout without its scale in the backward pass": changed(r"(mul.Tensor\(%89), %34", r"\1, %33"),
    "residual left out": changed(r"(%40 = aten::add.Tensor\(%\d+, %\d+), 1\)", r"\1, 0)"),
    "gradient of a branch dropped": changed(r"(%89 = aten::add.Tensor\(%\d+, %\d+), 1\)", r"\1, 0)"),
    "swapped constant": changed(r"\[-1.0, -0.6", "[-0.6, -1.0"),
    "constant taken twice": changed(r"(sub.Tensor\(%16, %18), 1\)", r"\1, 2)"),
    "epsilon of another layer": changed(r"(native_layer_norm\(.*), 1e-05\)", r"\1, 0.01)"),
    "another momentum": changed(r"(%27 = aten::add.Tensor\(%\d+, %\d+), 0.1\)", r"\1, 0.2)"),
    "biased running variance": changed(r"(%31 = aten::add.Tensor\(%\d+, %\d+), 0.10\d+\)", r"\1, 0.1)"),
    "missing buffer update": without('update "norm.running_mean"'),
    "missing counter": without('update "norm.num_batches_tracked"'),
    "gradients swapped": swapped("two.weight", "three.weight"),
    "small gradients swapped": swapped("layer.weight", "layer.bias"),
    "gradient missing": without('gradient "out.bias"'),
    "wrong activation saved": changed(r"%75 = aten::mm\(%74, %41\)", "%75 = aten::mm(%74, %40)"),
    "backward pass of tanh of its input": changed(r"tanh_backward\(%90, %32\)", "tanh_backward(%90, %23)"),
    "wrong mask in the backward pass": changed(r"(%82 = aten::mul.Tensor\(%81), %12\)", r"\1, %8)"),
    "wrong mask": changed(r"(%39 = aten::mul.Tensor\(%38), %12\)", r"\1, %5)"),
    "threshold moved": changed(r"(threshold_backward.*), 0\)", r"\1, 0.1)"),
    "one worker left out of all-reduces": reduced([[0, 1]]),
    "all-reduces of another group": reduced([[1, 2]]),
}  # fmt: skip


class Proxy:
    """A run's worker with a fault."""

    def __init__(self, worker, **methods):
        self.worker = worker
        for name, method in methods.items():
            setattr(self, name, lambda *given, _method=method: _method(worker, *given))

    def __getattr__(self, name):
        return getattr(self.worker, name)


def planted(dist, **methods):
    dist._run.worker = dist._worker = dist._held.worker = Proxy(dist._run.worker, **methods)
    return dist


def own_gradients(change):
    def step(worker, number, pieces):
        loss, gradients = worker.step(number, pieces)
        return loss, change(gradients)

    return step


def stale_parameters():
    dist = distributed()
    for name, piece in dist._held.pieces.items():
        dist._worker.set("parameter", name, piece.detach().clone())
    return dist


def stale_batch():
    dist, first = distributed(), []

    def step(worker, number, pieces):
        first.append(pieces)
        return worker.step(number, first[0])

    return planted(dist, step=step)


def other_seed():
    plain = _following.Run
    _following.Run = lambda step, agreed, group, seed, emulate: plain(step, agreed, group, seed + (RANK == 1), emulate)
    try:
        return distributed()
    finally:
        _following.Run = plain


def wrong_slice():
    """Rank 1 starts with other rows of a parameter than its own."""
    plain = motley.Distributed._own

    def own(dist, kind, name, whole):
        return plain(dist, kind, name, whole.roll(1, 0) if RANK == 1 and name == "two.weight" else whole)

    motley.Distributed._own = own
    try:
        return distributed()
    finally:
        motley.Distributed._own = plain


def wrong_rows():
    return planted(distributed(), piece=lambda worker, kind, name, whole: worker.piece(
        kind, name, whole.roll(1, 0) if kind == "input" and name == "inputs" and RANK == 2 else whole))  # fmt: skip


def loss_alone():
    def step(worker, number, pieces):
        loss, gradients = worker.step(number, pieces)
        return loss * 1.001, gradients

    return planted(distributed(), step=step)


def forgotten_buffers():
    def step(worker, number, pieces):
        before = {name: worker.buffer(name).clone() for name in dist._held.parts["buffer"]}
        result = worker.step(number, pieces)
        for name, tensor in before.items():
            worker.set("buffer", name, tensor)
        return result

    dist = distributed()
    return planted(dist, step=step)


def unseen(change):
    """The model changes after distribute(), and the fingerprint does not see it."""

    def plant():
        model = Model()
        dist = distributed(model=model)
        dist._run.watch.changes = lambda: []
        change(model)
        return dist

    return plant


def flag(model):
    model.drop.eval()


def beta(model):
    model.beta = 1.0


def centre(model):
    CENTRE.neg_()


def hook(model):
    model.two.register_forward_hook(lambda module, given, output: output * 2)


# Each is a fault of the runtime, or of what the graph took as constant.
OF_RUNS = {
    "one piece of a gradient doubled": lambda: planted(
        distributed(), step=own_gradients(lambda g: [g[0] * (2 if RANK == 1 else 1), *g[1:]])),
    "gradients divided by the workers": lambda: planted(distributed(), step=own_gradients(lambda g: [x / 3 for x in g])),
    "one row of a gradient lost": lambda: planted(
        distributed(), step=own_gradients(lambda g: [*g[:4], g[4].clone().index_fill_(0, torch.tensor([1]), 0), *g[5:]])),
    "loss off by a thousandth": loss_alone,
    "stale parameters": stale_parameters,
    "stale batch": stale_batch,
    "another seed on one worker": other_seed,
    "wrong slice of a parameter": wrong_slice,
    "wrong rows on one worker": wrong_rows,
    "buffers forgotten": forgotten_buffers,
    "attribute changed": unseen(beta),
    "training flag changed": unseen(flag),
    "constant changed in place": unseen(centre),
    "forward hook added": unseen(hook),
}  # fmt: skip


def caught(name, make):
    """The guard's words; the first two steps have other batches."""
    CENTRE.copy_(torch.linspace(-1, 1, 6))
    try:
        dist = make()
        for seed in (1, 2):
            dist.train_step(*batch(seed))
    except motley.MismatchError as error:
        assert str(error).startswith("[verify] step ") and "\n" not in str(error), error
        return str(error)
    raise AssertionError(f"{name}: not caught")


def every_fault():
    dist = distributed()  # without a fault nothing is said
    for seed in (1, 2, 3):
        dist.train_step(*batch(seed))
    assert dist.verify(*batch(4)) == "" and dist.steps == 3
    plan = planned()
    unchecked, _agree._check_plan = _agree._check_plan, lambda *_: None
    found = {}
    for name, plant in OF_PLANS.items():
        faulty = plant(json.loads(json.dumps(plan)))
        found[name] = caught(name, lambda: distributed(faulty))
    _agree._check_plan = unchecked
    for name, make in OF_RUNS.items():
        found[name] = caught(name, make)
    assert len(found) >= 30
    if RANK == 0:
        for name, words in found.items():
            print(f"caught {name}: {words}", flush=True)


def small(drop=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Dropout(drop), nn.Linear(16, 4))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def together(dist, plain, optimizer, data, loss=F.cross_entropy):
    """A step of both; the losses are equal."""
    optimizer.zero_grad(set_to_none=True)
    wanted = loss(plain(data[0]), data[1])
    wanted.backward()
    optimizer.step()
    got = dist.train_step(*data)
    assert abs(got - wanted.item()) < 1e-9, (got, wanted.item())


def other_sizes():
    """The last, smaller batch, by one program and by a pipeline; pieces stay where they are."""
    for engine, sizes in (("spmd", (12, 12, 5, 12, 5, 1)), ("pipeline", (12, 12, 6, 12, 6))):
        plain, mine = small(), small()
        if engine == "pipeline":
            plain[2], mine[2] = nn.Identity(), nn.Identity()
        else:
            sizes = sizes[:-1]  # batch normalisation takes more than one sample
        optimizer = adam(plain)
        options = {"all_devices": True} if engine == "spmd" else {}
        dist = motley.distribute(mine, batch(0, 12), F.cross_entropy, support.CLUSTER, adam(mine), engine=engine, **options)
        runs = []
        for i, size in enumerate(sizes):
            together(dist, plain, optimizer, batch(i, size))
            runs.append(dist._run.number)
        assert runs == [0 if size == 12 else 1 for size in sizes], runs
        support.same(dist.state_dict(), plain.state_dict())
        support.same_optimizer(dist.optimizer_state_dict(), optimizer.state_dict())


class Attention(nn.Module):
    """A causal one, over as many tokens as there are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inside, self.out = nn.Embedding(12, 8), nn.Linear(8, 24), nn.Linear(8, 12)

    def forward(self, tokens):
        q, k, v = self.inside(self.embed(tokens)).chunk(3, -1)
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
        return self.out((q @ k.transpose(1, 2) / 8**0.5 + mask).softmax(-1) @ v).transpose(1, 2)


def other_lengths():
    """A few sequence lengths and a smaller last batch in turn: each form is captured once, and its plan taken when it comes back."""
    forms = [(12, 8), (12, 6), (12, 3), (4, 8)]
    order = [0, 1, 0, 2, 1, 0, 3, 2, 0, 3]
    captured, seen = motley._agree.captured, []
    for engine in ("spmd", "pipeline"):
        plain, mine = Attention(), Attention()
        optimizer = adam(plain)

        def tokens(seed, form):
            generator = torch.Generator().manual_seed(seed)
            return tuple(torch.randint(12, forms[form], generator=generator) for _ in range(2))

        options = {"all_devices": True} if engine == "spmd" else {}
        dist = motley.distribute(mine, tokens(0, 0), F.cross_entropy, support.CLUSTER, adam(mine), engine=engine, **options)
        motley._agree.captured = lambda step: seen.append([tuple(tensor.shape) for _, tensor in step.leaves]) or captured(step)
        try:
            for i, form in enumerate(order):
                together(dist, plain, optimizer, tokens(i, form))
                assert dist._run.number == form, (engine, i, dist._run.number)
        finally:
            motley._agree.captured = captured
        assert seen == [[form] * 2 for form in forms[1:]], seen
        seen.clear()
        support.same(dist.state_dict(), plain.state_dict())
        support.same_optimizer(dist.optimizer_state_dict(), optimizer.state_dict())


def frozen_and_thawed():
    """Layers frozen, thawed and put into evaluation while training goes on: other graphs, and the state moves."""
    plain, mine = small(), small()
    optimizer = adam(plain)
    dist = motley.distribute(mine, batch(0, 12), F.cross_entropy, support.CLUSTER, adam(mine), all_devices=True)
    together(dist, plain, optimizer, batch(0, 12))
    for change in (
        lambda m: m[0].requires_grad_(False),
        lambda m: m[2].eval(),
        lambda m: m[0].requires_grad_(True),
        lambda m: setattr(m[2], "eps", 0.1),
        lambda m: m.train(),
        lambda m: m[4].weight.register_hook(lambda g: g * 0.5),
        lambda m: m[1].register_forward_hook(lambda module, given, output: output * 2),
    ):
        for model in (plain, mine):
            change(model)
        for seed in (1, 2):
            together(dist, plain, optimizer, batch(seed, 12))
    support.same(dist.state_dict(), plain.state_dict())
    support.same_optimizer(dist.optimizer_state_dict(), optimizer.state_dict())
    assert dist._run.number == 7, dist._run.number
    for piece in dist.parameters():  # the same through the pieces
        if piece.shape == dist._pieces[0].shape:
            piece.requires_grad_(False)
    mine[0].weight.requires_grad_(False)
    plain[0].weight.requires_grad_(False)


def refused(words, act):
    try:
        act()
    except (motley.UserError, motley.PeerLost) as error:
        assert words in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(words)


def alone_differs():
    """What one rank alone does otherwise: it is said, by ranks, and all end. In a launch of its own."""
    mine = small()
    dist = motley.distribute(mine, batch(0, 12), F.cross_entropy, support.CLUSTER, adam(mine), all_devices=True)
    dist.train_step(*batch(0, 12))
    data = batch(1, 12)
    if RANK == 1:
        if sys.argv[2] == "batch":
            data = batch(2, 12)
        elif sys.argv[2] == "row":
            data[0][3] += 1
        elif sys.argv[2] == "flag":
            mine[3].p = 0.5
        elif sys.argv[2] == "size":
            data = batch(1, 11)
    start = time.time()
    try:
        dist.train_step(*data)
    except motley.UserError as error:
        print(f"differs {RANK} {error}", flush=True)
    except motley.PeerLost as error:
        print(f"lost {RANK} {error}", flush=True)
    assert time.time() - start < 10
    time.sleep(20 if RANK > 0 and sys.argv[2] == "row" else 0)  # who made of it what they wanted, and go on with something else


def later():
    """Where work is queued on the device (here it is said of the CPU) batches are compared one step later, and before anything leaves."""
    _agreement.has_streams = lambda device: True
    mine, path = small(), sys.argv[3]
    dist = motley.distribute(mine, batch(0, 12), F.cross_entropy, support.CLUSTER, adam(mine), all_devices=True)
    for seed in range(3):
        dist.train_step(*batch(seed, 12))
    if RANK == 0:  # alone
        dist.state_dict()
    dist.train_step(*batch(3, 9))  # by another plan
    data = batch(4, 12)
    if RANK == 1 and sys.argv[2] != "equal":
        data[0][3] += 1
    if sys.argv[2] == "verified":  # at once
        refused("differ in step 4: they were given different batches", lambda: dist.verify(*data))
        print(f"passed {RANK}", flush=True)
        return
    dist.train_step(*data)
    if sys.argv[2] == "captured":  # of a step that is recorded nothing is known: the one before it is compared by the next
        _agreement.capturing = lambda: True
        dist.train_step(*batch(5 + RANK, 12))
        _agreement.capturing = lambda: False
    if sys.argv[2] in ("leaves", "ends"):
        acts = [dist.state_dict, dist.optimizer_state_dict, mine.state_dict, lambda: dist.eval()(data[0]), lambda: dist.save(path)]
        for act in acts if sys.argv[2] == "leaves" else []:
            refused("differ in step 4: they were given different batches", act)
        print(f"passed {RANK}", flush=True)
        return
    try:
        dist.train_step(*batch(5, 12))
        dist.state_dict()
        dist.save(path)
        print(f"passed {RANK}", flush=True)
    except motley.UserError as error:
        refused(str(error), dist.state_dict)
        print(f"differs {RANK} {error}", flush=True)
    except motley.PeerLost as error:
        print(f"lost {RANK} {error}", flush=True)


def no_room():
    """Where memory is short a slice is compared, or nothing, with a warning that says so."""
    plain = _guard.free_memory
    try:
        for free, words in ((50_000, "only a slice"), (10, "no memory")):
            _guard.free_memory = lambda device: free
            model = small()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dist = motley.distribute(model, batch(0, 600), F.cross_entropy, support.CLUSTER, adam(model), all_devices=True)
                dist.train_step(*batch(1, 600))
            said = [str(w.message) for w in caught if "[verify]" in str(w.message)]
            assert len(said) == 1 and words in said[0], said
    finally:
        _guard.free_memory = plain


def asked_for():
    """verify() trains nothing, with dropout and batch normalisation too, and finds what is planted."""
    model = small(0.3)
    dist = motley.distribute(model, batch(0, 12), F.cross_entropy, support.CLUSTER, adam(model), all_devices=True, verify=False)
    for seed in range(3):
        dist.train_step(*batch(seed, 12))
    before = dist.state_dict()
    assert dist.verify(*batch(7, 12)) == ""
    assert dist.verify(*batch(7, 9)) == ""
    support.same(dist.state_dict(), before, 0)
    planted(dist, step=own_gradients(lambda g: [x * 1.01 for x in g]))
    words = dist.verify(*batch(7, 9))
    assert "0.weight of Linear 0: the gradient differs by 1.0e-02" in words, words


def elsewhere():
    """Changes with idle workers, with an optimizer of the user's own, in pipelines, and while gradients add up."""

    def embedded():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12))

    def freeze(model):
        model[1].requires_grad_(False)

    def tokens(sizes):
        return [support.token_batches(1, size)[0] for size in sizes]

    for cluster, sizes, change, options in (
        (support.far_off("last"), (96, 96, 40, 96), None, {}),
        (support.far_off("first"), (96, 96, 96), freeze, {}),
        (support.CLUSTER, (96, 96, 40, 96), None, {"all_devices": True, "optimizer": None}),
        (support.CLUSTER, (96, 96, 96), freeze, {"engine": "pipeline"}),
        (support.CLUSTER, (96, 96, 37, 96), None, {"engine": "pipeline"}),
    ):
        plain, mine, own = embedded(), embedded(), None
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        options = {"optimizer": torch.optim.SGD(mine.parameters(), lr=0.1), **options}
        dist = motley.distribute(mine, tokens(sizes)[0], F.cross_entropy, cluster, **options)
        if dist.optimizer is None:
            own = torch.optim.SGD(dist.parameters(), lr=0.1)
        for i, data in enumerate(tokens(sizes)):
            if change and i == 1:
                change(plain)
                change(mine)
            if own is None:
                together(dist, plain, optimizer, data)
                continue
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(plain(data[0]), data[1]).backward()
            optimizer.step()
            dist(*data).backward()
            own.step()
            dist.zero_grad()
        support.same(dist.state_dict(), plain.state_dict())

    plain, mine = embedded(), embedded()
    optimizer = sgd(plain)
    dist = motley.distribute(mine, tokens([96])[0], F.cross_entropy, support.CLUSTER, sgd(mine), all_devices=True)
    optimizer.zero_grad()
    for data in tokens((96, 40, 96)):
        (F.cross_entropy(plain(data[0]), data[1]) / 3).backward()
        (dist(*data) / 3).backward()
    optimizer.step()
    dist.step()
    support.same(dist.state_dict(), plain.state_dict())


cases = [globals()[sys.argv[1]]] if len(sys.argv) > 1 else [every_fault, other_sizes, other_lengths, frozen_and_thawed, asked_for, no_room, elsewhere]
for case in cases:
    case()
    if RANK == 0:
        print("done", case.__name__, flush=True)
