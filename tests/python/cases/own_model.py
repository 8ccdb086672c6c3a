"""What loops do with the model itself, not with what distribute() returns: it shows what is trained; what would be lost is refused."""

import copy
import io

import torch
import torch.nn.functional as F
from torch import nn

from corpus import case


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.first(x))))


def net():
    return Net(), F.cross_entropy, lambda g: (torch.randn(12, 6, generator=g), torch.randint(5, (12,), generator=g))


class Plain(nn.Module):
    """Without batch normalisation, so that pipelines take it in parts."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


def plain():
    return (Plain(), *net()[1:])


def size(tensors):
    """A number that changes where any element does."""
    return sum((tensor.double() * torch.arange(1, tensor.numel() + 1).view(tensor.shape).cos()).sum().item() for tensor in tensors)


def reading(read, every=1, after_backward=None, start=lambda model: None):
    """A loop that calls read(model, what start() made) after steps, and has what it returns beside the losses."""

    def train(trainer, batches):
        model, losses = trainer.model, []
        made = start(model)
        for i, batch in enumerate(batches):
            loss = trainer(*batch)
            loss.backward()
            if after_backward is not None:
                after_backward(trainer, i)
            trainer.step()
            losses.append(loss.item())
            if (i + 1) % every == 0:
                losses.append(read(model, made))
        return losses

    return train


def same(refused):
    return {engine: refused for engine in ("spmd", "pipeline")}


# ---- read ---------------------------------------------------------------------------------------------------------------


@case(train=reading(lambda model, _: size(model.state_dict().values())))
def state_dict():
    return net()


@case(train=reading(lambda model, _: size(model.parameters()), every=2))
def parameters_every_second_step():
    return plain()


@case(train=reading(lambda model, held: size(held), start=lambda model: list(model.parameters())))
def parameters_listed_before_training():
    return net()


@case(train=reading(lambda model, held: size(held.values()), start=lambda model: {k: v.detach() for k, v in model.named_parameters()}))
def views_taken_before_training():
    return plain()


@torch.no_grad()
def evaluated(model, _):
    model.eval()
    output = model(torch.linspace(-1, 1, 18).view(3, 6))
    model.train()
    return size([output])


@case(train=reading(evaluated))
def model_run_in_eval_mode():
    return net()


@case(train=reading(lambda model, _: size([model.first(torch.linspace(-1, 1, 12).view(2, 6))])))
def layer_run_alone():
    return plain()


@case(train=reading(lambda model, _: size(copy.deepcopy(model).parameters())))
def copied():
    return net()


def saved(model, _):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return size(torch.load(file).values())


@case(train=reading(saved))
def saved_and_loaded():
    return net()


@torch.no_grad()
def averaged(model, average):
    for mean, parameter in zip(average.parameters(), model.parameters()):
        mean.lerp_(parameter, 0.3)
    return size(average.parameters())


@case(train=reading(averaged, start=copy.deepcopy))
def moving_average_by_parameters():
    return net()


def averaged_by_data(model, average):
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            average[name].data.mul_(0.5).add_(0.5 * tensor.data)
    return size(average.values())


@case(train=reading(averaged_by_data, start=lambda model: copy.deepcopy(model.state_dict())))
def moving_average_by_state():
    return net()


def averaged_by_torch(model, average):
    average.update_parameters(model)
    return size(average.module.parameters())


@case(train=reading(averaged_by_torch, start=torch.optim.swa_utils.AveragedModel))
def moving_average_by_torch():
    return plain()


@case(train=reading(lambda model, _: float(model.first.weight.detach().numpy().sum()) + model.head.bias.tolist()[0]))
def numpy_and_lists():
    return plain()


@case(train=reading(lambda model, _: model.norm.running_mean.sum().item() + float(model.norm.num_batches_tracked)))
def running_statistics():
    return net()


@case(train=reading(lambda model, _: torch.nn.utils.parameters_to_vector(model.parameters()).norm().item()))
def one_vector():
    return plain()


def of_inputs(model, _):
    x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    return size([gradient])


@case(train=reading(of_inputs))
def gradient_of_inputs():
    return plain()


def cleared(trainer, batches):
    """Gradients are cleared through the model; two batches a step."""
    losses = []
    for i, batch in enumerate(batches):
        loss = trainer(*batch)
        loss.backward()
        losses.append(loss.item())
        if i % 2 == 0:
            trainer.model.zero_grad()
        else:
            trainer.optimizer.step()
            for parameter in trainer.model.parameters():
                parameter.grad = None
    return losses + [size(trainer.model.parameters())]


@case(train=cleared)
def gradients_cleared_through_the_model():
    return plain()


def unchanged(model, _):
    model.to("cpu").double()
    return sum(p.numel() for p in model.parameters() if p.requires_grad) + size(model.parameters())


@case(train=reading(unchanged))
def moved_to_where_it_is():
    return plain()


# ---- changed ------------------------------------------------------------------------------------------------------------

CHANGED = same("of the model was changed")
GRADIENT = same("of a gradient of the model itself")


def change(how):
    def train(trainer, batches):
        def changed(trainer, i):
            if i == 1:
                with torch.no_grad():
                    how(trainer.model)

        return reading(lambda model, _: 0.0, after_backward=changed)(trainer, batches)

    return train


@case(train=change(lambda model: [p.data.clamp_(-0.05, 0.05) for p in model.parameters()]), refused=CHANGED)
def clamped():
    return plain()


@case(train=change(lambda model: setattr(model.head.weight, "data", torch.full((5, 16), 0.1))), refused=CHANGED)
def other_data():
    return plain()


@case(train=change(lambda model: model.first.weight.view(-1)[::2].mul_(0.5)), refused=CHANGED)
def scaled_through_a_view():
    return plain()


@case(train=change(lambda model: nn.init.zeros_(model.head.bias)), refused=CHANGED)
def initialised_again():
    return plain()


@case(train=change(lambda model: model.first.weight.__setitem__((0, 0), 1.0)), refused=CHANGED)
def one_element():
    return plain()


@case(train=change(lambda model: torch.add(model.head.bias, 1.0, out=model.head.bias)), refused=CHANGED)
def written_as_output():
    return plain()


@case(train=change(lambda model: model.norm.reset_running_stats()), refused=same("of the model was changed"))
def statistics_reset():
    return net()


def clipped(trainer, i):
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)


@case(train=reading(lambda model, _: 0.0, after_backward=clipped), refused=GRADIENT)
def clipped_by_torch():
    return plain()


def scaled(trainer, i):
    for parameter in trainer.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@case(train=reading(lambda model, _: 0.0, after_backward=scaled), refused=GRADIENT)
def gradients_scaled():
    return plain()


def logged(trainer, i):
    return [parameter.grad.norm() for parameter in trainer.model.parameters() if parameter.grad is not None]


@case(train=reading(lambda model, _: 0.0, after_backward=logged), refused=GRADIENT)
def gradients_logged():
    return plain()


def stepped_beside(trainer, i):
    for parameter in trainer.model.parameters():
        if parameter.grad is not None:
            parameter.data -= 0.01 * parameter.grad


@case(train=reading(lambda model, _: 0.0, after_backward=stepped_beside), refused=same("gradient of the model itself|of the model was changed"))
def stepped_by_hand():
    return plain()


def penalised(trainer, batches):
    losses = []
    for batch in batches:
        loss = trainer(*batch) + 0.01 * sum(p.square().sum() for p in trainer.model.parameters())
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    return losses


@case(train=penalised, refused=same("wants a gradient of parameter .*, which would be lost"))
def penalty_beside_the_step():
    return plain()


def by_numpy(trainer, batches):
    losses = []
    for batch in batches:
        loss = trainer(*batch)
        loss.backward()
        total = sum(float((p.grad.cpu().numpy() ** 2).sum()) for _, p in trainer.named_parameters() if p.grad is not None)
        for _, p in trainer.named_parameters():
            if p.grad is not None:
                p.grad.mul_(min(1.0, 0.1 / total**0.5))
        trainer.step()
        losses.append(loss.item())
    return losses


@case(train=by_numpy, refused=same("numpy of a piece of a parameter"))
def norm_of_pieces_by_numpy():
    return plain()


class Watched(Plain):
    """Keeps what its layers return by hooks that its first forward pass registers."""

    def forward(self, x):
        if not getattr(self, "hooked", False):
            for layer in self.children():
                layer.register_forward_hook(lambda module, args, output: self.kept.append(output) if self.kept is not None else None)
            self.hooked = True
        self.kept = []
        y = super().forward(x)
        penalty = torch.stack([output.square().mean() for output in self.kept[:2]]).sum()
        self.kept = None
        return y, penalty


@case()
def hooks_of_the_first_pass():
    return Watched(), lambda y, t: F.cross_entropy(y[0], t) + 0.01 * y[1], net()[2]


class Said(Plain):
    def forward(self, x):
        self_said = f"{(x > 0).sum()} of {x.numel()} are positive, the largest is {x.max()}"
        assert "are positive" in self_said
        return super().forward(x)


@case()
def numbers_in_a_message():
    return Said(), *net()[1:]
