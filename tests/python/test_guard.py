"""Nothing silently wrong around a plan: the guard, changes that are followed, hooks, losses with parameters, shared modules."""

import logging
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support
from motley import _eager, _guard, _motley

WORKER = os.path.join(support.HERE, "guard_worker.py")
ONE = """name: one
link: {bandwidth: 10 Gbps, latency: 1 us}
devices: [{type: a}]
device_types:
  - {name: a, flops: 50 MFLOPS, memory: 1 GiB, memory_bandwidth: 80 MB/s, overhead: 1 us}
"""
SCALE = 2.0
CFG = types.SimpleNamespace(tau=1.0, inner={"weights": [1.0, 2.0]})
SHIFT = torch.zeros(3)
LOGGER = logging.getLogger(__name__)
OUTSIDE = nn.Parameter(torch.tensor(2.0))


def batch(seed=0, size=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, 3, generator=generator), torch.rand(size, 2, generator=generator)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def distributed(model, loss=F.mse_loss, data=None, optimizer=None, **options):
    return motley.distribute(model, data or batch(), loss, ONE, optimizer or sgd(model), **options)


class Reader(nn.Module):
    """Reads what it computes with from everywhere."""

    share = 0.5

    def __init__(self):
        super().__init__()
        self.layer, self.beta, self.unread = linear(), 1.0, 1
        self.config = types.SimpleNamespace(depth=types.SimpleNamespace(gain=1.5), kinds={"a": 1.0})

    def forward(self, x, temperature=1.0, mode="plain"):
        y = self.layer(x + SHIFT) * self.beta * self.share * SCALE / temperature
        LOGGER.debug("a step beside %d loggers", len(LOGGER.manager.loggerDict))
        y = y * self.config.depth.gain * self.config.kinds["a"] * CFG.tau * CFG.inner["weights"][1]
        return y.tanh() if mode == "tanh" else y


def set_global(name, value):
    globals()[name] = value


class Following(unittest.TestCase):
    """What the forward pass reads may change: the next step is that of plain PyTorch."""

    def same_step(self, dist, plain, data, loss, optimizer, *arguments):
        optimizer.zero_grad(set_to_none=True)
        wanted = loss(plain(data[0], *arguments), data[1])
        wanted.backward()
        optimizer.step()
        given = {"x": data[0], "temperature": arguments[0], "mode": arguments[1]} if arguments else data[0]
        got = dist.train_step(given, data[1])
        self.assertLess(abs(got - wanted.item()), 1e-5 * max(1, abs(wanted.item())))

    def test_attributes_globals_and_configurations(self):
        plain, mine = Reader(), Reader()
        optimizer, dist = sgd(plain), distributed(mine)
        changes = [
            lambda m: setattr(m, "beta", 3.0),
            lambda m: setattr(m, "share", 0.25),
            lambda m: setattr(m.config.depth, "gain", 0.5),
            lambda m: m.config.kinds.update(a=2.0),
            lambda m: set_global("SCALE", 1.0),
            lambda m: setattr(CFG, "tau", 0.5),
            lambda m: CFG.inner["weights"].__setitem__(1, 3.0),
            lambda m: SHIFT.fill_(1.0),
            lambda m: setattr(m, "config", types.SimpleNamespace(depth=types.SimpleNamespace(gain=1.0), kinds={"a": 1.0})),
            lambda m: setattr(Reader, "share", 0.75) or m.__dict__.pop("share", None),
        ]
        try:
            self.same_step(dist, plain, batch(1), F.mse_loss, optimizer)
            for i, change in enumerate(changes):
                change(plain)
                change(mine)
                self.same_step(dist, plain, batch(i), F.mse_loss, optimizer)
                self.assertEqual(dist._run.number, i + 1)
            mine.unread = 7
            logging.getLogger(f"{__name__}.{len(changes)}")
            self.same_step(dist, plain, batch(3), F.mse_loss, optimizer)
            self.assertEqual(dist._run.number, len(changes), "what nobody reads is no reason to capture")
        finally:
            set_global("SCALE", 2.0)
            CFG.tau, CFG.inner["weights"][1], Reader.share = 1.0, 2.0, 0.5
            SHIFT.zero_()

    def test_arguments_that_are_no_tensors(self):
        plain, mine = Reader(), Reader()
        optimizer = sgd(plain)
        x, y = batch()
        dist = distributed(mine, data=({"x": x, "temperature": 1.0, "mode": "plain"}, y))
        for i, arguments in enumerate([(1.0, "plain"), (0.1, "plain"), (1.0, "tanh"), (0.1, "plain"), (1.0, "plain")]):
            self.same_step(dist, plain, batch(i), F.mse_loss, optimizer, *arguments)
        self.assertEqual(dist._runs.made, 3)

    def test_what_is_read_and_does_not_matter(self):
        """A counter that the forward pass looks at: captured again, but the plan stays."""

        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.steps = linear(), 0

            def forward(self, x):
                return self.layer(x) * (2 if self.steps > 100 else 1)

        plain, mine = Counts(), Counts()
        optimizer, dist = sgd(plain), distributed(mine)
        for i in range(5):
            self.same_step(dist, plain, batch(i), F.mse_loss, optimizer)
            plain.steps = mine.steps = i + 1
        self.assertEqual(dist._runs.made, 1)
        plain.steps = mine.steps = 101
        self.same_step(dist, plain, batch(7), F.mse_loss, optimizer)
        self.assertEqual(dist._runs.made, 2)

    def test_a_number_that_changes_at_every_step(self):
        plain, mine = Reader(), Reader()
        optimizer, dist = sgd(plain), distributed(mine)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(20):
                plain.beta = mine.beta = 1.0 / (1 + i)
                self.same_step(dist, plain, batch(i), F.mse_loss, optimizer)
        self.assertEqual(len([w for w in caught if "captured in" in str(w.message)]), 1)
        self.assertLessEqual(len(dist._runs.known), 16)

    def test_closures_of_the_loss(self):
        weight, parts = 1.0, [1.0, 1.0]
        table = torch.ones(2)

        def loss(output, target):
            return (weight * parts[0] * table * (output - target) ** 2).mean()

        plain, mine = linear(), linear()
        optimizer, dist = sgd(plain), distributed(mine, lambda o, t: loss(o, t))
        self.same_step(dist, plain, batch(1), loss, optimizer)
        weight = 2.0
        self.same_step(dist, plain, batch(2), loss, optimizer)
        parts[0] = 0.5
        self.same_step(dist, plain, batch(3), loss, optimizer)
        table.mul_(3)
        self.same_step(dist, plain, batch(4), loss, optimizer)
        table = torch.full((2,), 0.1)
        self.same_step(dist, plain, batch(5), loss, optimizer)
        self.assertEqual(dist._runs.made, 4, "one of the changes makes the numbers of the first graph")

    def test_partial_and_callable_losses(self):
        import functools

        class Loss:
            def __init__(self):
                self.scale = 1.0

            def __call__(self, output, target):
                return self.scale * F.mse_loss(output, target)

        loss = Loss()
        for given in (loss, functools.partial(loss), loss.__call__):
            loss.scale = 1.0
            plain, mine = linear(), linear()
            optimizer, dist = sgd(plain), distributed(mine, given)
            self.same_step(dist, plain, batch(1), loss, optimizer)
            loss.scale = 5.0
            self.same_step(dist, plain, batch(2), loss, optimizer)

    def test_other_sizes(self):
        for model in (linear, lambda: nn.Sequential(linear(), nn.BatchNorm1d(2))):
            plain, mine = model(), model()
            optimizer, dist = sgd(plain), distributed(mine)
            for i, size in enumerate((6, 4, 6, 9, 4, 6)):
                self.same_step(dist, plain, batch(i, size), F.mse_loss, optimizer)
            self.assertEqual(dist._runs.made, 3)
            support.same(dist.state_dict(), plain.state_dict(), 1e-5)

    def test_buffers_of_the_model(self):
        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = linear()
                self.register_buffer("mask", torch.ones(2))
                self.tau = torch.tensor(1.0)

            def forward(self, x):
                return self.layer(x) * self.mask / self.tau

        plain, mine = Masked(), Masked()
        optimizer, dist = sgd(plain), distributed(mine)
        self.same_step(dist, plain, batch(1), F.mse_loss, optimizer)
        for model in (plain, mine):
            model.mask[0] = 0
        self.same_step(dist, plain, batch(2), F.mse_loss, optimizer)
        for model in (plain, mine):
            model.tau = torch.tensor(0.5)
        self.same_step(dist, plain, batch(3), F.mse_loss, optimizer)
        self.assertEqual(dist.verify(*batch(4)), "")

    def test_a_copy_of_the_state_in_the_model(self):
        mine = linear()
        dist = distributed(mine)
        dist.train_step(*batch(1))
        mine.load_state_dict(dist.state_dict())  # to evaluate it, say
        dist.train_step(*batch(2))
        with self.assertRaisesRegex(motley.UserError, "parameter weight of the model was changed.*dist.parameters"), torch.no_grad():
            mine.weight.clamp_(-0.01, 0.01)
        dist.train_step(*batch(3))

    def test_what_cannot_be_followed(self):
        mine = nn.Sequential(linear(), nn.Tanh())
        dist = distributed(mine)
        dist.train_step(*batch(1))
        mine[0] = linear()
        with self.assertRaisesRegex(motley.UserError, "cannot be followed|was replaced"):
            dist.train_step(*batch(1))

        class Branch(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.strict = linear(), False

            def forward(self, x):
                if self.strict and x.sum() > 0:
                    return self.layer(x) * 2
                return self.layer(x)

        mine = Branch()
        dist = distributed(mine)
        mine.strict = True
        with self.assertRaisesRegex(motley.UserError, r"strict was False and is True.*cannot be followed.*x.sum\(\)"):
            dist.train_step(*batch(1))

    def test_train_and_eval_of_the_model(self):
        def model():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

        plain, mine = model(), model()
        optimizer, dist = sgd(plain), distributed(mine)
        for i, mode in enumerate((True, False, True)):
            plain.train(mode)
            mine.train(mode)
            self.same_step(dist, plain, batch(i), F.mse_loss, optimizer)
        self.assertEqual(dist._runs.made, 2)
        support.same(dist.state_dict(), plain.state_dict(), 1e-5)


class Hooks(unittest.TestCase):
    def trained(self, make, loss=lambda o, t: ((o - t) ** 2).sum()):
        plain, mine = make(), make()
        optimizer = sgd(plain)
        dist = distributed(mine, loss)
        for seed in (1, 2):
            optimizer.zero_grad(set_to_none=True)
            wanted = loss(plain(batch(seed)[0]), batch(seed)[1])
            wanted.backward()
            optimizer.step()
            self.assertAlmostEqual(dist.train_step(*batch(seed)), wanted.item(), places=4)
        support.same(dist.state_dict(), plain.state_dict(), 1e-5)

    def test_that_change_gradients(self):
        def on_weight(hook):
            def make():
                model = linear()
                model.weight.register_hook(hook)
                return model

            return make

        def on_module():
            model = nn.Sequential(linear(), nn.Tanh())
            model[1].register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
            return model

        class Inside(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = linear()

            def forward(self, x):
                y = self.layer(x)
                y.register_hook(lambda g: g.clamp(-0.1, 0.1))
                return y.tanh()

        for make in (on_weight(lambda g: g * 0), on_weight(lambda g: g / (g.norm() + 1)), on_module, Inside):
            self.trained(make)

    def test_that_only_look(self):
        seen = []

        def looks(gradient):
            seen.append(gradient)

        model = linear()
        model.bias.register_hook(looks)
        with self.assertRaisesRegex(motley.CaptureError, "hook on the gradient of parameter bias returns nothing"):
            distributed(model)
        model = nn.Sequential(linear())
        model[0].register_full_backward_hook(lambda *_: None)
        with self.assertRaisesRegex(motley.CaptureError, "hook on the gradient of module 0 returns nothing"):
            distributed(model)
        dist = distributed(linear())
        next(dist.parameters()).register_hook(looks)
        with self.assertRaisesRegex(motley.UserError, "a piece of weight has a hook"):
            dist.train_step(*batch())

    def test_registered_later(self):
        model = linear()
        dist = distributed(model)
        handle = model.weight.register_hook(lambda g: g * 0)
        before = dist.state_dict()["weight"]
        dist.train_step(*batch())
        self.assertTrue(torch.equal(dist.state_dict()["weight"], before))
        handle.remove()
        dist.train_step(*batch())
        self.assertFalse(torch.equal(dist.state_dict()["weight"], before))

    def test_parametrizations(self):
        class Symmetric(nn.Module):
            def forward(self, x):
                return x.triu() + x.triu(1).transpose(-1, -2)

        def symmetric():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
            nn.utils.parametrize.register_parametrization(model[0], "weight", Symmetric())
            return model

        import torch.nn.utils.prune

        def pruned():
            model = linear()
            nn.utils.prune.l1_unstructured(model, "weight", amount=0.5)
            return model

        import torch.nn.utils.parametrizations as known

        for make in (
            symmetric,
            pruned,
            lambda: nn.utils.weight_norm(linear()),
            lambda: known.spectral_norm(linear()),
        ):
            self.trained(make)


class Temperature(nn.Module):
    def __init__(self, shape=()):
        super().__init__()
        self.t = nn.Parameter(torch.full(shape, 2.0))

    def forward(self, output, target):
        return F.mse_loss(output * self.t, target)


class OutsideParameters(unittest.TestCase):
    def test_a_loss_with_parameters_is_trained(self):
        for shape in ((), (1,), (2,)):
            plain, loss, mine, other = linear(), Temperature(shape), linear(), Temperature(shape)
            optimizer = sgd(plain, loss)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dist = distributed(mine, other, optimizer=sgd(mine, other))
            self.assertTrue(any("loss_fn.t" in str(w.message) for w in caught))
            for seed in range(3):
                optimizer.zero_grad()
                wanted = loss(plain(batch(seed)[0]), batch(seed)[1])
                wanted.backward()
                optimizer.step()
                self.assertAlmostEqual(dist.train_step(*batch(seed)), wanted.item(), places=5)
            state = dist.state_dict()
            self.assertTrue(torch.allclose(state["loss_fn.t"], loss.t.detach()))
            dist.load_state_dict(state)

    def test_parameters_of_others_are_refused(self):
        class Hidden(nn.Module):
            def __init__(self, way):
                super().__init__()
                self.layer, self.parts, self.way = linear(), [linear(), nn.Parameter(torch.tensor(2.0))], way

            def forward(self, x):
                y = self.layer(x)
                return {"list": lambda: y + self.parts[0](x), "number": lambda: y * self.parts[1],
                        "global": lambda: y * OUTSIDE, "shift": lambda: y + OUTSIDE}[self.way]()  # fmt: skip

        for way in ("list", "number", "global", "shift"):
            with self.subTest(way), self.assertRaisesRegex(motley.UserError, "no parameter of the model"):
                distributed(Hidden(way))
        for shape in ((), (2,)):
            loss = Temperature(shape)
            with self.subTest(shape), self.assertRaisesRegex(motley.UserError, "no parameter of the model"):
                distributed(linear(), lambda o, t: loss(o, t))

    def test_modules_shared_by_two_calls(self):
        generator, critic = linear(), nn.Linear(2, 2)
        one = distributed(nn.Sequential(generator, critic))
        two = distributed(generator)
        one.train_step(*batch())
        with self.assertRaisesRegex(motley.UserError, "parameter weight is trained by another distribute"):
            two.train_step(*batch())
        del one
        two.train_step(*batch())

        teacher, student = linear(), linear()

        class Distilled(nn.Module):
            def __init__(self):
                super().__init__()
                self.teacher, self.student = teacher, student

            def forward(self, x):
                with torch.no_grad():
                    wanted = self.teacher(x)
                return self.student(x) - wanted

        both = distributed(Distilled(), optimizer=sgd(student))
        alone = distributed(teacher)
        both.train_step(*batch())
        with self.assertRaisesRegex(motley.UserError, "trained by another distribute"):
            alone.train_step(*batch())
            both.train_step(*batch())
        for other in (both, alone):
            del other


class Cost(unittest.TestCase):
    def test_at_most_two_plain_steps(self):
        calls = []
        plain = _eager.plain_step
        _guard.plain_step = lambda *given, **options: calls.append(1) or plain(*given, **options)
        try:
            for model in (linear(), nn.Sequential(linear(), nn.Dropout(0.5), nn.BatchNorm1d(2))):
                calls.clear()
                dist = distributed(model)
                for seed in range(6):
                    dist.train_step(*batch(seed))
                self.assertEqual(len(calls), 2)
            calls.clear()
            dist = distributed(linear(), verify=False)
            dist.train_step(*batch())
            self.assertEqual(len(calls), 0)
        finally:
            _guard.plain_step = plain

    def test_a_step_looks_at_little(self):
        """Some entries a module, and few elements of a large batch: each in one of some steps."""
        model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Dropout(0.1)) for _ in range(10)), linear())
        dist = distributed(model)
        self.assertLess(len(dist._run.watch), 20 * len(list(model.modules())))
        for tensor in (torch.zeros(1 << 17), torch.zeros(1 << 14, 8).half(), torch.zeros(8, 64, 256, dtype=torch.uint8)):
            other = tensor.clone()
            other.view(-1)[12345] = 1
            stride = tensor.numel() // 512
            noticed = [_motley.checksum([tensor], 0, step) != _motley.checksum([other], 0, step) for step in range(stride)]
            self.assertEqual(sum(noticed), 1)
        small, apart = torch.zeros(64, 128), torch.zeros(128, 512).t()
        for tensor in (small, apart[:, :1], torch.zeros(0, 3)):
            other = tensor + 1
            self.assertEqual(_motley.checksum([tensor], 0, 3) != _motley.checksum([other], 0, 3), tensor.numel() > 0)


class Workers(unittest.TestCase):
    def test_planted_faults_and_changes(self):
        said = support.launch(3, WORKER)
        caught = set(re.findall(r"^caught ([^:]*):", said, re.M))
        self.assertGreaterEqual(len(caught), 40, said)
        for case in ("every_fault", "other_sizes", "other_lengths", "frozen_and_thawed", "asked_for", "no_room", "elsewhere"):
            self.assertIn(f"done {case}", said)

    def said(self, *arguments):
        """What each of three workers says, without torchrun, which would end the others by itself."""
        port = str(support.free_port())
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", WORKER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=dict(os.environ, RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1"))
            for rank in range(3)
        ]  # fmt: skip
        said = [process.communicate(timeout=60) for process in processes]
        return [out for out, _ in said], [error for _, error in said]

    def test_one_worker_differs(self):
        for what, words in (("batch", "different batches"), ("row", "different batches"), ("flag", "changed on one of them"),
                            ("size", "different batches")):  # fmt: skip
            with self.subTest(what):
                said, _ = self.said("alone_differs", what)
                self.assertRegex(said[1], f"differs 1 .distribute. rank 1 and rank 0 differ in step 1: .*{words}")
                for rank in (0, 2):
                    self.assertRegex(said[rank], f"(lost|differs) {rank} ")

    def test_batches_that_are_compared_later(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "saved")
            for what in ("differs", "captured", "leaves", "ends", "verified", "equal"):
                with self.subTest(what):
                    said, errors = self.said("later", what, file)
                    for rank in range(3):
                        if what in ("differs", "captured"):
                            self.assertRegex(said[rank], f"^(lost|differs) {rank} ", errors[rank])
                        else:
                            self.assertRegex(said[rank], f"^passed {rank}\n(done later\n)?$", errors[rank])
                        at_end = re.findall(r"^motley: .distribute. rank \d and rank \d differ in step 4: they were given", errors[rank], re.M)
                        self.assertEqual(len(at_end), what in ("leaves", "ends", "verified"), errors[rank])
                    if what in ("differs", "captured"):
                        words = r"differ in step 4: they were given different batches"
                        self.assertRegex(said[1], f"differs 1 .distribute. rank 1 and rank 0 {words}")
                        for text in said:
                            self.assertEqual("differs" in text, words in text, text)
                    self.assertEqual(os.path.exists(file), what == "equal")


if __name__ == "__main__":
    unittest.main()
