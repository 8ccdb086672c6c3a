"""What a step reads beside its tensors and changes on the way, and what it keeps for the next: followed or refused."""

import collections
import gc
import itertools
import os
import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from corpus import case


def refused(words, engines=("spmd", "pipeline")):
    return {engine: words for engine in engines}


def labels(g):
    return torch.randn(12, 6, generator=g), torch.randint(5, (12,), generator=g)


class Net(nn.Module):
    """forward is function(module, x); `parts` are its attributes."""

    function = staticmethod(lambda m, x: m.head(torch.tanh(m.first(x))))

    def __init__(self, function=None, **parts):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        if function is not None:
            self.function = function
        for name, value in parts.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


def net(function=None, **parts):
    return Net(function, **parts), F.cross_entropy, labels


def changing(change):
    """A loop with change(model, i) before step i."""

    def train(trainer, batches):
        losses = []
        for i, batch in enumerate(batches):
            change(trainer.model, i)
            loss = trainer(*batch)
            loss.backward()
            trainer.step()
            losses.append(loss.item())
        return losses

    return train


ACTIVATIONS = [torch.tanh, torch.relu, F.gelu, torch.sigmoid]


# ---- changed between steps ----------------------------------------------------------------------------------------------


@case(train=changing(lambda model, i: setattr(type(model), "scale", 1.0 + i)))
def attribute_of_a_class():
    class Base(Net):
        scale = 1.0

        def forward(self, x):
            return self.scale * super().forward(x)

    class Derived(Base):
        pass

    return Derived(), F.cross_entropy, labels


@case(train=changing(lambda model, i: setattr(model, "act", ACTIVATIONS[i])))
def function_of_torch():
    return net(lambda m, x: m.head(m.act(m.first(x))), act=torch.tanh)


@case(train=changing(lambda model, i: setattr(type(model), "act", staticmethod(ACTIVATIONS[i]))))
def static_method():
    class Static(Net):
        act = staticmethod(torch.tanh)

        def forward(self, x):
            return self.head(self.act(self.first(x)))

    return Static(), F.cross_entropy, labels


@case(train=changing(lambda model, i: setattr(type(model), "helped", lambda self, x: (1 + i) * x)))
def method():
    class Helped(Net):
        def helped(self, x):
            return x

        def forward(self, x):
            return self.helped(super().forward(x))

    return Helped(), F.cross_entropy, labels


@case(train=changing(lambda model, i: setattr(model, "forward", types.MethodType(lambda m, x: m.head(m.first(x)) * (i + 1), model))))
def forward_pass():
    return net()


@case(train=changing(lambda model, i: os.environ.__setitem__("MOTLEY_TEST_SCALE", str(1 + i))))
def environment():
    os.environ["MOTLEY_TEST_SCALE"] = "1"
    return net(lambda m, x: float(os.environ["MOTLEY_TEST_SCALE"]) * m.head(torch.tanh(m.first(x))))


@case(train=changing(lambda model, i: model.scales.append(model.scales.popleft())))
def queue_of_numbers():
    return net(lambda m, x: m.head(torch.tanh(m.first(x))) * m.scales[0], scales=collections.deque([1.0, 2.0, 0.5]))


# ---- kept for the next step ---------------------------------------------------------------------------------------------


def averaged(m, x):
    h = torch.tanh(m.first(x))
    m.kept = h.mean(0).detach() if m.kept is None else 0.5 * m.kept + 0.5 * h.mean(0).detach()
    return m.head(h + m.kept)


@case(refused=refused(r"Net.kept changes from None to a tensor \[16\] .* next step fails"))
def tensor_that_is_none_first():
    return net(averaged, kept=None)


def remembered(m, x):
    h = torch.tanh(m.first(x))
    m.kept.append(h.detach())
    return m.head(h + sum(m.kept) / len(m.kept))


@case(refused=refused("Net.kept changes"))
def tensors_in_a_list():
    return net(remembered, kept=[])


@case(refused=refused("Net.kept changes"))
def tensors_in_a_queue():
    return net(remembered, kept=collections.deque(maxlen=2))


def counted(m, x):
    m.calls += 1
    return m.head(torch.tanh(m.first(x))) * (2.0 if m.calls % 3 == 0 else 1.0)


@case()
def number_that_matters_later():
    return net(counted, calls=0)


@case(refused=refused("forward pass changes what it reads"))
def number_in_a_closure():
    calls = [0]

    def function(m, x):
        calls[0] += 1
        return m.head(torch.tanh(m.first(x))) * calls[0]

    return net(function)


@case()
def assertions_about_numbers():
    def checked(x, bound):
        assert (
            x.abs().max().item() < bound
        ), f"{x}"
        return x

    def forward(m, x):
        assert not torch.isnan(x).any(), "a batch with NaN"
        assert x.min() < x.max() and len(x) > 0
        if (
            x.dim() != 2
            or x.abs().sum() == 0
        ):
            raise ValueError("no batch")
        if x.abs().max() > 1e30:
            raise OverflowError("too large")
        elif len(x) > 0:
            torch._assert(torch.isfinite(x).all(), "not finite")
            x = x * 2.0
        else:
            x = x * 3.0
        return m.head(torch.tanh(checked(m.first(x), 1e6)))

    return net(forward)


@case(train=changing(lambda model, i: model.grow(i)))
def closure_that_the_garbage_collector_forgot():
    scale = 1.0

    class Scaled(Net):
        def forward(self, x):
            return super().forward(x) * scale

        def grow(self, i):
            nonlocal scale
            scale = 1.0 / (1 + i)

    model = Scaled()
    gc.freeze()
    return model, F.cross_entropy, labels


@case()
def parameters_that_are_clamped_first():
    def forward(m, x):
        m.first.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            m.second.weight.clamp_(min=0)
            m.head.bias.relu_().clamp_(max=0.2)
        return m.head(torch.tanh(m.second(torch.tanh(m.first(x)))))

    return net(forward)


@case(refused=refused("changes parameter first.weight"))
def parameter_that_shrinks_at_every_step():
    def forward(m, x):
        m.first.weight.data.mul_(0.9)
        return m.head(torch.tanh(m.first(x)))

    return net(forward)


@case(refused=refused("changes parameter first.weight"))
def parameter_that_is_clamped_after_it_is_read():
    def forward(m, x):
        y = m.first(x)
        m.first.weight.data.clamp_(-0.1, 0.1)
        return m.head(torch.tanh(y))

    return net(forward)


@case(refused=refused("another one each time"))
def iterator():
    return net(lambda m, x: m.head(torch.tanh(m.first(x))) * next(m.numbers), numbers=itertools.count(1))


@case(refused=refused("compiled by torch.jit"))
def compiled_part():
    return net(lambda m, x: m.head(m.part(m.first(x))), part=torch.jit.script(nn.Tanh()))


@case()
def mask_made_once():
    def function(m, x):
        if m.mask is None:
            m.mask = torch.triu(torch.ones(16, 16)) / 4
        if 16 not in m.tables:
            m.tables[16] = torch.arange(16.0).cos()
        return m.head(torch.tanh(m.first(x)) @ m.mask + m.tables[16])

    return net(function, mask=None, tables={})


@case()
def activations_are_kept_and_not_read():
    def function(m, x):
        m.last = torch.tanh(m.first(x))
        m.seen.append(m.last.detach())
        return m.head(m.last)

    return net(function, last=None, seen=[])


@case()
def hook_that_keeps_a_log():
    log, latest = [], {}
    model, loss_fn, batch = net()
    model.first.register_forward_hook(lambda module, inputs, output: log.append(output.detach()))
    model.head.register_forward_hook(lambda module, inputs, output: latest.update(head=output.detach()))
    return model, loss_fn, batch


# ---- buffers that a step changes more than once -------------------------------------------------------------------------


def normalised():
    return {"norm": nn.BatchNorm1d(16, momentum=0.3)}


@case()
def batch_normalisation_recomputed():
    return net(lambda m, x: m.head(checkpoint(lambda y: torch.relu(m.norm(m.first(y))), x, use_reentrant=False)), **normalised())


@case()
def batch_normalisation_recomputed_reentrantly():
    return net(lambda m, x: m.head(checkpoint(lambda y: torch.relu(m.norm(m.second(y))), m.first(x))), **normalised())


@case()
def batch_normalisation_recomputed_twice():
    def function(m, x):
        def part(y):
            return torch.tanh(m.norm(m.second(y)))

        return m.head(checkpoint(part, checkpoint(part, m.first(x), use_reentrant=False), use_reentrant=False))

    return net(function, **normalised())


@case()
def batch_normalisation_called_twice():
    return net(lambda m, x: m.head(torch.relu(m.norm(m.first(x))) + m.norm(m.first(x * 0.5 + 1))), **normalised())


@case()
def batch_normalisation_without_gradients_first():
    def function(m, x):
        with torch.no_grad():
            m.norm(m.first(2 * x))
        return m.head(m.norm(m.first(x)))

    return net(function, **normalised())


# ---- counted by the forward pass itself ---------------------------------------------------------------------------------


def annealed(m, x):
    m.calls += 1
    return m.head(torch.tanh(m.first(x))) * min(1.0, m.calls / 3)


@case()
def weight_that_grows_with_calls():
    return net(annealed, calls=0)


def seen(trainer, batches):
    losses = changing(lambda model, i: None)(trainer, batches)
    return losses + [float(trainer.model.calls), float(sum(trainer.model.sizes))]


def logged(m, x):
    m.calls += 1
    m.sizes.append(x.shape[1] * m.calls)
    return m.head(torch.tanh(m.first(x)))


@case(train=seen)
def counters_that_are_read_afterwards():
    return net(logged, calls=0, sizes=[])


def switched(m, x):
    m.calls += 1
    if m.calls > 11:
        return m.head(torch.relu(m.second(m.first(x))))
    return m.head(torch.tanh(m.first(x)))


def many(trainer, batches):
    return changing(lambda model, i: None)(trainer, batches * 4)


@case(train=many)
def other_branch_after_many_calls():
    return net(switched, calls=0)
