"""Cases of training: small models, losses, optimizers and loops as people write them.

A case is a function `build() -> (model, loss_fn, batch)`, where batch(generator) is one batch, under the decorator:

    @case(optimizer=torch.optim.Adagrad, refused={"pipeline": "momentum"})
    def adagrad(): ...

optimizer   makes it from model.parameters(); AdamW by default
train       train(trainer, batches) -> losses, for other loops than the plain one; see Plain
library     of families/: larger, so that searches are cut short
single      in single precision, to 1e-5; in double, to 1e-8, by default
refused     {engine: regular expression} where a refusal with these words is what the user should get, or "either" where a
            refusal is as good as plain PyTorch's numbers
"""

import copy
import glob
import os

import torch

import support

STEPS = 4
LIBRARIES = ("transformers", "timm", "diffusers")  # of which families/ has models


class Case:
    def __init__(self, name, build, optimizer=None, train=None, refused=None, single=False, library=False):
        self.name, self.build, self.train, self.single, self.library = name, build, train or plain_loop, single, library
        self.optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        self.refused = refused or {}


def case(**options):
    def register(build):
        build.case = Case(build.__name__, build, **options)
        return build

    return register


def plain_loop(trainer, batches):
    losses = []
    for batch in batches:
        loss = trainer(*batch)
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    return losses


class Plain:
    """What a training loop may ask of its model, by plain PyTorch; `By` answers the same by a plan."""

    def __init__(self, model, loss_fn, optimizer):
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer

    def __call__(self, *batch):
        return support.plain_loss(self.model, self.loss_fn, batch)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self, **options):
        self.optimizer.zero_grad(**options)

    def clip(self, limit, **options):
        with_gradient = [p for p in self.model.parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(with_gradient, limit, **options)

    def output(self, inputs):
        """The model's output in eval mode."""
        self.model.eval()
        with torch.no_grad():
            output = self.model(inputs)
        self.model.train()
        return output

    def state_dict(self):
        return copy.deepcopy(self.model.state_dict())

    def load_state_dict(self, state):
        self.model.load_state_dict(state)

    def named_parameters(self):
        return self.model.named_parameters()


class By:
    def __init__(self, dist, model, optimizer):
        self.dist, self.model, self.optimizer = dist, model, optimizer

    def __call__(self, *batch):
        return self.dist(*batch)

    def step(self):
        self.dist.step()

    def zero_grad(self, **options):
        self.dist.zero_grad(**options)

    def clip(self, limit, **options):
        return self.dist.clip_grad_norm_(limit, **options)

    def output(self, inputs):
        self.dist.eval()
        with torch.no_grad():
            output = self.dist(inputs)
        self.dist.train()
        return output

    def state_dict(self):
        return {name: value.clone() for name, value in self.dist.state_dict().items()}

    def load_state_dict(self, state):
        self.dist.load_state_dict(state)

    def named_parameters(self):
        return self.dist.named_parameters()


def _families(library):
    return os.path.join(support.HERE, "families", library + "_models.py")


def _of_family(family):
    """A family's model in its tiny size, on batches of six rows."""
    build, batch = family.tiny

    def rows(generator):
        given = batch(6, generator)
        return given if isinstance(given, tuple) else (given,)

    return Case(family.name, lambda: (build(), family.loss_fn, rows), family.optimizer, single=family.single, library=True)


def cases(file):
    """The cases of cases/FILE.py, in order; those of 'architectures' are the files of models/, those of a library its families/."""
    if file == "architectures":
        return [Case(name, build) for name, build in support.architectures()]
    if file in LIBRARIES:
        return [_of_family(family) for family in support.load_file(_families(file)).families()]
    module = support.load_file(os.path.join(support.HERE, "cases", file + ".py"))
    return [value.case for value in vars(module).values() if hasattr(value, "case")]


def files():
    files = sorted(os.path.basename(f)[:-3] for f in glob.glob(os.path.join(support.HERE, "cases", "*.py")))
    return ["architectures", *LIBRARIES] + files
