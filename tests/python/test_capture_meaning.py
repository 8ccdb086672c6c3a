"""What a step means beside its operators: tensors from outside, memory that is shared, checkpoints, states of random numbers,
autocast and numbers of 16 bits. Each is as in plain PyTorch, or refused in one line."""

import functools
import unittest
import warnings

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import motley

TABLE = torch.arange(24.0).reshape(4, 6) / 7
HALVES = torch.tensor([[0.4, 0.4, 0.4, 0.1], [0.2, 0.2, 0.2, 0.3]])


class Model(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        torch.manual_seed(2)
        self.l, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.body = forward

    def forward(self, x):
        return self.body(self, x)


class Meaning(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        self.x = torch.rand(6, 4)
        warnings.simplefilter("ignore")

    def graph(self, forward, loss=None, **parts):
        model = Model(forward, **parts)
        return model, motley.capture(model, (self.x,), loss or (lambda out: out.float().pow(2).mean()))

    def run_graph(self, model, graph, seed=0):
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        buffers = {slot.name: slot.tensor.detach().clone() for slot in motley._step.slots_of(model)[1]}
        return motley._motley.interpret(graph, parameters, buffers, {"inputs": self.x}, seed, 0)

    def equal(self, forward, loss=None, limit=1e-6, **parts):
        """The graph's loss, gradients and missing gradients are those of plain PyTorch."""
        model, graph = self.graph(forward, loss, **parts)
        got, gradients, updates = self.run_graph(model, graph)
        want = (loss or (lambda out: out.float().pow(2).mean()))(model(self.x.clone()))
        want.backward()
        self.assertAlmostEqual(got.item(), want.item(), delta=limit * max(1, abs(want.item())))
        for name, p in model.named_parameters():
            self.assertEqual(name in gradients, p.grad is not None, name)
            if p.grad is not None:
                worst = (gradients[name] - p.grad).abs().max() / p.grad.abs().max().clamp(min=1e-3)
                self.assertLess(worst.item(), limit * 10, name)
        for name, update in updates.items():
            self.assertLess((update - getattr(model, name)).abs().max().item(), limit * 10, name)
        return graph

    def refused(self, forward, *words, **parts):
        with self.assertRaises(motley.UserError) as caught:
            self.graph(forward, **parts)
        text = str(caught.exception)
        self.assertTrue(text.startswith("[capture] ") and "\n" not in text, text)
        for word in words:
            self.assertIn(word, text)


class Constants(Meaning):
    def test_views_of_one_tensor_are_constants_of_their_own(self):
        self.equal(lambda m, x: (m.l(x) - HALVES[0]) / HALVES[1])
        rows = [TABLE[0, :4], TABLE[1, :4], TABLE[:, 0], TABLE[:, 1], TABLE.t()[2], TABLE.reshape(-1)[::6], TABLE[0, 1:5]]
        self.equal(lambda m, x: sum(m.l(x) * row * n for n, row in enumerate(rows)))
        self.equal(lambda m, x: m.l(x) @ TABLE + (m.l(x) @ TABLE.t().contiguous().t()).flip(1))
        self.equal(lambda m, x: m.l(x) * TABLE[:, :4] [0] + (m.l(x)[:4] * TABLE[:, :4].t()).sum(0) + TABLE[:, :4].sum())

    def test_expanded_and_single_numbers(self):
        one, view = torch.tensor(0.25), TABLE[2, 3]
        self.equal(lambda m, x: m.l(x) * one + view - TABLE[0:1, 0:1].expand(6, 4) + torch.maximum(m.l(x), one))
        self.equal(lambda m, x: m.l(x) / torch.tensor([2.0], dtype=torch.float64)[0])

    def test_numbers_of_numpy(self):
        array = numpy.arange(8.0, dtype=numpy.float32).reshape(2, 4)
        self.equal(lambda m, x: m.l(x) * torch.from_numpy(array[0]) + torch.from_numpy(array)[1] + torch.as_tensor(array[1, ::2]).sum())
        self.equal(lambda m, x: m.l(x) * float(array[1, 1]) + m.l(x)[:, numpy.array([0, 0, 3])].sum())

    def test_made_in_the_step_and_written(self):
        def body(m, x):
            scale = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
            scale[1] += x.mean()
            other = x.new_tensor([[1.0], [2.0]])
            other.mul_(2)
            return m.l(x) * scale + other.sum() + torch.as_tensor([0.5, 0.1, 0.0, 0.0], device=x.device)

        self.equal(body)

    def test_written_from_outside_is_refused(self):
        outside, rows = torch.zeros(4), torch.zeros(2, 4)
        self.refused(lambda m, x: m.l(x) + outside.add_(1), "changes a tensor", "register it as a buffer")
        self.refused(lambda m, x: m.l(x) * rows[0].copy_(x[0]).sum(), "changes a tensor")

    def test_memory_of_the_model_and_of_its_inputs_is_refused_by_name(self):
        model = Model(lambda m, x: m.l(x) @ held[0])
        for tensor, name in ((model.l.weight.data, "l.weight"), (model.l.weight.detach()[:, :2], "l.weight"), (self.x[:4].t(), "inputs")):
            held = [tensor if tensor.shape[0] == 4 else tensor.t()]
            with self.assertRaisesRegex(motley.CaptureError, f"shares the memory of {name}"):
                motley.capture(model, (self.x,), lambda out: out.mean())

    def test_large_integers_complex_and_sparse(self):
        large, small = torch.tensor([2**60 + 1, 3, 4, 5]), torch.tensor([-(2**31), 2**40, 0, 1])
        self.refused(lambda m, x: m.l(x) * (large % 7), "2^53")
        self.equal(lambda m, x: m.l(x) * (small % 7))
        self.equal(lambda m, x: m.l(x) * torch.tensor(2j).abs() + torch.ones(4, dtype=torch.complex64).real)
        self.equal(lambda m, x: torch.fft.rfft(m.l(x)).abs())
        self.refused(lambda m, x: torch.linalg.eigvals(m.l(x).T @ m.l(x)).abs(), "real numbers")
        self.refused(lambda m, x: torch.sparse.mm(EYE, m.l(x)), "sparse")

    def test_masks_and_infinities(self):
        mask = torch.triu(torch.full((4, 4), float("-inf")), 1)
        self.equal(lambda m, x: (m.l(x)[:4] + mask).softmax(1))
        self.equal(lambda m, x: m.l(x)[:, [True, False, True, True]] + m.l(x)[:, [[0], [1]]].sum() + m.k(x)[[0, 2], [1, 3]].sum())


EYE = torch.eye(6).to_sparse()


class Memory(Meaning):
    def test_buffers_that_share_memory(self):
        whole = torch.ones(6)

        def adds(m, x):
            m.a.add_(1)
            return m.l(x) * m.b.sum()

        self.refused(adds, "buffers a and b share memory", a=whole[:4], b=whole[2:])
        self.refused(adds, "share memory", a=whole, b=whole.view(2, 3))
        self.refused(adds, "share memory", a=whole[1:3], b=whole)

        def reads(m, x):
            return m.l(x) * m.a.sum() + m.b.sum()

        self.equal(reads, a=whole[:4], b=whole[2:])
        self.equal(adds, a=whole[:2], b=whole[2:])

    def test_a_buffer_that_is_a_parameters_memory(self):
        for view in (lambda w: w.data, lambda w: w.detach().t(), lambda w: w.data[0]):
            model = Model(lambda m, x: m.l(x) * m.seen.sum())
            model.register_buffer("seen", view(model.l.weight))
            with self.assertRaisesRegex(motley.CaptureError, "seen shares the memory of parameter l.weight"):
                motley.capture(model, (self.x,), lambda out: out.mean())


class Places(Meaning):
    def test_tensors_are_where_the_model_is(self):
        self.equal(lambda m, x: m.l(x) * (2 if x.device.type == "cpu" else 3))
        self.equal(lambda m, x: m.l(x) * (2 if x.is_cuda or m.k.weight.is_meta else 3) * (1 if (x * 2).is_cpu else 5))

        def rotates(m, x):
            with torch.autocast(device_type=x.device.type, enabled=False):
                return m.l(x) * torch.arange(4, device=x.device) + torch.zeros(4, device=m.l.bias.device).to(x.device)

        self.equal(rotates)
        self.equal(lambda m, x: m.l(x).cpu() + torch.ones(4).to(x) + torch.empty_like(x, device=x.device).fill_(2))
        self.refused(lambda m, x: m.l(x) * (1 if x.data_ptr() else 2), "address of a tensor")

    def test_a_backward_pass_inside_is_refused(self):
        def trains(m, x):
            m.k(x).mean().backward()
            return m.l(x)

        self.refused(trains, "calls backward()")


class Checkpoints(Meaning):
    def test_are_plain_calls(self):
        def half(m, part, x, scale=1.0):
            return torch.tanh(part(x)) * scale

        for reentrant in (False, True):
            options = {"use_reentrant": reentrant}
            self.equal(lambda m, x: checkpoint(m.k, m.l(x), **options))
            self.equal(lambda m, x: checkpoint(functools.partial(half, m, m.k), m.l(x), preserve_rng_state=False, **options))
            self.equal(lambda m, x: checkpoint(lambda h: checkpoint(m.k, h.sin(), **options).cos(), m.l(x), **options))
            self.equal(lambda m, x: torch.utils.checkpoint.checkpoint(lambda h, n: (m.k(h), n), m.l(x), 3, **options)[0])
            # Without an input that takes a gradient, only what does not begin anew gives parameters one.
            self.equal(lambda m, x: checkpoint(m.k, x, **options) + m.l(x))
        self.equal(lambda m, x: checkpoint(half, m, m.k, m.l(x), scale=2.0, use_reentrant=False))

        def body():
            return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())

        self.equal(lambda m, x: m.l(checkpoint_sequential(m.s, 2, x.requires_grad_())), s=body())
        self.equal(lambda m, x: checkpoint_sequential(m.s, 3, m.l(x)), s=body())

    def test_draw_once(self):
        for options in ({"use_reentrant": False}, {"use_reentrant": True}, {"use_reentrant": False, "preserve_rng_state": False}):
            model, graph = self.graph(lambda m, x: checkpoint(F.dropout, m.l.weight, **options) * x.mean(), lambda out: out.sum())
            loss, gradients, _ = self.run_graph(model, graph)  # linear in the weight: the same mask in both passes
            self.assertAlmostEqual(loss.item(), (gradients["l.weight"] * model.l.weight).sum().item(), places=5)
            self.assertEqual(str(graph).count("aten::bernoulli"), 1)


class Noise(torch.autograd.Function):
    """Random numbers in the backward pass alone."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 + torch.rand_like(gradient) * 0


class Again(torch.autograd.Function):
    """Runs its function again, as checkpoints of other packages do."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function, ctx.state = function, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):
        torch.set_rng_state(ctx.state)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        return None, torch.autograd.grad(out, x, gradient)[0]


class RandomStates(Meaning):
    def test_are_refused(self):
        def forked(m, x):
            with torch.random.fork_rng():
                return m.l(x) * torch.rand(4)

        def seeded(m, x):
            torch.manual_seed(3)
            return m.l(x) * torch.rand(4)

        self.refused(forked, "sets the state of torch's random numbers")
        self.refused(seeded, "sets the state", "manual_seed")
        self.refused(lambda m, x: Again.apply(F.dropout, m.l(x)), "sets the state", "set_state")
        self.refused(lambda m, x: m.l(x) * torch.rand(4, generator=GENERATOR), "random numbers")
        self.refused(lambda m, x: m.l(x) * torch.empty(4).uniform_(generator=GENERATOR), "generator of its own")
        torch.manual_seed(5)  # works again
        self.assertEqual(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))

    def test_in_backward_passes_are_drawn_there(self):
        self.equal(lambda m, x: Noise.apply(m.l(x)))
        graph = self.graph(lambda m, x: Noise.apply(m.l(x)))[1]
        self.assertTrue(any("rand_like" in line and line.endswith("backward") for line in str(graph).split("\n")))


GENERATOR = torch.Generator()


class Autocast(Meaning):
    def regions(self):
        def region(m, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = F.gelu(m.l(x))
                with torch.autocast("cpu", enabled=False):
                    h = h.float() @ m.k.weight.t()
                g = m.k(m.l(x).relu()) + torch.cat([h, h.bfloat16()], 1)[:, :4]
                return torch.softmax(g, 1) + F.mse_loss(g, g.detach() * 0.5)

        def twice(m, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = m.l(x)
            y = m.l(h.float())
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                return m.l(y) + torch.einsum("ij,kj->ik", y, m.k.weight)

        return region, twice

    def test_regions_are_as_in_plain_pytorch(self):
        for body in self.regions():
            graph = self.equal(body)
            self.assertIn("bf16", str(graph))
        model = Model(self.regions()[0])
        for outer in (True, False):  # `interpret` and steps do not depend on where they are called
            graph = motley.capture(model, (self.x,), lambda out: out.float().mean())
            with torch.autocast("cpu", enabled=outer):
                loss = self.run_graph(model, graph)[0]
            self.assertAlmostEqual(loss.item(), model(self.x).float().mean().item(), places=5)

    def test_around_everything_and_the_loss_alone(self):
        def loss(out):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.mse_loss(out @ out.t(), out.detach() @ out.detach().t() * 0.9).float()

        self.assertIn("bf16", str(self.equal(lambda m, x: m.k(m.l(x)), loss)))
        model = Model(lambda m, x: m.k(m.l(x)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            graph = motley.capture(model, (self.x,), lambda out: out.float().mean())
            want = model(self.x).float().mean()
        self.assertAlmostEqual(self.run_graph(model, graph)[0].item(), want.item(), places=5)
        with torch.autocast("cpu", enabled=False):
            self.assertNotIn("bf16", str(motley.capture(model, (self.x,), lambda out: out.mean())))


class SixteenBits(Meaning):
    def kept(self, body, dtype, n=200000):
        x = torch.ones(n, dtype=dtype)
        model = Model(lambda m, y: body(y) * m.l.weight[0, 0].to(dtype))
        with torch.no_grad():
            model.l.weight.fill_(1)
        graph = motley.capture(model, (x,), lambda out: out.float().mean())
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        return motley._motley.interpret(graph, parameters, {}, {"inputs": x}, 3, 0)[0].item()

    def test_dropout_keeps_what_it_should(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for p in (0.001, 0.003, 0.1, 0.5, 0.9):
                rate = self.kept(lambda y: (F.dropout(y, p) > 0).to(y.dtype), dtype)
                self.assertAlmostEqual(rate, 1 - p, delta=5 * (p * (1 - p) / 200000) ** 0.5, msg=f"{dtype} {p}")

    def test_uniform_numbers_are_below_what_they_should(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for p in (0.0009765625, 0.125, 0.75):
                for draw in (lambda y: torch.rand_like(y) < p, lambda y: torch.empty_like(y).uniform_() < p,
                             lambda y: torch.zeros_like(y).bernoulli_(p) > 0, lambda y: torch.rand(y.shape, dtype=y.dtype) < p,
                             lambda y: torch.empty_like(y).exponential_() < -torch.log1p(torch.tensor(-p))):  # fmt: skip
                    rate = self.kept(lambda y: draw(y).to(y.dtype), dtype)
                    slack = 0.01 * p if dtype != torch.float32 else 0  # an exponential's bound is rounded
                    self.assertAlmostEqual(rate, p, delta=5 * (p * (1 - p) / 200000) ** 0.5 + slack, msg=f"{dtype} {p}")
            self.assertEqual(self.kept(lambda y: (torch.rand_like(y) >= 1).to(y.dtype), dtype), 0)
            self.assertAlmostEqual(self.kept(lambda y: (torch.randn_like(y) > 3.5).to(y.dtype), dtype), 0.000233, delta=0.0002)

    def test_means_are_within_range_where_sums_are_not(self):
        x = torch.full((300, 400), 1.0, dtype=torch.bfloat16)
        for dtype in (torch.float16, torch.bfloat16):
            model = Model(lambda m, y: (y.to(dtype) * m.l.weight[0, 0].to(dtype)).mean() + y.to(dtype).mean(1).sum() * 0)
            graph = motley.capture(model, (x,), lambda out: out.float())
            loss = motley._motley.interpret(graph, {n: p.detach() for n, p in model.named_parameters()}, {}, {"inputs": x}, 0, 0)[0]
            self.assertAlmostEqual(loss.item(), model.l.weight[0, 0].item(), delta=0.01)

    def test_models_of_sixteen_bits(self):
        model = Model(lambda m, x: m.k(F.relu(m.l(x)))).bfloat16()
        x = self.x.bfloat16()
        graph = motley.capture(model, (x,), lambda out: out.float().pow(2).mean())
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        loss, gradients, _ = motley._motley.interpret(graph, parameters, {}, {"inputs": x}, 0, 0)
        want = model(x).float().pow(2).mean()
        want.backward()
        self.assertEqual(loss, want)
        for name, p in model.named_parameters():
            self.assertTrue(torch.equal(gradients[name], p.grad), name)


if __name__ == "__main__":
    unittest.main()
