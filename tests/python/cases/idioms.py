"""What training scripts do around a model."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from corpus import case

EITHER = {"spmd": "either", "pipeline": "either"}


def labels(g):
    return torch.randn(12, 6, generator=g), torch.randint(5, (12,), generator=g)


def layers():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


def net():
    return layers(), F.cross_entropy, labels


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Of(nn.Module):
    """A model from a function of (module, inputs...)."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.function = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *inputs, **named):
        return self.function(self, *inputs, **named)


# ---- loops -------------------------------------------------------------------------------------------------------------


def clipping(trainer, batches):
    losses = []
    for i, batch in enumerate(batches):
        loss = trainer(*batch)
        loss.backward()
        losses += [loss.item(), float(trainer.clip(0.1 if i % 2 else 100.0))]
        trainer.step()
    return losses


@case(train=clipping)
def clipped():
    return net()


@case(train=clipping)
def clipped_where_gradients_are_one_value():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.zeros(5)) for _ in range(3))
            self.body = layers()

        def forward(self, x):
            return self.body(x) + self.a + self.b - self.c

    return Twice(), F.cross_entropy, labels


@case(train=clipping)
def clipped_where_a_gradient_is_expanded():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.shift = layers(), nn.Parameter(torch.zeros(12, 5))

        def forward(self, x):
            return self.body(x).sum() + self.shift.sum()

    return Shift(), lambda y: y * 0.1, lambda g: (torch.randn(12, 6, generator=g),)


def accumulating(trainer, batches):
    losses = []
    for i, batch in enumerate(batches):
        loss = trainer(*batch) / 2
        loss.backward()
        losses.append(loss.item())
        if i % 2:
            trainer.step()
    return losses


@case(train=accumulating)
def accumulated():
    return net()


def keeping(trainer, batches):
    losses = []
    for batch in batches:
        loss = trainer(*batch)
        loss.backward()
        trainer.optimizer.step() if hasattr(trainer, "model") and not hasattr(trainer, "dist") else trainer.dist.optimizer.step()
        trainer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses


@case(train=keeping)
def gradients_kept_as_zeros():
    return net()


def scheduled(make):
    def train(trainer, batches):
        losses = []
        scheduler = make(trainer.optimizer)
        for batch in batches:
            loss = trainer(*batch)
            loss.backward()
            trainer.step()
            scheduler.step(loss.item()) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else scheduler.step()
            losses.append(loss.item())
        return losses

    return train


@case(optimizer=sgd, train=scheduled(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 3)))
def cosine():
    return net()


@case(optimizer=sgd, train=scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=8)))
def one_cycle():
    return net()


@case(optimizer=sgd, train=scheduled(lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1)))
def plateau():
    return net()


def attached_before(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    optimizer.warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    return optimizer


def with_its_own(trainer, batches):
    losses = []
    for batch in batches:
        loss = trainer(*batch)
        loss.backward()
        trainer.step()
        trainer.optimizer.warmup.step()
        losses.append(loss.item())
    return losses


@case(optimizer=attached_before, train=with_its_own)
def scheduler_attached_before():
    return net()


def by_hand(trainer, batches):
    losses = []
    for i, batch in enumerate(batches):
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.2 / (i + 1)
        loss = trainer(*batch)
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    return losses


@case(optimizer=sgd, train=by_hand)
def rate_set_by_hand():
    return net()


def evaluating(trainer, batches):
    losses = []
    for batch in batches:
        loss = trainer(*batch)
        loss.backward()
        trainer.step()
        losses += [loss.item(), trainer.output(batch[0][:7]).sum().item()]
    return losses


@case(train=evaluating)
def evaluated_between_steps():
    return net()


def averaging(trainer, batches):
    losses, average = [], trainer.state_dict()
    for batch in batches:
        loss = trainer(*batch)
        loss.backward()
        trainer.step()
        average = {name: 0.9 * average[name] + 0.1 * value for name, value in trainer.state_dict().items()}
        losses.append(loss.item())
    trainer.load_state_dict(average)
    return losses + [trainer(*batches[0]).item()]


@case(train=averaging)
def average_of_weights():
    return net()


def going_back(trainer, batches):
    losses, start = [], trainer.state_dict()
    for i, batch in enumerate(batches):
        if i == 2:
            trainer.load_state_dict(start)
        loss = trainer(*batch)
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    return losses


@case(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), train=going_back)
def going_back_to_the_start():
    return net()


def annealing(trainer, batches):
    losses = []
    for i, batch in enumerate(batches):
        trainer.model.beta = 1.0 + i
        loss = trainer(*batch)
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    return losses


@case(train=annealing, refused=EITHER)
def attribute_that_changes():
    model = Of(lambda m, x: m.beta * m.head(torch.tanh(m.first(x))), beta=1.0)
    return model, F.cross_entropy, labels


def unfreezing(trainer, batches):
    losses = []
    for i, batch in enumerate(batches):
        trainer.model[0].requires_grad_(i >= 2)
        loss = trainer(*batch)
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    return losses


@case(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), train=unfreezing, refused=EITHER)
def unfrozen_on_the_way():
    model, loss_fn, batch = net()
    model[0].requires_grad_(False)
    return model, loss_fn, batch


def shorter(trainer, batches):
    x, y = batches[-1]
    return [loss for batch in [*batches[:-1], (x[:7], y[:7])] for loss in plain(trainer, batch)]


def plain(trainer, batch):
    loss = trainer(*batch)
    loss.backward()
    trainer.step()
    return [loss.item()]


@case(train=shorter, refused=EITHER)
def last_batch_is_smaller():
    return net()


def normalising(trainer, batches):
    losses = []
    for i, batch in enumerate(batches):
        for module in trainer.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.train(i < 2)
        losses += plain(trainer, batch)
    return losses


@case(train=normalising, refused=EITHER)
def normalisation_frozen_on_the_way():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    return model, F.cross_entropy, labels


# ---- models ------------------------------------------------------------------------------------------------------------


@case()
def frozen_from_the_start():
    model, loss_fn, batch = net()
    model[0].requires_grad_(False)
    return model, loss_fn, batch


@case()
def tied_weights():
    model = Of(lambda m, x: m.head(torch.tanh(m.second(torch.tanh(m.third(torch.tanh(m.first(x))))))), third=nn.Linear(16, 16))
    model.third.weight = model.second.weight
    return model, F.cross_entropy, labels


@case()
def low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    return nn.Sequential(Adapted(nn.Linear(6, 16)), nn.ReLU(), Adapted(nn.Linear(16, 5))), F.cross_entropy, labels


@case()
def recomputed():
    def forward(m, x):
        x = checkpoint(lambda y: torch.tanh(m.first(y)), x, use_reentrant=False)
        return m.head(checkpoint(lambda y: torch.relu(m.second(y)), x, use_reentrant=False))

    return Of(forward), F.cross_entropy, labels


@case()
def recomputed_reentrantly():
    def forward(m, x):
        return m.head(checkpoint(m.second, torch.tanh(m.first(x))))

    return Of(forward), F.cross_entropy, labels


@case()
def recomputed_in_sequence():
    body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    return Of(lambda m, x: m.head(checkpoint_sequential(m.body, 2, m.first(x))), body=body), F.cross_entropy, labels


@case()
def gradients_are_stopped():
    return Of(lambda m, x: m.head(torch.tanh(m.first(x)) + m.second(torch.tanh(m.first(x)).detach()))), F.cross_entropy, labels


@case()
def teacher_without_gradients():
    teacher = layers().requires_grad_(False)

    def forward(m, x):
        with torch.no_grad():
            wanted = m.teacher(x)
        return m.head(torch.tanh(m.first(x))), wanted

    return Of(forward, teacher=teacher), lambda y, t: F.cross_entropy(y[0], t) + F.mse_loss(*y), labels


@case()
def counted_in_a_buffer():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = layers()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.register_buffer("scale", torch.full((5,), 2.0))

        def forward(self, x):
            self.seen += 1
            return self.body(x) * self.scale

    return Counting(), F.cross_entropy, labels


MEAN, DEVIATION = torch.tensor([[0.4] * 6, [0.2] * 6]).double()


@case()
def constants_that_are_views():
    return Of(lambda m, x: m.head(torch.tanh(m.first((x - MEAN) / DEVIATION)))), F.cross_entropy, labels


@case()
def constants_in_a_list():
    tables = [torch.linspace(i, i + 1, 16).double() for i in range(3)]
    whole = torch.arange(32.0).double().view(16, 2) / 20
    return Of(lambda m, x: m.head(torch.tanh(m.first(x)) * tables[1] + whole[:, 1] - whole[:, 0] * tables[2])), F.cross_entropy, labels


@case()
def rounded_with_a_straight_gradient():
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Of(lambda m, x: m.head(Round.apply(4 * m.first(x)) / 4)), F.cross_entropy, labels


@case()
def gradient_reversed():
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -0.5 * gradient

    def forward(m, x):
        h = torch.tanh(m.first(x))
        return m.head(h), m.second(Reverse.apply(h))

    return Of(forward), lambda y, t: F.cross_entropy(y[0], t) + y[1].square().mean(), labels


@case(refused=EITHER)
def hook_on_a_parameter():
    model, loss_fn, batch = net()
    model[2].weight.register_hook(lambda gradient: gradient * 0.1)
    return model, loss_fn, batch


@case(refused=EITHER)
def hook_on_an_activation():
    def forward(m, x):
        h = torch.tanh(m.first(x))
        h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return m.head(h)

    return Of(forward), F.cross_entropy, labels


@case(refused=EITHER)
def forward_hook():
    model, loss_fn, batch = net()
    model[1].register_forward_hook(lambda module, inputs, output: output * 1.5)
    return model, loss_fn, batch


@case(refused=EITHER)
def backward_hook():
    model, loss_fn, batch = net()
    model[2].register_full_backward_hook(lambda module, inputs, outputs: tuple(i if i is None else i * 2 for i in inputs))
    return model, loss_fn, batch


@case(refused=EITHER)
def loss_with_a_parameter():
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.t = nn.Parameter(torch.tensor(2.0))

        def forward(self, y, t):
            return F.cross_entropy(y * self.t, t)

    return layers(), Warm(), labels


@case(refused=EITHER)
def parameter_outside():
    outside = nn.Parameter(torch.zeros(5))
    return Of(lambda m, x: m.head(torch.tanh(m.first(x))) + outside), F.cross_entropy, labels


@case(refused=EITHER)
def penalty_of_gradients():
    def forward(m, x):
        x = x.clone().requires_grad_()
        y = m.head(torch.tanh(m.first(x)))
        gradient = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        return y, (gradient.norm(2, dim=1) - 1).square().mean()

    return Of(forward), lambda y, t: F.cross_entropy(y[0], t) + y[1], labels


@case()
def inputs_by_name():
    def batch(g):
        x, y = labels(g)
        return {"x": x, "scale": torch.rand(12, 1, generator=g)}, y

    return Of(lambda m, x, scale: m.head(torch.tanh(m.first(x)) * scale)), F.cross_entropy, batch


@case()
def returns_its_loss():
    model = Of(lambda m, x, y: {"loss": F.cross_entropy(m.head(torch.tanh(m.first(x))), y)})
    return model, None, lambda g: (labels(g),)


@case()
def several_losses():
    def loss(y, t):
        return F.cross_entropy(y[0], t) + 0.5 * y[1].square().mean() + 0.1 * y[2].abs().mean()

    def forward(m, x):
        a = torch.tanh(m.first(x))
        b = torch.relu(m.second(a))
        return m.head(b), a, b

    return Of(forward), loss, labels


@case()
def dropout_of_nothing():
    return Of(lambda m, x: m.head(F.dropout(torch.relu(m.first(x)), 0.0))), F.cross_entropy, labels


@case()
def in_place():
    def forward(m, x):
        y = m.first(x)
        y += 1
        y.mul_(0.5).clamp_(-1, 1)
        y[:, 0] = 0
        y[:, 1:3] *= 2
        return m.head(F.relu(y, inplace=True))

    return Of(forward), F.cross_entropy, labels


@case(refused={engine: "number out of a tensor|values" for engine in ("spmd", "pipeline")})
def branch_on_a_number():
    def forward(m, x):
        y = m.first(x)
        return m.head(y if y.sum() > 0 else -y)

    return Of(forward), F.cross_entropy, labels


@case(refused={engine: "numpy" for engine in ("spmd", "pipeline")})
def random_numbers_of_numpy():
    import numpy

    return Of(lambda m, x: m.head(m.first(x) * float(numpy.random.rand()))), F.cross_entropy, labels


@case(refused=EITHER)
def average_of_itself_as_teacher():
    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = layers()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            for name, p in list(self.teacher.named_parameters()):
                owner = self.teacher.get_submodule(name.rsplit(".", 1)[0])
                delattr(owner, name.rsplit(".", 1)[1])
                owner.register_buffer(name.rsplit(".", 1)[1], p.detach())

        def forward(self, x):
            with torch.no_grad():
                for (_, a), (_, b) in zip(self.teacher.named_buffers(), self.student.named_parameters()):
                    a.mul_(0.9).add_(b, alpha=0.1)
                wanted = self.teacher(x)
            return self.student(x), wanted

    return Momentum(), lambda y, t: F.cross_entropy(y[0], t) + F.mse_loss(*y), labels


@case(refused=EITHER)
def autocast_to_sixteen_bits():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return m.head(torch.tanh(m.first(x)))

    return Of(forward), F.cross_entropy, labels
