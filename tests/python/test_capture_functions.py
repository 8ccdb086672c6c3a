"""Functions of torch in a little model, with their gradients: each is captured and equals plain PyTorch in double precision, as do
random programs of its theory, or is refused in one line. Which are refused is a list."""

import sys
import unittest
import warnings

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import functions
import motley
import soundness_module
import support

# What needs numbers where a capture has shapes, random numbers that a step does not draw, complex functions of real numbers, or sparse
# and written tensors.
REFUSED = (
    # complex numbers
    "torch.linalg.eigvals(",
    # sparse tensors
    "torch.sparse_coo_tensor(", "torch.eye(6).to_sparse()", "torch.sparse.mm(",
    # numbers, and shapes that depend on them
    "w.sum().item()", "w if w.sum()", "float(w[0", "w.tolist()", "torch.nonzero(", "torch.is_nonzero(", "torch.equal(",
    "torch.allclose(", "torch.cov(", "torch.corrcoef(", "torch.bincount(", "torch.unique(", "torch.combinations(",
    "torch.lobpcg(", "torch.masked_select(", "w.repeat_interleave(torch.tensor(", "w[b]", "w[w > 0]",
    "w[torch.tensor([True", "w[x[:, 0] > 0]", "F.one_hot(i)",
    "nn.AdaptiveLogSoftmaxWithLoss(", "nn.RNN(4, 3) -> k(nn.utils.rnn.pack_padded",
    # random numbers that a step does not draw
    "F.rrelu(w, training=True)", "torch.randperm(", "w[torch.randperm(", "w.gather(1, torch.multinomial(", "torch.bernoulli(",
    "torch.poisson(", "torch.normal(", "torch.empty(6, 4).log_normal_", "torch.empty(6, 4).cauchy_",
    "torch.empty(6, 4).geometric_", "torch.rand(6, 4, generator", "torch.distributions.Categorical(logits=w).sample()",
    "torch.distributions.Gamma(p, p).rsample()",
    # memory read as another type, parameters that are written
    "w.view(torch.int64)", "F.embedding(i, w, max_norm", "nn.CrossMapLRN2d(",
)  # fmt: skip
if torch.__version__ < "2":
    REFUSED += ("torch.index_reduce(",)  # its backward pass asks for numbers

# Drawn anew: captured, but not the numbers of plain PyTorch.
RANDOM = ("F.gumbel_softmax(", "F.alpha_dropout(", "F.feature_alpha", "torch.randn", "w[:, torch.randint(")


class Model(nn.Module):
    def __init__(self, expression):
        super().__init__()
        module, _, call = expression.rpartition(" -> ")
        torch.manual_seed(7)
        if module:
            self.k = eval(module, {"nn": nn})
        g = torch.Generator().manual_seed(3)

        def parameter(*shape):
            return nn.Parameter(torch.randn(*shape, generator=g))

        self.w, self.p = parameter(6, 4), nn.Parameter(parameter(6, 4).detach().abs() + 0.5)
        base = parameter(4, 4).detach() + 3 * torch.eye(4)
        self.s, self.f = nn.Parameter(base.clone()), nn.Parameter(base.t().contiguous().t())
        a = parameter(4, 4).detach()
        self.d = nn.Parameter(a @ a.t() + 4 * torch.eye(4))
        self.v, self.img, self.sig, self.vol = parameter(4), parameter(2, 3, 8, 8), parameter(2, 3, 10), parameter(1, 2, 4, 6, 6)
        self.register_buffer("buf", torch.randn(4, generator=g))
        self.code = compile(call, "<expression>", "eval")

    def forward(self, x, y, i, b):
        names = dict(torch=torch, F=F, nn=nn, x=x, y=y, i=i, b=b, buf=self.buf, **self._parameters)
        names.update(k=getattr(self, "k", None), numpy=sys.modules.get("numpy"), functorch=sys.modules.get("functorch"))
        result = eval(self.code, names)
        total = sum(p.sum() for p in self._parameters.values()) * 0.01
        for out in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                total = total + (out * torch.cos(torch.arange(out.numel(), dtype=out.dtype)).reshape(out.shape)).sum()
            elif isinstance(out, torch.Tensor):
                total = total + out.sum()
        return total


def batch():
    g = torch.Generator().manual_seed(5)
    x, y = torch.randn(6, 4, generator=g), torch.randn(6, 4, generator=g)
    return x, y, torch.tensor([3, 0, 1, 1, 2, 3]), torch.randn(6, 4, generator=g) > 0.3


def outcome(expression, programs=2):
    """("equal" | "refused" | "WRONG" | "CRASH", what of it)"""
    model, inputs = Model(expression), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graph = motley.capture(model, (inputs,))
        except motley.UserError as error:
            text = str(error)
            return ("refused" if text.startswith("[capture] ") and "\n" not in text else "CRASH"), text
        except Exception as error:
            return "CRASH", f"{type(error).__name__}: {error}"
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {slot.name: slot.tensor.detach().clone() for slot in motley._step.slots_of(model)[1]}
    leaves = {f"inputs.{n}": t for n, t in enumerate(inputs)}
    if not expression.startswith(RANDOM):
        try:
            loss, gradients, _ = motley._motley.interpret(graph, parameters, dict(buffers), leaves, 0, 0)
        except Exception as error:
            return "CRASH", f"{type(error).__name__}: {error}"
        expected = model(*inputs)
        expected.backward()
        if not torch.allclose(loss, expected, rtol=1e-9, atol=1e-9, equal_nan=True):
            return "WRONG", f"the loss is {loss.item()}, not {expected.item()}"
        for name, p in model.named_parameters():
            if p.grad is not None and not torch.allclose(gradients[name], p.grad, rtol=1e-8, atol=1e-8, equal_nan=True):
                return "WRONG", f"the gradient of {name} is off by {(gradients[name] - p.grad).abs().max().item()}"
    try:
        limit = 1e-5 if "f32" in str(graph) or "f16" in str(graph) else 1e-8
        error, what = soundness_module.worst_error(str(graph), parameters, buffers, leaves, [2, 3], programs, 11)
    except Exception as error:
        return "CRASH", f"{type(error).__name__}: {error}"
    return ("equal", "") if error < limit else ("WRONG", f"programs are off by {error:.1e}: {what}")


class Functions(support.InDoublePrecision):
    @classmethod
    def setUpClass(cls):
        import functorch  # noqa: F401
        import numpy  # noqa: F401

        super().setUpClass()

    def check(self, group):
        for expression in functions.expressions(group):
            with self.subTest(expression):
                kind, what = outcome(expression)
                self.assertEqual(kind, "refused" if expression.startswith(REFUSED) else "equal", what)

    def test_there_are_enough(self):
        self.assertGreaterEqual(sum(len(functions.expressions(group)) for group in functions.GROUPS), 600)


for _group in functions.GROUPS:
    setattr(Functions, f"test_{_group}", lambda self, group=_group: self.check(group))


if __name__ == "__main__":
    unittest.main()
