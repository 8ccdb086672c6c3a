"""Complex numbers in a step: what functions make of them equals plain PyTorch, with gradients, or is refused in one line; complex
buffers are state like others."""

import os
import tempfile
import unittest

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support
import test_capture_functions

# With parameters w [6, 4], p (positive), x, y, i (indices), b (a mask); z and u are complex tensors of w and p.
EQUAL = """
torch.view_as_real(z * u)
torch.view_as_real(z * u.conj())
torch.view_as_real(z * x[:, :2])
torch.view_as_real(x[:, :2] * z)
torch.view_as_real(z * 2.5 - 1)
torch.view_as_real((2 + 1j) * z + 3j)
torch.view_as_real(1 - z)
torch.view_as_real(1j - z + 2)
torch.view_as_real(torch.sub(z, u, alpha=2))
torch.view_as_real(torch.add(w[:, :2], z, alpha=0.5))
torch.view_as_real(z / u)
torch.view_as_real(z / p[:, :2])
torch.view_as_real(1 / u)
torch.view_as_real(u.reciprocal())
torch.view_as_real(-z)
torch.view_as_real(z**2 + z.square() * z)
torch.view_as_real(torch.exp(1j * w))
torch.view_as_real(torch.exp(z))
torch.view_as_real((w * 1j).exp())
torch.view_as_real(torch.polar(p, w))
torch.view_as_real(torch.polar(torch.ones_like(w), w) * torch.polar(p, x))
torch.view_as_real(torch.polar(w, p))
torch.view_as_real(torch.complex(w, p))
torch.complex(w, x).abs()
(z * 0).abs() + z.abs()
z.angle()
torch.angle(torch.complex(w * 0, p * 0))
z.real + z.imag
torch.real(z) * torch.imag(u)
z.conj().imag
torch.view_as_real(z.mT @ u)
torch.view_as_real(torch.matmul(z, u.H))
torch.view_as_real(torch.outer(z[0], u[1]))
torch.view_as_real(torch.einsum("ij,kj->ik", z, u))
torch.view_as_real(z.reshape(3, 4).transpose(0, 1))
torch.view_as_real(z.view(2, 3, 2).permute(2, 0, 1).contiguous())
torch.view_as_real(z.unsqueeze(1).expand(6, 3, 2).flatten(1))
torch.view_as_real(torch.cat([z, u], dim=-1))
torch.view_as_real(torch.cat([z, x[:, :2]], dim=0))
torch.view_as_real(torch.stack([z, u]).squeeze(0))
torch.view_as_real(z.chunk(2, dim=-1)[1] * torch.split(u, 1, dim=1)[0])
torch.view_as_real(z[i])
torch.view_as_real(z[..., None, :1] + u[:, None])
torch.view_as_real(z[1:5:2, -1])
torch.view_as_real(z[:, [1, 0]])
torch.view_as_real(torch.stack([row for row in z]))
torch.view_as_real(z.repeat(2, 1))
torch.view_as_real(z.repeat_interleave(2, dim=0))
torch.view_as_real(torch.broadcast_to(z[0], (6, 2)))
torch.view_as_real(z.index_select(0, i).clone())
torch.view_as_real(torch.where(b[:, :2], z, u))
torch.view_as_real(torch.where(b[:, :2], z, 0.0 * u))
torch.view_as_real(z.masked_fill(b[:, :2], 1j))
torch.view_as_real(z.roll(1, 0).flip(1))
torch.view_as_real(F.pad(z, (1, 1)))
torch.view_as_real(z.sum(0) + z.mean() + z.cumsum(0)[-1])
torch.view_as_real(z.to(torch.complex64).to(torch.complex128))
torch.view_as_real(w.to(torch.complex128) * z[:, :1])
torch.view_as_real(w.type(torch.complex128))
torch.view_as_real(w.cdouble())
z.to(w.dtype) + u.type_as(w).double()
torch.view_as_real(torch.zeros_like(z) + torch.ones(6, 2, dtype=torch.complex128) * z)
torch.view_as_real(z.new_zeros(6, 2) + torch.full((6, 2), 1 + 2j) * u)
torch.view_as_real(torch.tensor([1 + 2j, 3j]) * z)
torch.view_as_real(torch.tensor(2j) * z + torch.as_tensor([1j, 2.0]))
torch.view_as_real(z.clone().mul_(u).add_(1j))
torch.view_as_real(torch.zeros_like(z).copy_(z).neg_())
torch.view_as_real(store(torch.zeros_like(z), 0, u[0]))
torch.view_as_real(store(z.clone(), (slice(None), 1), w[:, 0]))
torch.view_as_real(store(torch.view_as_complex(w.clone().view(6, 2, 2)), 0, u[0]))
torch.view_as_real(torch.view_as_complex(w.clone().view(6, 2, 2)).mul_(u))
w.clone() + stored_through(w.clone(), u)
torch.view_as_real(z.detach() * u)
(z == z).double() + (z != u) + torch.isfinite(z) + torch.isnan(z)
w * (z.is_complex() and z.dim() == 2 and z.shape == (6, 2) and z.dtype == torch.complex128 and z.device == w.device and len(z) == 6)
w * (z.requires_grad and not z.detach().requires_grad and torch.is_complex(z) and z.numel() == 12 and z.stride() == (2, 1))
torch.view_as_real(nn.Identity()(z) * OUTSIDE[:6])
torch.view_as_real(OUTSIDE[2:8].conj() * z + OUTSIDE.conj()[:6].imag)
OUTSIDE.real[:6] * torch.imag(z) + OUTSIDE.imag[:6] + OUTSIDE[:6].abs() + abs(z)
torch.view_as_real(OUTSIDE.mT[:, :6].T * z * OUTSIDE[:6].H.mT)
torch.view_as_real((-OUTSIDE + 1)[:6] * (1 - OUTSIDE)[1:7] ** 2 * z / OUTSIDE[0] - 2 / OUTSIDE[1])
torch.view_as_real(torch.stack([row for row in OUTSIDE])[: len(OUTSIDE) - 3] * z)
torch.view_as_real(torch.cat([OUTSIDE, z]).to("cpu")[4:]) * (OUTSIDE.dtype == z.dtype and OUTSIDE.is_complex()) + (OUTSIDE == OUTSIDE)[0]
torch.view_as_real(OUTSIDE.view(3, 3, 2).unbind(1)[0] @ z.t())
torch.view_as_real(HELD["one"][0] * z) * HELD["one"][0].shape[-1]
torch.view_as_real(torch.utils.checkpoint.checkpoint(lambda a: a * a.conj(), z, use_reentrant=False))
torch.view_as_real(torch.utils.checkpoint.checkpoint(lambda a: a * a.conj(), z, use_reentrant=True))
torch.view_as_real(z) * (torch.promote_types(z.dtype, w.dtype) == z.dtype)
torch.fft.fft(z).real + torch.fft.fft(w).imag[:, :2]
torch.view_as_real(torch.fft.fft(z, dim=0, norm="ortho") * torch.fft.ifft(u, 9, dim=0, norm="forward")[:6])
torch.view_as_real(torch.fft.fft(torch.cat([w.flatten(), p.flatten(), x.flatten()] * 3).to(z.dtype) * z.flatten()[5]))
torch.fft.ifft(torch.cat([w.flatten(), p.flatten()] * 2), 71).abs()
torch.fft.rfft(w).abs() + torch.fft.rfft(p, 7, dim=0, norm="forward").imag.sum()
torch.fft.irfft(z, dim=0) + torch.fft.irfft(u, 7, dim=0).sum() + torch.fft.irfft(z * u, 5, dim=1, norm="ortho").sum()
torch.fft.irfft(torch.fft.rfft(w, dim=0) * 2, 6, dim=0)
torch.fft.irfft(torch.fft.rfft(torch.cat([w.flatten(), p.flatten()] * 3)))
torch.view_as_real(torch.fft.fft2(w) * torch.fft.ifft2(p, norm="ortho"))
torch.view_as_real(torch.fft.fftn(w[:, :, None] * x[:, None], dim=(1, 2)) + torch.fft.ifftn(z[..., None], s=(4, 4), dim=(1, 2)))
torch.fft.irfft2(torch.fft.rfft2(w) * (2 + 1j), s=(6, 4))
torch.fft.irfftn(torch.fft.rfftn(w[:, :, None] * x[:, None], dim=(1, 2)) * 1j, s=(4, 4), dim=(1, 2))
torch.view_as_real(torch.fft.fftshift(torch.fft.fft(w, dim=0), dim=0) * torch.fft.ifftshift(z, dim=(0, 1))[:, :1])
torch.fft.fftshift(w, 1)
torch.stft(w.flatten()[None].repeat(2, 1), 8, 4, window=p.flatten()[:8], return_complex=True).abs()
torch.view_as_real(torch.stft(w.flatten(), 10, 3, 8, center=False, normalized=True, onesided=False, return_complex=True))
"""
REFUSED = {
    "(z * torch.from_numpy(OUTSIDE.numpy())[:6]).real": "reads a number",
    "torch.fft.hfft(z)": "fft",
    "torch.fft.rfft(z).abs()": "fft_rfft of complex numbers",
    "torch.istft(z, 10)": "istft",
    "torch.linalg.norm(z)": "norm",
    "w * (1 if z else 2)": "reads a number",
    "w * z[0, 0].item().real": "reads a number",
    "torch.sqrt(z).real": "sqrt",
    "(z ** 0.5).real": "power",
    "(2 ** z).real": "power",
    "F.softmax(z, -1).real": "softmax",
    "written(z)": "changed in place",
    "store(z.conj(), 0, u[0]).real": "in common with others",
    "store(z.reshape(3, 4), 0, 1j).real + z.real.reshape(3, 4)": "in common with others",
    "torch.view_as_real(w.clone().copy_(z[:, :1]))": "a real tensor takes complex numbers",
    "Square.apply(z).real": "Square, a function with a backward pass of its own",
    "torch.view_as_real(Pair.apply(w))": "Pair, a function with a backward pass of its own",
    "torch.mul(z, u, out=z).real": "out=",
    "z.view(torch.float64) * w": "another type",
    "torch.sum(z, dtype=torch.float32)": "float32",
    "(torch.randn(6, 2, dtype=torch.complex128) * z).real": "randn",
}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0].conj()


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.complex(x, x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.real + gradient.imag


def store(z, index, value):
    z[index] = value
    return z


def stored_through(x, u):
    """A real tensor that is changed through its complex view."""
    z = torch.view_as_complex(x.view(6, 2, 2))
    z *= u
    z.real += 1
    torch.view_as_real(z).mul_(2)
    z.imag = z.real * 2
    return x * z.real.repeat(1, 2)


def written(z):
    """The real view of a complex tensor is changed, which the tensor shares in plain PyTorch."""
    z = z * 2
    torch.view_as_real(z).add_(1)
    return z.real


OUTSIDE = torch.polar(torch.ones(9, 2, dtype=torch.float64), torch.arange(18, dtype=torch.float64).reshape(9, 2))
HELD = {"one": [OUTSIDE[3:].clone()]}
NAMES = dict(store=store, written=written, stored_through=stored_through, OUTSIDE=OUTSIDE, HELD=HELD, Square=Square, Pair=Pair, nn=nn)


class Model(test_capture_functions.Model):
    """Of an expression in z and u too."""

    def forward(self, x, y, i, b):
        z, u = (torch.view_as_complex(t.reshape(6, 2, 2)) for t in (self.w, self.p))
        result = eval(self.code, dict(NAMES, torch=torch, F=F, x=x, y=y, i=i, b=b, z=z, u=u, **self._parameters))
        result = result * torch.cos(torch.arange(result.numel(), dtype=result.dtype)).reshape(result.shape)
        return result.sum() + sum(p.sum() for p in self._parameters.values()) * 0.01


def captured(test, model, inputs, loss_fn=None):
    """Captures a model, compares loss, gradients and buffers after the step with plain PyTorch, and returns the graph."""
    graph = motley.capture(model, (inputs,), loss_fn)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    slots = {slot.name: slot for slot in motley._step.slots_of(model)[1]}
    step = motley._step.Step(model, (inputs,), loss_fn)
    leaves = {name: tensor for name, tensor in step.leaves}
    buffers = {name: slot.tensor.detach().clone() for name, slot in slots.items()}
    loss, gradients, updates = motley._motley.interpret(graph, parameters, dict(buffers), leaves, 0, 0)
    expected = step.loss([tensor for _, tensor in step.leaves])
    expected.backward()
    test.assertTrue(torch.allclose(loss, expected, rtol=1e-9, atol=1e-9))
    for name, p in model.named_parameters():
        if p.grad is not None:
            test.assertLess((gradients[name] - p.grad).abs().max().item(), 1e-9, name)
    for name in graph.updated_buffers:
        holder, key = slots[name].places[0]
        test.assertLess((updates[name] - slots[name].state_of(holder[key])).abs().max().item(), 1e-9, name)
    return graph


class Phase(nn.Module):
    """A complex buffer that the step changes, in place or by another, and one that is a conjugate view."""

    def __init__(self, in_place, other="cpu"):
        super().__init__()
        self.inner, self.in_place = nn.Linear(4, 4), in_place
        self.register_buffer("phase", torch.polar(torch.ones(2), torch.tensor([0.3, 1.1])))
        self.register_buffer("back", torch.polar(torch.ones(2), torch.tensor([0.3, 1.1])).conj())
        self.register_buffer("unused", torch.ones(2, dtype=torch.complex64))

    def forward(self, x):
        z = torch.view_as_complex(self.inner(x).unflatten(-1, (2, 2)))
        if self.in_place:
            self.phase.mul_(self.back)
        else:
            self.phase = self.phase * self.back
        return torch.view_as_real(z * self.phase * self.back).flatten(1)


class Complex(support.InDoublePrecision):
    def test_functions_equal_plain_torch(self):
        for expression in EQUAL.strip().splitlines():
            with self.subTest(expression):
                graph = captured(self, Model(expression), test_capture_functions.batch())
                self.assertLessEqual(set(graph.unknown_ops), {"aten::index_add"})

    def test_what_cannot_be_followed_is_refused_with_its_line(self):
        for expression, words in REFUSED.items():
            with self.subTest(expression):
                with self.assertRaisesRegex(motley.CaptureError, words) as caught:
                    motley.capture(Model(expression), (test_capture_functions.batch(),))
                self.assertNotIn("\n", str(caught.exception))
                self.assertRegex(str(caught.exception), r"^\[capture\] (<expression>|.*test_complex.py):\d+: ")

    def test_buffers_that_the_step_changes(self):
        for in_place in (True, False):
            graph = captured(self, Phase(in_place), torch.randn(6, 4), lambda out: out.square().mean())
            self.assertEqual(graph.updated_buffers, ["phase"])

    def test_types_are_torchs(self):
        def loss(out):
            self.assertEqual(out.dtype, torch.float32)
            return out.sum()

        class Single(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.factors = nn.Linear(4, 4), torch.ones(6, 2, dtype=torch.complex64)

            def forward(self, x):
                z = torch.view_as_complex(self.inner(x).float().reshape(6, 2, 2))
                assert (z * self.factors).dtype == torch.complex64
                assert (z * torch.arange(2)).dtype == torch.complex64
                assert (z * torch.ones(2)).dtype == torch.complex128
                assert (torch.arange(2) * 1j).dtype == torch.complex128
                return torch.view_as_real(z * self.factors)

        captured_loss = motley.capture(Single(), (torch.randn(6, 4),), loss)
        self.assertGreater(captured_loss.nodes, 0)

    def test_what_is_cached_in_the_forward_pass(self):
        class Cached(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.factors, self.by_length = nn.Linear(4, 4), None, {}

            def forward(self, x):
                if self.factors is None:
                    self.factors = torch.exp(1j * torch.outer(torch.arange(6.0, device=x.device), torch.tensor([1.0, 0.1])))
                if len(x) not in self.by_length:
                    self.by_length[len(x)] = self.factors.conj()
                z = torch.view_as_complex(self.inner(x).unflatten(-1, (2, 2)))
                return torch.view_as_real(z * self.factors + self.by_length[len(x)])

        model = Cached()
        captured(self, model, torch.randn(6, 4), lambda out: out.square().sum())
        self.assertTrue(model.factors.is_complex())  # of the plain model, which ran after it

    def test_a_model_without_memory(self):
        graph = motley.capture(Phase(True).to("meta"), (torch.empty(6, 4, device="meta"),), lambda out: out.square().mean())
        self.assertEqual(graph.updated_buffers, ["phase"])

    def test_autocast_leaves_complex_numbers(self):
        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    z = torch.view_as_complex(self.inner(x).float().unflatten(-1, (2, 2)))
                    z = z @ z.t()
                    assert z.dtype == torch.complex64
                    return self.out(torch.view_as_real(z).flatten(1)[:, :4])

        model, x = Mixed().float(), torch.randn(6, 4, dtype=torch.float32)
        graph = motley.capture(model, (x,), lambda out: out.float().square().mean())
        self.assertNotIn("bf16[6,6]", str(graph))

    def test_parameters_and_inputs_are_refused_by_name(self):
        class Trained(nn.Module):
            def __init__(self):
                super().__init__()
                self.factors = nn.Parameter(torch.ones(2, dtype=torch.complex64))

            def forward(self, x):
                return (self.factors * x).abs().sum()

        with self.assertRaisesRegex(motley.CaptureError, "parameter factors is complex.*view_as_real"):
            motley.capture(Trained(), (torch.randn(6, 2),))
        with self.assertRaisesRegex(motley.CaptureError, "input inputs is complex.*view_as_real"):
            motley.capture(nn.Linear(2, 2), (torch.ones(6, 2, dtype=torch.complex64),), lambda out: out.sum())

    def test_a_complex_view_of_a_parameter_in_a_closure_is_refused_by_name(self):
        model = Model("w")
        held = torch.view_as_complex(model.w.data.view(6, 2, 2))
        with self.assertRaisesRegex(motley.CaptureError, "shares the memory of w"):
            motley.capture(model, (test_capture_functions.batch(),), lambda out: out + (held * 2).real.sum())

    def test_other_steps_are_captured_as_before(self):
        model, inputs = nn.Linear(4, 4), torch.randn(6, 4)
        before = torch.autograd.Function.apply, torch.Tensor.__getitem__
        graph = motley.capture(model, (inputs,), lambda out: out.sum())
        self.assertEqual(before, (torch.autograd.Function.apply, torch.Tensor.__getitem__))
        model.factors = torch.ones(4, dtype=torch.complex64)  # which it does not read
        self.assertEqual(graph.ops, motley.capture(model, (inputs,), lambda out: out.sum()).ops)

    def test_state_on_three_workers(self):
        with tempfile.TemporaryDirectory() as folder:
            output = support.launch(3, os.path.join(support.HERE, "complex_worker.py"), folder)
        self.assertIn("done", output)


if __name__ == "__main__":
    unittest.main()
