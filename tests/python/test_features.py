"""What eager models do: each is captured, equals plain PyTorch in double precision, and so do random programs of its theory on
two and three devices."""

import unittest

import torch
import torch.nn.functional as F
from torch import nn

import motley
import soundness_module
import support


class Body(nn.Module):
    """A model from a function of (layer, inputs...)."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        for name, module in modules.items():
            setattr(self, name, module)
        self.body = forward

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x):
        y = self.layer(x) * self.scale
        self.seen += 1
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y + self.mean


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def shifted(module, x):
    y = module.layer(x)
    z = torch.zeros_like(y)
    z[:, 1:] = y[:, :-1]
    z[:, 0] += 3 * y[:, 2]
    return z


def in_place(module, x):
    y = module.layer(x)
    y += 1
    y.mul_(0.5).clamp_(-1, 1)
    z = y.clone()
    z.masked_fill_(y < 0, 0.1)
    z[:, 0].add_(y[:, 1])
    return F.relu(z, inplace=True) + y


def inputs(*shape):
    return torch.randn(12, *shape)


def labels(classes=4):
    return torch.randint(classes, (12,))


class Features(support.InDoublePrecision):
    def setUp(self):
        torch.manual_seed(0)

    def same(self, model, batch, loss_fn, random=False):
        """The graph against autograd, and random programs against the graph; returns the graph."""
        graph = motley.capture(model, batch, loss_fn)
        step = motley._step.Step(model, batch, loss_fn)
        parameters, buffers = ({slot.name: slot.tensor.detach().clone() for slot in slots}
                               for slots in (step.parameters, step.buffers))  # fmt: skip
        leaves = dict(step.leaves)
        if not random:
            loss, gradients, updates = motley._motley.interpret(
                graph, parameters, {k: v.clone() for k, v in buffers.items()}, leaves, 0, 0
            )
            expected = step.loss([tensor for _, tensor in step.leaves])
            expected.backward()
            self.assertAlmostEqual(loss.item(), expected.item(), places=11)
            for slot in step.parameters:
                if slot.tensor.grad is not None:
                    self.assertLess((gradients[slot.name] - slot.tensor.grad).abs().max().item(), 1e-10, slot.name)
            after = {slot.name: slot for slot in motley._step.slots_of(model)[1]}
            for name, update in updates.items():
                self.assertLess((update - after[name].tensor).abs().max().item(), 1e-10, name)
            changed = [name for name, value in buffers.items() if not torch.equal(after[name].tensor, value)]
            self.assertEqual(sorted(updates), sorted(changed))
        error, what = soundness_module.worst_error(str(graph), parameters, buffers, leaves, [2, 3], 6, 5)
        self.assertLess(error, 1e-9, what)
        self.assertEqual(motley.plan(graph, support.CLUSTER, all_devices=True).check(), [])
        return graph

    def test_several_inputs(self):
        both = Body(lambda module, x, y: module.layer(x) * module.layer(y).tanh())
        self.same(both, ((inputs(6), inputs(6)), labels()), F.cross_entropy)

    def test_inputs_by_keyword(self):
        masked = Body(lambda module, x, mask=None, scale=1.0: module.layer(x).masked_fill(mask, 0) * scale)
        batch = ({"x": inputs(6), "mask": inputs(4) > 0, "scale": 0.5}, {"labels": labels()})
        graph = self.same(masked, batch, lambda y, t: F.cross_entropy(y, t["labels"]))
        self.assertEqual(list(graph.inputs), ["x", "mask", "labels"])

    def test_several_outputs_and_targets(self):
        def outputs(module, x):
            y = module.layer(x)
            return y, {"size": y.square().mean(1)}

        def loss_fn(output, targets):
            y, more = output
            return F.cross_entropy(y, targets[0]) + 0.1 * F.l1_loss(more["size"], targets[1])

        self.same(Body(outputs), (inputs(6), (labels(), inputs())), loss_fn)

    def test_a_model_that_returns_its_loss(self):
        self.same(Body(lambda module, x: {"loss": module.layer(x).square().mean()}), (inputs(6),), None)

    def test_integer_inputs(self):
        def tokens(module, ids, segments):
            x = module.embed(ids) + module.embed(segments * 2)
            return module.layer(x.sum(1) / (ids > 3).sum(1, keepdim=True).clamp(min=1))

        model = Body(tokens, embed=nn.Embedding(10, 6, padding_idx=0))
        self.same(model, ((torch.randint(10, (12, 5)), torch.randint(2, (12, 5))), labels()), F.cross_entropy)

    def test_in_place_operators(self):
        self.same(Body(in_place), (inputs(6), labels()), F.cross_entropy)

    def test_assignment_to_slices(self):
        self.same(Body(shifted), (inputs(6), labels()), F.cross_entropy)

    def test_residuals(self):
        def residual(module, x):
            for _ in range(3):
                x = x + module.back(module.layer(F.gelu(x)))
            return x

        self.same(Body(residual, back=nn.Linear(4, 6)), (inputs(6), inputs(6)), F.mse_loss)

    def test_buffers(self):
        self.same(Counting(), (inputs(6), labels()), F.cross_entropy)
        self.same(Body(lambda module, x: module.norm(module.layer(x)), norm=nn.BatchNorm1d(4)), (inputs(6), labels()), F.cross_entropy)

    def test_tied_weights(self):
        model = Body(lambda module, x: F.linear(module.layer(x), module.other.weight.t()), other=nn.Linear(6, 4))
        model.other.weight = model.layer.weight
        graph = self.same(model, (inputs(6), inputs(6)), F.mse_loss)
        self.assertEqual(list(graph.parameters), ["layer.weight", "layer.bias", "other.bias"])

    def test_dropout(self):
        ones = Body(lambda module, x: F.dropout(module.layer(x) * 0 + 1, 0.25, module.training))
        batch = (torch.randn(400, 6),)
        graph = self.same(ones, batch, lambda y: y.mean(), random=True)
        self.assertIn("aten::bernoulli.p", graph.ops)
        parameters = {name: p.detach() for name, p in ones.named_parameters()}
        seen = [motley._motley.interpret(graph, parameters, {}, {"inputs": batch[0]}, 3, step)[0].item() for step in range(3)]
        self.assertEqual(len(set(seen)), 3)
        for mean in seen:
            self.assertLess(abs(mean - 1), 0.06)
        ones.eval()
        self.assertNotIn("aten::bernoulli.p", motley.capture(ones, batch, lambda y: y.mean()).ops)

    def test_random_numbers(self):
        """Noise of every kind: it does not depend on the sharding, differs from step to step, and is distributed as torch's."""
        n = 4000
        ways = {
            "rand": (lambda y: torch.rand(n, 4), 0.5, 12**-0.5),
            "rand_like": (lambda y: torch.rand_like(y), 0.5, 12**-0.5),
            "randn": (lambda y: torch.randn(n, 4), 0, 1),
            "randn_like": (lambda y: torch.randn_like(y), 0, 1),
            "randint": (lambda y: torch.randint(5, (n, 4)), 2, 2**0.5),
            "randint from": (lambda y: torch.randint(3, 8, (n, 4)), 5, 2**0.5),
            "randint_like": (lambda y: torch.randint_like(y, 5), 2, 2**0.5),
            "uniform_": (lambda y: torch.empty_like(y).uniform_(-1, 3), 1, 4 * 12**-0.5),
            "normal_": (lambda y: torch.zeros_like(y).normal_(2, 3), 2, 3),
        }
        x = torch.randn(n, 6)
        for name, (draw, mean, deviation) in ways.items():
            with self.subTest(name):
                def moments(module, x, draw=draw):
                    noise = draw(module.layer(x)).to(x.dtype)
                    return torch.stack([noise.mean(), noise.square().mean()]), noise * module.layer(x)

                model = Body(moments)
                for pick in range(2):
                    loss_fn = lambda y, pick=pick: y[0][pick] + 0 * y[1].sum()  # noqa: E731
                    graph = motley.capture(model, (x,), loss_fn)
                    self.assertEqual(graph.unknown_ops, [])
                    parameters = {name: p.detach() for name, p in model.named_parameters()}
                    seen = [motley._motley.interpret(graph, parameters, {}, {"inputs": x}, 7, step)[0].item() for step in range(2)]
                    self.assertNotEqual(*seen)
                    wanted = mean if pick == 0 else mean**2 + deviation**2
                    for value in seen:
                        self.assertLess(abs(value - wanted), 0.03 * max(1, deviation, wanted), name)

                def spread(module, x, draw=draw):
                    return (draw(module.layer(x)).to(x.dtype) * module.layer(x)).tanh().mean()

                self.same(Body(spread), (x,), None, random=True)

    def test_custom_losses(self):
        def focal(y, t):
            p = F.softmax(y, -1).gather(1, t[:, None]).squeeze(1)
            return (-((1 - p) ** 2) * torch.log(p)).mean()

        def contrastive(y, t):
            y = F.normalize(y, dim=-1)
            return F.cross_entropy(y @ y.t() / 0.1, torch.arange(len(y)))

        def hinge(y, t):
            right = y.gather(1, t[:, None])
            return (F.relu(1 + y - right).sum(1) - 1).sum()

        for loss_fn in (focal, contrastive, hinge, nn.CrossEntropyLoss(label_smoothing=0.1), nn.MultiMarginLoss()):
            with self.subTest(loss_fn):
                self.same(Body(lambda module, x: module.layer(x)), (inputs(6), labels()), loss_fn)

    def test_custom_gradients(self):
        self.same(Body(lambda module, x: Straight.apply(3 * module.layer(x))), (inputs(6), labels()), F.cross_entropy)

    def test_frozen_and_unused_parameters(self):
        model = Body(lambda module, x: module.layer(x), unused=nn.Linear(2, 2))
        model.layer.bias.requires_grad_(False)
        self.same(model, (inputs(6), labels()), F.cross_entropy)

    def test_control_flow_on_shapes(self):
        def turns(module, x):
            for i in range(x.shape[1] // 3):
                x = x + i if x.dim() == 2 and len(x) > 3 else x
            return module.layer(x)

        self.same(Body(turns), (inputs(6), labels()), F.cross_entropy)

    def test_checkpointed_layers(self):
        from torch.utils.checkpoint import checkpoint

        model = Body(lambda module, x: checkpoint(module.layer, x + 0 * module.layer.bias.sum(), use_reentrant=False))
        self.same(model, (inputs(6), labels()), F.cross_entropy)

    def test_stochastic_depth_is_cut(self):
        """What is drawn into new memory, as timm's DropPath does, follows the samples."""

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(6, 6)

            def forward(self, x):
                return x + self.layer(x) * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.9).div_(0.9)

        model = nn.Sequential(Block(), nn.ReLU(), Block(), nn.Linear(6, 4))
        graph = motley.capture(model, (torch.randn(8, 6), torch.randint(4, (8,))), F.cross_entropy)
        self.assertEqual(graph.unknown_ops, [])
        self.assertEqual(motley.plan(graph, "hap-a100-p100", engine="pipeline").engine, "pipeline")


class Calls(unittest.TestCase):
    def test_batches_by_name(self):
        """As transformers' models are called: dist(**batch)."""

        class Named(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(6, 3)

            def forward(self, inputs, labels):
                return F.cross_entropy(self.linear(inputs), labels)

        torch.manual_seed(0)
        batch = {"inputs": torch.randn(8, 6), "labels": torch.randint(3, (8,))}
        losses = []
        for call in (lambda dist: dist(batch), lambda dist: dist(**batch)):
            torch.manual_seed(1)
            model = Named()
            dist = motley.distribute(model, batch, None, support.ONE, torch.optim.SGD(model.parameters(), lr=0.1))
            losses.append([])
            for _ in range(2):
                losses[-1].append(call(dist).item())
                dist.backward()
                dist.step()
        self.assertEqual(*losses)
        self.assertLess(dist.train_step(**batch), losses[1][-1])
        with self.assertRaisesRegex(motley.UserError, "by position or by name, not both"):
            dist(batch["inputs"], labels=batch["labels"])

    def test_losses_from_outside_of_a_wrapped_model(self):
        model, plain = nn.Linear(6, 3), nn.Linear(6, 3)
        plain.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = support.batches_of(lambda g: (torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g)), 4)
        expected = support.plain_training(plain, F.cross_entropy, batches, torch.optim.SGD(plain.parameters(), lr=0.1))
        wrapped = motley.wrap(model, optimizer, support.ONE, loss_of=lambda model, batch: F.cross_entropy(model(batch["input"]), batch["labels"]))
        for n, ((x, y), wanted) in enumerate(zip(batches, expected)):
            outputs = wrapped(x, labels=y) if n % 2 else wrapped(input=x, labels=y)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.assertAlmostEqual(outputs.loss.item(), wanted, places=5)
        self.assertEqual(sorted(wrapped.state_dict()), ["bias", "weight"])
        wrapped.load_state_dict(plain.state_dict())
        torch.testing.assert_close(wrapped.state_dict()["weight"], plain.weight.detach())
        torch.testing.assert_close(wrapped.eval()(batches[0][0]), plain(batches[0][0]))


if __name__ == "__main__":
    unittest.main()
