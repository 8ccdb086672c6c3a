"""distribute(elastic=) under torchrun: whatever is lost, and whoever comes back, losses are those of plain training."""

import glob
import json
import math
import multiprocessing
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import torch

import elastic_model
import support
from motley import _formats, _pieces_files, _shards, _state, _torch

WORKER = os.path.join(support.HERE, "elastic_worker.py")
# A fork has none of the threads of a pool that was used before it, and torch 2 waits for them for ever.
torch.set_num_threads(1)


class Case(unittest.TestCase):
    """Launchers, and what their workers wrote down."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.said = {"folder": self.folder, "engine": "spmd", "steps": 12, "every": 3, "optimizer": "adamw", "seconds": 0.1}
        self.port, self.launchers = support.free_port(), []

    def tearDown(self):
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()

    def start(self, workers=1, nodes="1:3", faults=""):
        """A launcher, as one machine has it."""
        command = [sys.executable, "-m", "motley.launch", "--nnodes", nodes, "--nproc_per_node", str(workers), "--max_restarts", "4",
                   "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{self.port}", "--rdzv_id", "test",
                   "--rdzv_conf", f"last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=3,is_host={not self.launchers}", "--monitor_interval", "0.2", WORKER, json.dumps(self.said)]  # fmt: skip
        with open(os.path.join(self.folder, f"log-{len(self.launchers)}"), "w") as log:
            environment = {**support.environment(), "MOTLEY_FAULTS": faults}
            self.launchers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return self.launchers[-1]

    def log(self):
        return "".join(pathlib.Path(file).read_text() for file in sorted(glob.glob(os.path.join(self.folder, "log-*"))))

    def losses(self):
        """[(step, loss, workers, time)]"""
        try:
            with open(os.path.join(self.folder, "losses")) as file:
                rows = [line.split() for line in file]
        except FileNotFoundError:
            return []
        return [(int(step), float(loss), int(size), float(at)) for step, loss, size, at in rows]

    def wait_for(self, what, seconds=90):
        until = time.monotonic() + seconds
        while not what():
            self.assertLess(time.monotonic(), until, self.log())
            self.assertTrue(any(launcher.poll() is None for launcher in self.launchers), self.log())
            time.sleep(0.05)

    def reached(self, step, workers=None):
        return lambda: any(at >= step and size == (workers or size) for at, _, size, _ in self.losses())

    def finish(self, launchers):
        for launcher in launchers:
            self.assertEqual(launcher.wait(120), 0, self.log())
        losses, state = elastic_model.plain(self.said)
        for step, loss, _, _ in self.losses():
            self.assertLess(abs(loss - losses[step]), 1e-9 * abs(losses[step]), (step, self.log()))
        self.assertEqual({step for step, *_ in self.losses()}, set(range(self.said["steps"])))
        support.same(torch.load(os.path.join(self.folder, "state")), state)
        self.assertEqual(self.left(), [], "what was left in memory")

    def left(self):
        """Folders of memory of this test's launchers."""
        return [path for one in self.launchers for path in glob.glob(f"/dev/shm/motley-elastic-{os.getuid()}-{one.pid}-*")]

    def lost_steps(self):
        """How many steps were made twice."""
        steps = [step for step, *_ in self.losses()]
        return len(steps) - len(set(steps))


class Elastic(Case):
    def test_a_worker_is_killed(self):
        for faults in ("kill:step:1:5", "kill:collective:0:200", "kill:boundary:2:1;kill:step:1:6"):
            with self.subTest(faults=faults):
                self.setUp()
                self.finish([self.start(3, "1:1", faults)])
                self.assertIn("goes on on all devices, from step", self.log())
                # Pieces that nobody left are those of a checkpoint: the steps since then are made again.
                self.assertLessEqual(self.lost_steps(), 3 if "of a checkpoint" in self.log() else 1, self.log())

    def test_one_of_three_loses_its_pieces(self):
        """A worker that leaves nothing, killed at several points of a step."""
        for number, point in enumerate(("step:1:5", "second:2:9", "second:0:10")):
            with self.subTest(point=point):
                self.setUp()
                self.said.update(every=0, optimizer=("adamw", "sgd")[number % 2], options={"strategy": "zero", "redundancy": 1})
                self.finish([self.start(3, "1:1", f"kill:{point}")])
                self.assertIn("of the memory of the workers", self.log())
                self.assertLessEqual(self.lost_steps(), 1, self.log())

    def test_a_machine_is_lost_and_another_comes(self):
        self.said.update(steps=40, seconds=0.2)
        first, second, third = self.start(), self.start(), self.start()
        self.wait_for(self.reached(3, 3))
        second.kill()
        second.wait()
        killed = time.time()
        self.wait_for(lambda: any(size == 2 and at > killed for _, _, size, at in self.losses()))
        took = min(at for _, _, size, at in self.losses() if size == 2 and at > killed) - killed
        print(f"a step on the two that are left {took:.1f} s after the loss", file=sys.stderr)
        fourth = self.start()
        self.wait_for(lambda: self.losses()[-1][2] == 3 and self.losses()[-1][3] > killed + 1)
        self.finish([first, third, fourth])
        self.assertIn("without device", self.log())
        self.assertLessEqual(self.lost_steps(), 6, self.log())  # two checkpoints' worth at most

    def test_pieces_that_only_the_lost_one_had(self):
        self.said.update(optimizer="sgd", every=2, options={"strategy": "zero"})
        first, second, third = self.start(), self.start(), self.start()
        self.wait_for(self.reached(5, 3))
        third.kill()
        third.wait()
        self.finish([first, second])
        self.assertIn("of a checkpoint", self.log())

    def test_state_kept_twice(self):
        """The same loss where a second worker keeps what is cut: no checkpoint is needed, and at most a step is made again."""
        self.said.update(every=0, options={"strategy": "zero", "redundancy": 1})
        first, second, third = self.start(), self.start(), self.start()
        self.wait_for(self.reached(5, 3))
        third.kill()
        third.wait()
        self.finish([first, second])
        self.assertIn("of the memory of the workers", self.log())
        self.assertLessEqual(self.lost_steps(), 1, self.log())

    def test_second_copies_that_differ_are_not_taken(self):
        """A script that clamps parameters behind every step: what is kept is that of before."""
        self.said.update(clamp=0.2, every=2, options={"strategy": "zero", "redundancy": 1})
        self.finish([self.start(3, "1:1", "kill:step:1:8")])
        self.assertIn("of a checkpoint", self.log())

    def test_damaged_checkpoints_are_left_out(self):
        self.said["steps"] = 7
        self.finish([self.start(3, "1:1")])
        saved = sorted(glob.glob(os.path.join(self.folder, "saved", "step-*")))
        self.assertEqual(len(saved), 2)
        with open(os.path.join(saved[-1], "rank-1.pt"), "r+b") as file:
            file.seek(os.path.getsize(file.name) // 2)
            file.write(b"\xff" * 64)
        os.remove(os.path.join(self.folder, "losses"))
        self.launchers, self.port = [], support.free_port()
        self.finish_from(self.start(3, "1:1"), 3)

    def finish_from(self, launcher, step):
        self.assertEqual(launcher.wait(120), 0, self.log())
        self.assertEqual(self.losses()[0][0], step, self.log())
        wanted, _ = elastic_model.plain(self.said)
        for at, loss, _, _ in self.losses():
            self.assertLess(abs(loss - wanted[at]), 1e-9 * abs(wanted[at]))

    def test_signals(self):
        """The launcher's own wish to end leaves the pieces of the last step."""
        self.said["steps"], self.said["seconds"] = 200, 0.05
        launcher = self.start(3, "1:1")
        self.wait_for(self.reached(4))
        launcher.send_signal(signal.SIGTERM)
        self.assertNotEqual(launcher.wait(60), 0)
        self.assertEqual(self.left(), [], "what was left in memory")


@unittest.skipIf(_torch.VERSION < (2, 3), "this torch has no reader for checkpoints of one process")
class Shards(Case):
    def test_checkpoints_are_those_of_torch(self):
        """torch.distributed.checkpoint reads what workers wrote, whatever the plan, each piece once."""
        plans = [{}, {"options": {"strategy": "zero"}}, {"engine": "pipeline", "model": "deep"}, {"engine": "grid", "model": "deep"}]
        for said in plans:
            with self.subTest(said):
                self.setUp()
                self.said.update(steps=7, seconds=0, **said)
                self.finish([self.start(3, "1:1")])
                (saved,) = glob.glob(os.path.join(self.folder, "saved", "step-6-*"))
                got = _formats.read(saved, "dcp")
                self.said["steps"] = 6
                _, state, optimizer = elastic_model.trained(self.said)
                support.same(got["model"], dict(state))
                self.assertEqual(got["steps"], 6)
                names = got["optimizer"]["param_groups"][0]["params"]
                support.same_optimizer(_formats.by_index(got["optimizer"], names), optimizer)
                rows = [row for entry in _pieces_files.of_step(saved) for row in entry.rows if row[1] in state]
                wanted = sum({t.data_ptr(): t.numel() for t in state.values()}.values())
                wanted += sum(t.numel() for values in optimizer["state"].values() for t in values.values() if t.dim() > 0)
                self.assertEqual(sum(math.prod(row[4]) for row in rows), wanted, rows)


PROGRAM = os.path.join(os.environ.get("MOTLEY_BINARY_DIR", "."), "motley")
SLOW = """name: three
link: {bandwidth: 1 Gbps, latency: 50 us}
devices: [{type: a, count: 2}, {type: b, count: 1}]
device_types:
  - {name: a, like: cpu-core, flops: 400 MFLOPS, memory: 2 GiB, memory_bandwidth: 600 MB/s, overhead: 2 us, speed: 0.2}
  - {name: b, like: cpu-core, flops: 200 MFLOPS, memory: 1 GiB, memory_bandwidth: 300 MB/s, overhead: 2 us, speed: 0.1}
"""


class Program(Case):
    """`motley run --elastic` as what torchrun starts."""

    def setUp(self):
        super().setUp()
        self.said["steps"] = 150 if "machine" in self.id() else 30  # so that there is time for them to come and go
        cluster, graph, self.plan = (os.path.join(self.folder, name) for name in ("c.yaml", "gpt.json", "plan.json"))
        with open(cluster, "w") as file:
            file.write(SLOW)
        self.call("capture", "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=256", "--batch", "12", "--dtype", "f64", "-o", graph)
        self.call("plan", graph, "--cluster", cluster, "--batch", "12", "--strategy", "zero", "-o", self.plan)
        alone = os.path.join(self.folder, "alone.json")
        with open(cluster, "w") as file:
            file.write(SLOW.replace("count: 2}, {type: b, count: 1", "count: 1"))
        self.call("plan", graph, "--cluster", cluster, "--batch", "12", "-o", alone)
        self.wanted = [step["loss"] for step in json.loads(self.call("run", alone, "--steps", str(self.said["steps"]), "--json"))["steps"]]

    def call(self, *words):
        run = subprocess.run([PROGRAM, *words], capture_output=True, text=True, env=support.environment())
        self.assertEqual(run.returncode, 0, run.stderr)
        return run.stdout

    def start(self, workers=1, nodes="1:3", faults="", more=("--emulate",)):
        """A launcher, as one machine has it."""
        command = [sys.executable, "-m", "motley.launch", "--nnodes", nodes, "--nproc_per_node", str(workers), "--max_restarts", "4",
                   "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{self.port}", "--rdzv_id", "test",
                   "--rdzv_conf", f"last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=3,is_host={not self.launchers}", "--monitor_interval", "0.2",
                   "--no_python", PROGRAM, "run", self.plan, "--elastic", "--hang-timeout", "4", "--json", "--steps", str(self.said["steps"]), *more]  # fmt: skip
        number = len(self.launchers)
        with open(os.path.join(self.folder, f"log-{number}"), "w") as log, open(os.path.join(self.folder, f"out-{number}"), "w") as out:
            environment = {**support.environment(), "MOTLEY_FAULTS": faults}
            self.launchers.append(subprocess.Popen(command, env=environment, stdout=out, stderr=log))
        return self.launchers[-1]

    def told(self):
        """Numbers of the steps that were told of."""
        return [int(line.split()[1]) for line in self.log().splitlines() if line.startswith("step ")]

    def finish(self, launchers):
        try:
            codes = [launcher.wait(120) for launcher in launchers]
        except subprocess.TimeoutExpired:
            self.fail(f"a launcher does not end: {self.log()}")
        self.assertEqual(codes, [0] * len(codes), self.log())
        (said,) = filter(None, (pathlib.Path(file).read_text() for file in glob.glob(os.path.join(self.folder, "out-*"))))
        steps = json.loads(said)["steps"]
        self.assertEqual([step["step"] for step in steps], list(range(self.said["steps"])))
        for step, wanted in zip(steps, self.wanted):
            self.assertLess(abs(step["loss"] - wanted), 1e-9 * wanted, step)
        self.assertEqual(self.left(), [], "what was left in memory")

    def test_a_worker_of_the_program_is_killed(self):
        self.finish([self.start(3, "1:1", "kill:step:1:3@0;kill:collective:0:30@1", more=())])
        self.assertIn("going on with 3 of 3 devices", self.log())
        self.assertLessEqual(len(self.told()), self.said["steps"] + 2, self.log())

    def test_a_machine_of_the_program_is_lost_and_another_comes(self):
        first, second, third = self.start(), self.start(), self.start()
        self.wait_for(lambda: 3 in self.told())
        second.kill()
        second.wait()
        self.wait_for(lambda: "going on with 2 of 3 devices" in self.log())
        count = len(self.told())
        self.wait_for(lambda: len(self.told()) > count + 2)
        fourth = self.start()
        self.finish([first, third, fourth])
        self.assertIn("going on with 3 of 3 devices", self.log())

    def test_more_workers_than_devices(self):
        launcher = self.start(4, "1:1")
        self.assertNotEqual(launcher.wait(120), 0)
        self.assertIn("the plan has 3 devices, but 4 workers were started", self.log())


class Timed(Case):
    """Whose outcome depends on how long something takes."""

    def test_hung(self):
        for faults in ("stop:collective:1:60", "hang:step:1:5", "hang:step:0:5"):
            with self.subTest(faults=faults):
                self.setUp()
                self.said["hang"] = 2
                launcher = self.start(3, "1:1", faults)
                began = time.time()
                self.finish([launcher])
                print(f"{time.time() - began:.1f} s with {faults}", file=sys.stderr)

    def test_a_slow_device_gets_less(self):
        self.said.update(model="wide", batch=1024, steps=60, seconds=0, replan="auto", every=0)
        self.said["cluster"] = (
            "name: two\nlink: {bandwidth: 1 Gbps, latency: 20 us}\ndevices: [{type: slow, count: 2}]\n"
            "device_types: [{name: slow, flops: 50 MFLOPS, memory: 1 GiB, memory_bandwidth: 100 MB/s, overhead: 20 us}]\n"
        )
        self.finish([self.start(2, "1:1", "slow:step:1:20")])
        self.assertRegex(self.log(), "device 1 .slow. computes [0-9.]+ times as long as before")
        self.assertIn("goes on by a plan for the speed that devices have now", self.log())


def write_step(folder, rank, step):
    """A worker's half of a tensor that says which step it is of."""
    half = 1 << 16
    said = {"steps": step, "updates": step, "run": "00000a", "rank": rank, "ready": True, "numbers": [], "groups": None, "beside": []}
    rows = [["", "weight", [1, 2, half, rank, 1, 0, 0, half], "float32", [half]]]
    _pieces_files.write(folder, said, rows, [torch.full((half,), float(step))])
    if rank == 0:
        _pieces_files.remove(folder, lambda steps, run: steps >= step - 2)


class Files(unittest.TestCase):
    """Pieces in a folder, whatever happens to those who write them."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()

    def newest(self):
        entries = _pieces_files.found(self.folder)
        source = _pieces_files.newest(entries, [("weight", 1 << 17)])
        if source is None:
            return 0
        whole = torch.zeros(1 << 17)
        for entry, number, part, new in source.giving("", "weight", whole.numel()):
            _pieces_files.put(whole, _pieces_files.tensors_of(entry)[number], part, new)
        self.assertTrue(bool((whole == source.steps).all()))
        return source.steps

    def test_writers_that_are_killed(self):
        """Both workers at once, at any moment: what both have written is there."""
        fork, rng, first = multiprocessing.get_context("fork"), random.Random(5), 1

        def worker(rank, barrier, done):
            for step in range(first, 1 << 30):
                write_step(self.folder, rank, step)
                done[rank] = step
                barrier.wait()

        for _ in range(int(os.environ.get("MOTLEY_KILLS", 6))):
            barrier, done = fork.Barrier(2), fork.Array("q", 2, lock=False)
            workers = [fork.Process(target=worker, args=(rank, barrier, done), daemon=True) for rank in range(2)]
            for one in workers:
                one.start()
            time.sleep(rng.uniform(0.005, 0.15))
            for one in workers:
                one.kill()
            for one in workers:
                one.join()
            there = self.newest()
            self.assertGreaterEqual(there, max(first - 1, min(done)))
            first = there + 1
        self.assertGreater(first, 3)

    def test_rectangles(self):
        """Of random pieces of random tensors: put where they say, they are the piece."""
        rng = random.Random(7)
        for _ in range(3000):
            shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
            cut = rng.randrange(len(shape)) if shape else 0
            outer, size, inner = math.prod(shape[:cut]), shape[cut] if shape else 1, math.prod(shape[cut + 1 :])
            if rng.random() < 0.3:  # cut as a tensor of another shape
                outer = rng.choice([n for n in (1, 2, 3, 4, 6) if math.prod(shape) % n == 0])
                size, inner = math.prod(shape) // outer, 1
            begin = rng.randint(0, size)
            length = rng.randint(0, size - begin)
            first = rng.randint(0, outer * length * inner)
            count = rng.choice([outer * length * inner - first, rng.randint(0, outer * length * inner - first)])
            part = (outer, size, inner, begin, length, 0, first, count)
            piece = 1 + torch.arange(count)
            wanted, got = torch.zeros(math.prod(shape), dtype=torch.long), torch.zeros(shape, dtype=torch.long)
            _state.place(wanted, part, piece)
            found = _shards.rectangles(shape, part)
            self.assertLessEqual(len(found), outer * max(1, 2 * len(shape)))
            for (offsets, sizes), one in zip(found, _shards.cut_up(piece, shape, part)):
                self.assertEqual(list(one.shape), sizes)
                got[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))] += one
            self.assertTrue(torch.equal(got.reshape(-1), wanted), (shape, part))

    def test_full_disk(self):
        for rank in range(2):
            write_step(self.folder, rank, 1)

        def worker():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
            try:
                write_step(self.folder, 0, 2)
            except OSError:
                os._exit(7)

        process = multiprocessing.get_context("fork").Process(target=worker)
        process.start()
        process.join()
        self.assertEqual(process.exitcode, 7)
        self.assertEqual(self.newest(), 1)


if __name__ == "__main__":
    unittest.main()
