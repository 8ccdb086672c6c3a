"""wrap(): a model that a training loop calls like one in DistributedDataParallel, and that trains by a plan."""

import contextlib
import inspect

import torch

from ._distribute import distribute
from ._errors import UserError
from ._mirror import ours
from ._step import call_model, replaced


class Outputs(dict):
    """What a training step gives: its loss, and under the names of the model's other outputs what the plain model computes.

    The others are computed when they are asked for, by one more forward pass of this worker on its own.
    """

    def __init__(self, loss, others):
        super().__init__(loss=loss)
        self._others = others

    def _filled(self):
        if self._others is not None:
            others, self._others = self._others, None
            self.update((key, value) for key, value in others().items() if key != "loss")
        return self

    def __getitem__(self, name):
        if isinstance(name, int):
            return list(self.values() if name == 0 else self._filled().values())[name]
        if name not in self.keys() and name not in self._filled().keys():
            raise KeyError(f"the model's outputs are {', '.join(self.keys())}, not {name}")
        return super().__getitem__(name)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None


class _WithLoss(torch.nn.Module):
    """A model whose loss is made outside of it: loss_of(model, inputs)."""

    def __init__(self, module, loss_of):
        super().__init__()
        self.module, self._loss_of = module, loss_of

    def forward(self, **inputs):
        return {"loss": self._loss_of(self.module, inputs)}


_PREFIX = "module."  # of names in its state


class Wrapped(torch.nn.Module):
    """The model of `wrap`; `module` is the model, `dist` what trains it from the first step on.

    loss_of(model, inputs), which may be set until the first step, makes the loss in the place of the model.
    """

    def __init__(self, module, optimizer, options, loss_of=None):
        super().__init__()
        self.module, self.dist, self.loss_of = module, None, loss_of
        self._optimizer, self._options = optimizer, options
        self._signature = inspect.signature(module.forward)
        self._takes_more = any(p.kind is p.VAR_POSITIONAL for p in self._signature.parameters.values())

    def _inputs(self, args, kwargs):
        if not args:
            return kwargs
        if self.loss_of is not None:
            return {**self._signature.bind_partial(*args).arguments, **kwargs}
        if self._takes_more and not kwargs:
            return args
        bound = self._signature.bind(*args, **kwargs)
        more = [p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        inputs = dict(bound.arguments)
        for name in more:
            inputs.update(inputs.pop(name, {}))
        return inputs

    def forward(self, *args, **kwargs):
        if not (self.training and torch.is_grad_enabled()):
            return self.module(*args, **kwargs)
        inputs = self._inputs(args, kwargs)
        if self.dist is None:
            module = self.module
            if self.loss_of is not None:
                module = type(type(module).__name__, (_WithLoss,), {})(module, self.loss_of)
            self.dist = distribute(module, (inputs,), None, optimizer=self._optimizer, **self._options)
        loss = self.dist(inputs)
        at = self.dist._held.count

        def others():
            return self._others(inputs, at)

        return Outputs(loss, others)

    def _others(self, inputs, at):
        """The model's outputs of a step that was made, without gradients; its buffers stay as they are."""
        if self.loss_of is not None:
            return {}
        if self.dist._held.count != at:
            raise UserError("[distribute] outputs of a step that is over; read them before the optimizer's step")
        if self.dist._run.graph.random_nodes:
            raise UserError(
                "[distribute] the step draws random numbers, dropout for example, so that a further forward pass would give other "
                "outputs than the step had; call model.eval() and the model again, or set the dropout to 0"
            )
        whole, step = self.dist._whole_tensors(), self.dist._step_spec
        slots = step.parameters + step.buffers
        tensors = [whole[slot.name].detach().clone().to(slot.tensor.device) for slot in slots]
        with torch.no_grad(), ours(), replaced(slots, tensors):
            output = call_model(self.module, inputs)
        if isinstance(output, dict):
            return dict(output.items())
        if isinstance(output, (tuple, list)):
            return {str(i): value for i, value in enumerate(output) if i > 0}
        return {name: value for name, value in vars(output).items()} if hasattr(output, "loss") else {}

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """As of torch.nn.utils, by the norm of the whole gradient; collective."""
        return self.dist.clip_grad_norm_(max_norm, norm_type)

    def no_sync(self):
        """Nothing: gradients of several batches add up between steps of the optimizer as they are."""
        return contextlib.nullcontext()

    def state_dict(self, *args, **kwargs):
        """Of the model, under its own names, whole and trained."""
        if self.dist is None:
            return self.module.state_dict(*args, **kwargs)
        state = self.dist.state_dict()
        if self.loss_of is not None:
            state = {name.removeprefix(_PREFIX): value for name, value in state.items()}
        return state

    def load_state_dict(self, state, strict=True):
        """Takes a state of the model; every worker passes the same."""
        if self.dist is None:
            return self.module.load_state_dict(state, strict)
        if self.loss_of is not None:
            state = {_PREFIX + name: value for name, value in state.items()}
        return self.dist.load_state_dict(state, strict)


def wrap(model, optimizer="adamw", cluster=None, *, plan=None, loss_of=None, **options):
    """A model to be called in a training loop as one in DistributedDataParallel is: it trains by a plan.

        model = motley.wrap(model, optimizer, "cluster.yaml")
        for batch in loader:                   # of the whole batch, the same on every worker
            loss = model(**batch).loss         # the model returns its loss
            loss.backward()
            optimizer.step(); optimizer.zero_grad()

    Where the model does not return its loss, loss_of(model, inputs) makes it of the batch: what is passed to the wrapped model by name.
    The first training step plans, with its batch as the example. The other outputs of the model, such as logits, can be read before the
    optimizer's step. In eval() it is the plain model. options as for distribute().
    """
    if (cluster is None) == (plan is None):
        raise UserError("[distribute] give either a cluster or a plan")
    if options.get("elastic"):
        raise UserError("[distribute] elastic needs a loop that asks dist.steps where it is; use motley.distribute")
    return Wrapped(model, optimizer, {"cluster": cluster, "plan": plan, **options}, loss_of)
