"""Capture, plans, files and messages: what needs no second process."""

import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import unittest

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import motley
import support

PAIR = "name: pair\nlink: {bandwidth: 1 Gbps}\ndevices: [{type: A100-40GB}, {type: V100-16GB}]\n"


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def example(batch=8):
    g = torch.Generator().manual_seed(0)
    return torch.randn(batch, 6, generator=g), torch.randint(3, (batch,), generator=g)


class WithAttributes(nn.Module):
    """State that a forward pass changes, in all the places where models keep it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.table = torch.arange(3.0)  # a plain tensor
        self.cache, self.calls, self.last = [], 0, None

    def forward(self, x):
        y = self.layer(x) * self.table
        self.seen = self.seen + y.detach().sum(0)
        self.calls += 1
        self.cache.append(y)
        self.last = y
        return y


class Capture(unittest.TestCase):
    def test_a_graph_has_the_models_names(self):
        graph = motley.capture(mlp(), example(), F.cross_entropy)
        self.assertEqual(graph.model, "Sequential")
        self.assertEqual(graph.batch, 8)
        self.assertEqual(list(graph.parameters), ["0.weight", "0.bias", "3.weight", "3.bias"])
        self.assertEqual(graph.parameters["0.weight"], {"dtype": "f32", "shape": [8, 6]})
        self.assertEqual(list(graph.inputs), ["inputs", "targets"])
        self.assertIn("aten::addmm", graph.ops)
        self.assertEqual(graph.unknown_ops, [])

    def test_the_model_is_not_changed(self):
        model = WithAttributes()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        parameters = list(model.parameters())
        graph = motley.capture(model, example(), F.cross_entropy)
        self.assertEqual(list(graph.buffers), ["seen", "table"])
        self.assertEqual((model.calls, model.cache, model.last), (0, [], None))
        self.assertTrue(all(a is b for a, b in zip(parameters, model.parameters())))
        self.assertTrue(all(torch.equal(before[k], v) for k, v in model.state_dict().items()))
        self.assertEqual(model.table.device.type, "cpu")
        self.assertIsNone(model.layer.weight.grad)

    def test_the_graph_means_the_step(self):
        model = WithAttributes().double()
        model.table = model.table.double()
        x, y = example()
        graph = motley.capture(model, (x.double(), y), F.cross_entropy)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        loss, gradients, updates = motley._motley.interpret(
            graph, parameters, {"seen": model.seen.clone(), "table": model.table}, {"inputs": x.double(), "targets": y}, 0, 0
        )
        expected = F.cross_entropy(model(x.double()), y)
        expected.backward()
        self.assertAlmostEqual(loss.item(), expected.item(), places=12)
        for name, parameter in model.named_parameters():
            self.assertLess((gradients[name] - parameter.grad).abs().max().item(), 1e-12)
        self.assertLess((updates["seen"] - model.seen).abs().max().item(), 1e-12)

    def test_tied_weights_are_one_parameter(self):
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        graph = motley.capture(model, (torch.randn(4, 6), torch.randn(4, 6)), F.mse_loss)
        self.assertEqual(list(graph.parameters), ["0.weight", "0.bias", "2.bias"])

    def test_nothing_is_allocated(self):
        meta = torch.empty(4, 50000, device="meta")
        model = nn.Linear(50000, 50000, device="meta")
        graph = motley.capture(model, (meta, meta), F.mse_loss)
        self.assertEqual(graph.parameters["weight"]["shape"], [50000, 50000])

    def test_a_stock_transformer_is_known_entirely(self):
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        x = torch.randn(4, 5, 16)
        self.assertEqual(motley.capture(layer, (x, x), F.mse_loss).unknown_ops, [])


class Wrong(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.layer, self.body = nn.Linear(6, 3), body

    def forward(self, x):
        return self.body(self, self.layer(x))


def branches(module, y):
    if y.sum() > 0:
        return y
    return -y


def reads(module, y):
    return y * y.max().item()


def lists(module, y):
    return y * y[0].tolist()[0]


def leaves_torch(module, y):
    return y * torch.from_numpy(y.detach().numpy())


def custom(module, y):
    return torch.ops.motley_test.twice(y)


def forgets(module, y, weight=nn.Parameter(torch.ones(3))):
    return y * weight


def outside(module, y, table=torch.ones(5000)):
    return y * table[:3]


def loops(module, y):
    while y.norm() > 1:
        y = y / 2
    return y


def prints(module, y):
    print(f"{y.mean():.3f}")
    return y


def selects(module, y):
    return y * y[y > 0].sum()


def counts(module, y):
    module.calls = getattr(module, "calls", 0) + 1
    return y


def throws_dice(module, y):
    y = y + 1
    if random.random() < 2:
        y = 2 * y
    return y


def throws_numpy_dice(module, y):
    return y * numpy.random.rand()


def draws(module, y):
    return y + torch.multinomial(y.softmax(1), 1)


def complex_numbers(module, y):
    return torch.linalg.eigvals(y.T @ y).abs()


def changes(module, y):
    with torch.no_grad():
        module.layer.weight.mul_(0.9)
    return y


def replaces(module, y):
    module.layer.weight.data = module.layer.weight.data * 0.9
    return y


class Messages(unittest.TestCase):
    def message(self, body, kind=motley.CaptureError):
        with self.assertRaises(kind) as caught:
            motley.capture(Wrong(body), example(), F.cross_entropy)
        text = str(caught.exception)
        self.assertNotIn("\n", text)
        return text

    def check(self, body, line, *words):
        text = self.message(body)
        self.assertIn(f"{os.path.basename(__file__)}:", text)
        self.assertIn(line, text)
        for word in words:
            self.assertIn(word, text)

    def test_a_branch_on_values(self):
        self.check(branches, "if y.sum() > 0:", "reads a number out of a tensor", "torch.where")

    def test_a_number_from_a_tensor(self):
        self.check(reads, "return y * y.max().item()", "pass it as an input")

    def test_a_loop_on_values(self):
        self.check(loops, "while y.norm() > 1:", "reads a number out of a tensor", "torch.where")

    def test_a_number_that_is_printed(self):
        self.check(prints, 'print(f"{y.mean():.3f}")', "reads a number out of a tensor", ".3f")

    def test_a_shape_that_depends_on_values(self):
        self.check(selects, "return y * y[y > 0].sum()", "picks elements by a mask", "torch.where")

    def test_random_numbers_that_are_not_torchs(self):
        self.check(throws_dice, "if random.random() < 2:", "random numbers of Python", "use torch.rand")
        self.check(throws_numpy_dice, "return y * numpy.random.rand()", "random numbers of Python or numpy", "pass them as an input")

    def test_random_numbers_that_are_not_known(self):
        self.check(draws, "torch.multinomial", "aten::multinomial draws random numbers", "pass them as an input")

    def test_complex_numbers(self):
        self.check(complex_numbers, "torch.linalg.eigvals(y.T @ y)", "ComplexFloat", "real numbers")

    def test_a_parameter_that_the_step_changes(self):
        self.check(changes, "module.layer.weight.mul_(0.9)", "changes parameter layer.weight", "between steps")
        self.check(replaces, "module.layer.weight.data = ", "changes parameter layer.weight", "between steps")

    def test_state_of_python_is_not_repeated(self):
        model = Wrong(counts)
        model.calls = 3
        with self.assertWarnsRegex(UserWarning, "Wrong.calls changes from 3 to 4 .*make it a buffer") as caught:
            motley.capture(model, example(), F.cross_entropy)
        self.assertEqual(os.path.basename(caught.filename), os.path.basename(__file__))
        self.assertEqual(model.calls, 3)

    def test_a_list_from_a_tensor(self):
        self.check(lists, "y[0].tolist()", "torch.where")

    def test_numpy(self):
        self.check(leaves_torch, "torch.from_numpy", "numbers")

    def test_an_unknown_op(self):
        library = torch.library.Library("motley_test", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        self.check(custom, "torch.ops.motley_test.twice(y)", "motley_test::twice", "Meta kernel")

    def test_an_unknown_op_with_a_meta_kernel_runs_replicated(self):
        library = torch.library.Library("motley_test2", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        library.impl("twice", lambda x: 2 * x, "CPU")

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return torch.ops.motley_test2.twice(x)

            @staticmethod
            def backward(ctx, g):
                return torch.ops.motley_test2.twice(g)

        graph = motley.capture(Wrong(lambda module, y: Twice.apply(y)), example(), F.cross_entropy)
        self.assertEqual(graph.unknown_ops, ["motley_test2::twice"])

    def test_a_parameter_that_is_not_registered(self):
        self.check(forgets, "return y * weight", "register it")

    def test_a_large_tensor_that_is_not_registered(self):
        self.check(outside, "return y * table[:3]", "register it as a buffer")

    def test_the_users_own_mistakes_are_their_own(self):
        with self.assertRaises(KeyError):
            motley.capture(Wrong(lambda module, y: {}["nothing"]), example(), F.cross_entropy)
        with self.assertRaisesRegex(RuntimeError, "shape|size|dim"):
            motley.capture(Wrong(lambda module, y: y @ y), example(), F.cross_entropy)

    def test_losses(self):
        for loss_fn, words in (
            (lambda y, t: y, "must be a real number"),
            (lambda y, t: 3.0, "must be a tensor"),
            (None, "give loss_fn"),
        ):
            with self.assertRaisesRegex(motley.UserError, words):
                model = mlp() if loss_fn else Wrong(lambda module, y: (y, y))
                motley.capture(model, example() if loss_fn else (example()[0],), loss_fn)

    def test_arguments(self):
        with self.assertRaisesRegex(motley.UserError, "give a torch.nn.Module"):
            motley.capture(lambda x: x, example(), F.cross_entropy)
        with self.assertRaisesRegex(motley.UserError, "3 parts"):
            motley.capture(mlp(), (*example(), 1), F.cross_entropy)
        with self.assertRaisesRegex(motley.UserError, "share memory"):
            model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
            model[1].weight = nn.Parameter(model[0].weight.data)
            motley.capture(model, example(), F.cross_entropy)
        with self.assertRaisesRegex(motley.UserError, "either a cluster or a plan"):
            motley.distribute(mlp(), example(), F.cross_entropy)
        with self.assertRaisesRegex(motley.UserError, "LBFGS needs a closure"):
            model = mlp()
            motley.distribute(model, example(), F.cross_entropy, PAIR, torch.optim.LBFGS(model.parameters()))
        with self.assertRaisesRegex(motley.UserError, "torchrun --nproc_per_node=2"):
            motley.distribute(mlp(), example(), F.cross_entropy, PAIR)


class Plans(unittest.TestCase):
    def setUp(self):
        self.graph = motley.capture(mlp(), example(), F.cross_entropy)

    def test_a_plan_is_sound_and_explains_itself(self):
        plan = motley.plan(self.graph, PAIR, all_devices=True)
        self.assertEqual(plan.check(), [])
        self.assertEqual(plan.devices, [0, 1])
        self.assertAlmostEqual(sum(plan.ratios), 1)
        self.assertGreaterEqual(plan.predicted_step_s, plan.lower_bound_s)
        self.assertEqual(len(plan.peak_memory_bytes), 2)
        self.assertIn("pair", str(plan))
        self.assertTrue(plan.baselines)
        step = motley.simulate(plan)
        self.assertGreater(step["step_s"], 0)
        self.assertEqual(len(step["devices"]), 2)

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            motley.save(self.graph, f"{folder}/graph.json")
            graph = motley.load(f"{folder}/graph.json")
            self.assertEqual(str(graph), str(self.graph))
            plan = motley.plan(graph, PAIR, all_devices=True)
            motley.save(plan, f"{folder}/plan.json")
            again = motley.load(f"{folder}/plan.json")
            self.assertEqual(str(again), str(plan))
            self.assertEqual(again.graph().parameters, self.graph.parameters)
            motley.simulate(again, trace=f"{folder}/trace.json")
            self.assertGreater(os.path.getsize(f"{folder}/trace.json"), 100)
            with open(f"{folder}/bad.json", "w") as file:
                file.write("{")
            for path, words in (("none.json", "cannot be read"), ("bad.json", "is not JSON")):
                with self.assertRaisesRegex(motley.UserError, words):
                    motley.load(f"{folder}/{path}")

    def test_nothing_fits(self):
        tiny = PAIR + "device_types: [{name: A100-40GB, memory: 100 KB}, {name: V100-16GB, memory: 100 KB}]\n"
        wide = nn.Linear(1000, 1000)
        x = torch.randn(4, 1000)
        with self.assertRaisesRegex(motley.NoPlanError, "fits"):
            motley.plan(motley.capture(wide, (x, x), F.mse_loss), tiny)

    def test_clusters(self):
        self.assertEqual(len(motley.plan(self.graph, "hap-a100-p100", all_devices=True).ratios), 4)
        with self.assertRaisesRegex(motley.UserError, "nowhere"):
            motley.plan(self.graph, "nowhere")
        with self.assertRaisesRegex(motley.UserError, "bandwidth"):
            motley.plan(self.graph, "name: x\nlink: {bandwidth: -1}\ndevices: [{type: T4}]\n")


class DevicesLeftOut(unittest.TestCase):
    """The fastest plan may do without devices."""

    def setUp(self):
        net = support.Net()
        tokens = torch.zeros(12, dtype=torch.long)
        self.graph = motley.capture(net, (tokens, tokens), F.cross_entropy)

    def test_devices_are_left_out_where_that_is_faster(self):
        for which, used in (("last", [0, 1]), ("first", [1, 2])):
            cluster = support.far_off(which)
            plan, of_all = motley.plan(self.graph, cluster), motley.plan(self.graph, cluster, all_devices=True)
            self.assertEqual((plan.devices, of_all.devices), (used, [0, 1, 2]))
            self.assertLess(plan.predicted_step_s, 0.5 * of_all.predicted_step_s)
            self.assertLessEqual(plan.lower_bound_s, plan.predicted_step_s)
            self.assertGreater(plan.lower_bound_s, 0.9 * plan.predicted_step_s)
            self.assertEqual((len(plan.cluster), len(plan.ratios), len(plan.peak_memory_bytes)), (2, 2, 2))
            self.assertEqual((plan.cluster.device(0), plan.cluster.device(1)), ("fast", "slow"))
            self.assertEqual((plan.check(), of_all.check()), ([], []))
            self.assertEqual(len(motley.simulate(plan)["devices"]), 2)
            words = f"devices     2 of the 3 of far-off ({used[0]}-{used[1]}): with the others it would communicate longer than they save"
            self.assertEqual([line.strip() for line in str(plan).splitlines() if "with the others" in line], [words])
            self.assertNotIn("with the others", str(of_all))

    def test_the_program_that_plans_agrees(self):
        model, cluster = "bert-moe:layers=3,experts=6,vocab=5000", "hap-a100-p100"
        plan = motley.plan(motley._motley.capture_zoo(model, 48), cluster, time_limit=600)
        self.assertEqual(plan.devices, [0, 1])
        done = subprocess.run(
            [os.path.join(os.environ["MOTLEY_BINARY_DIR"], "motley"), "plan", model, "--cluster", cluster, "--batch", "48",
             "--engine", "spmd", "--time-limit", "600", "--json"], capture_output=True, text=True, check=True,
        )  # fmt: skip
        other = json.loads(done.stdout)
        self.assertAlmostEqual(plan.predicted_step_s, other["predicted_step_s"], delta=1e-6 * plan.predicted_step_s)
        self.assertEqual(other["ratios"], [*plan.ratios, 0, 0])

    def test_every_device_is_kept(self):
        cluster = support.far_off("last")
        for options in ({"ratios": [0.4, 0.4, 0.2]}, {"engine": "grid"}, {"all_devices": True}):
            net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
            plan = motley.plan(motley.capture(net, (torch.zeros(12, dtype=torch.long),) * 2, F.cross_entropy), cluster, **options)
            self.assertEqual((plan.devices, len(plan.cluster)), ([0, 1, 2], 3))

    def test_the_fastest_engine_may_do_without(self):
        graph = motley.capture(support.Net(), (torch.zeros(16, dtype=torch.long),) * 2, F.cross_entropy)
        plan = motley.plan(graph, support.far_off("first"), engine="auto")
        self.assertEqual((plan.engine, plan.devices), ("spmd", [1, 2]))

    def test_a_file_has_the_devices_that_are_used(self):
        plan = motley.plan(self.graph, support.far_off("first"))
        with tempfile.TemporaryDirectory() as folder:
            plan.save(f"{folder}/plan.json")
            again = motley.load(f"{folder}/plan.json")
        self.assertEqual((again.devices, len(again.cluster), again.ratios), ([0, 1], 2, plan.ratios))
        self.assertNotIn("with the others", str(again))

    def test_workers_are_one_for_each_device_of_the_cluster(self):
        batch = torch.zeros(12, dtype=torch.long), torch.zeros(12, dtype=torch.long)
        plan = motley.plan(self.graph, support.far_off("first"))
        with tempfile.TemporaryDirectory() as folder:
            plan.save(f"{folder}/plan.json")
            for given, size in (
                ({"cluster": support.far_off("first")}, 3), ({"plan": plan}, 3), ({"plan": f"{folder}/plan.json"}, 2),
            ):  # fmt: skip
                words = f"the cluster has {size} devices, but 1 worker was started; start {size}, .*nproc_per_node={size}$"
                with self.assertRaisesRegex(motley.UserError, words):
                    motley.distribute(support.Net(), batch, F.cross_entropy, **given)


class OneWorker(unittest.TestCase):
    """A cluster of one device needs no launcher."""

    ONE = "name: one\nlink: {bandwidth: 1 Gbps}\ndevices: [{type: T4}]\n"

    def test_training(self):
        model = nn.Linear(6, 3)
        plain = nn.Linear(6, 3)
        plain.load_state_dict(model.state_dict())
        batches = support.batches_of(lambda g: (torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g)), 4)
        expected = support.plain_training(plain, F.cross_entropy, batches, torch.optim.SGD(plain.parameters(), lr=0.1))
        dist = motley.distribute(
            model, batches[0], F.cross_entropy, self.ONE, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        for batch, loss in zip(batches, expected):
            self.assertAlmostEqual(dist.train_step(*batch), loss, places=5)
        self.assertIn("Linear distributed by motley", repr(dist))

    def test_wrong_batches(self):
        dist = motley.distribute(mlp(), example(), F.cross_entropy, self.ONE)
        x, y = example()
        for batch, words in (
            ((x.double(), y), "float64"),
            ((x,), "inputs and targets"),
            (((x, x), y), "a batch has"),
            ((x, y, y), "in one tuple"),
        ):
            with self.assertRaisesRegex(motley.UserError, words):
                dist(*batch)
        with self.assertRaisesRegex(motley.UserError, "before a training step"):
            dist.backward()

    def test_plans_for_something_else(self):
        plan = motley.plan(motley.capture(mlp(), example(), F.cross_entropy), self.ONE)
        for model, batch, loss_fn, words in (
            (mlp(), example(4), F.cross_entropy, "another model or batch"),
            (nn.Linear(6, 3), example(), F.cross_entropy, "another model or batch"),
            (mlp(), example(), lambda y, t: 2 * F.cross_entropy(y, t), "computes something else"),
        ):
            with self.assertRaisesRegex(motley.UserError, words):
                motley.distribute(model, batch, loss_fn, plan=plan)
        with self.assertRaisesRegex(motley.UserError, "memory of adamw"):
            motley.distribute(mlp(), example(), F.cross_entropy, plan=plan, optimizer="sgd")


class Optimizers(unittest.TestCase):
    def test_defaults_that_are_no_arguments(self):
        """As those of AdamW in torch 2."""
        class AdamW(torch.optim.AdamW):
            def __init__(self, params, lr=0.3, betas=(0.8, 0.9)):
                super().__init__(params, lr, betas)
                self.defaults["decoupled_weight_decay"] = True

        model = nn.Linear(6, 3)
        dist = motley.distribute(model, example(), F.cross_entropy, OneWorker.ONE, AdamW(model.parameters(), 0.2))
        self.assertEqual((dist.optimizer.defaults["lr"], dist.optimizer.param_groups[0]["betas"]), (0.2, (0.8, 0.9)))
        self.assertLess(dist.train_step(*example()), 10)


class Hostile:
    def __reduce__(self):
        return os.mkdir, (self.folder,)


class Checkpoints(unittest.TestCase):
    def test_a_file_runs_no_code(self):
        one = nn.Linear(6, 3)
        dist = motley.distribute(one, example(), F.cross_entropy, OneWorker.ONE)
        with tempfile.TemporaryDirectory() as folder:
            hostile = Hostile()
            hostile.folder = f"{folder}/made"
            torch.save({"model": hostile, "steps": 1}, f"{folder}/hostile.pt")
            with self.assertRaisesRegex(motley.UserError, "damaged or not a file"):
                dist.load(f"{folder}/hostile.pt")
            self.assertFalse(os.path.exists(f"{folder}/made"))
            dist.train_step(*example())
            dist.save(f"{folder}/good.pt")
            dist.load(f"{folder}/good.pt")
            self.assertEqual(dist.steps, 1)


class Imports(unittest.TestCase):
    """What an interpreter without the right torch is told."""

    def failure(self, setup):
        code = textwrap.dedent(setup) + "\nimport motley\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        return done.stderr.strip().splitlines()[-1]

    def test_no_torch(self):
        text = self.failure("import sys; sys.modules['torch'] = None")
        self.assertIn("needs torch", text)
        self.assertIn("python3-torch", text)

    def test_another_torch(self):
        text = self.failure("import torch; torch.__version__ = '9.9.0'")
        self.assertIn("this interpreter has torch 9.9.0", text)
        self.assertIn("pip install", text)

    def test_another_python(self):
        text = self.failure("import sys; sys.version_info = type('V', (tuple,), {'major': 3, 'minor': 99})((3, 99, 0))")
        self.assertIn("this is Python 3.99", text)

    def test_not_built(self):
        text = self.failure("import sys; sys.modules['motley._built'] = None")
        self.assertIn("is not built", text)

    def test_only_the_program_is_built(self):  # as `./dev demo` leaves a clone
        text = self.failure("import sys; sys.modules['motley._motley'] = None")
        self.assertIn("is not built", text)
        self.assertIn("./dev build", text)

    def test_libtorch_is_missing(self):
        """The package with an extension that is linked with a libtorch that is not there."""
        package = os.path.dirname(os.path.abspath(motley.__file__))
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(f"{folder}/motley")
            for name in os.listdir(package):
                if name.endswith(".py"):
                    os.symlink(os.path.join(package, name), f"{folder}/motley/{name}")
            source = f"{folder}/empty.cc"
            open(source, "w").close()
            build = ["c++", "-shared", "-fPIC", source, "-o"]
            subprocess.run([*build, f"{folder}/libtorch_gone.so"], check=True)
            extension = f"{folder}/motley/{os.path.basename(motley._motley.__file__)}"
            subprocess.run([*build, extension, "-Wl,--no-as-needed", f"-L{folder}", "-ltorch_gone"], check=True)
            os.remove(f"{folder}/libtorch_gone.so")
            text = self.failure(f"import sys; sys.path.insert(0, {folder!r})")
        self.assertIn("libtorch_gone.so: cannot open shared object file", text)
        self.assertIn("apt-get install libtorch", text)
        self.assertNotIn("\n", text)


class OneDevice(unittest.TestCase):
    def test_every_architecture_has_a_plan(self):
        for name, build in support.architectures():
            with self.subTest(name):
                model, loss_fn, batch = build()
                graph = motley.capture(model, support.batches_of(batch, 1)[0], loss_fn)
                self.assertEqual(motley.plan(graph, support.ONE).check(), [])


class Losses(unittest.TestCase):
    def test_parameters_of_a_loss_are_shown(self):
        class Warm(nn.Module):
            def __init__(self):
                super().__init__()
                self.t = nn.Parameter(torch.tensor(2.0))

            def forward(self, y, target):
                return F.cross_entropy(y * self.t, target)

        loss_fn, x, y = Warm(), torch.randn(6, 3), torch.arange(6) % 4
        with self.assertWarnsRegex(UserWarning, "parameters of loss_fn are parameters of the step, loss_fn.t"):
            dist = motley.distribute(nn.Linear(3, 4), (x, y), loss_fn, support.ONE, "sgd")
        dist.train_step(x, y)
        self.assertNotEqual(loss_fn.t.item(), 2.0)
        self.assertEqual(loss_fn.t.item(), dist.state_dict()["loss_fn.t"].item())


if __name__ == "__main__":
    unittest.main()
