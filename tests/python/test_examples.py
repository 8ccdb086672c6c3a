"""The examples run as their headers say."""

import os
import subprocess
import sys
import tempfile
import unittest

import support

EXAMPLES = os.path.join(os.path.dirname(os.path.dirname(support.HERE)), "examples")


def example(name):
    return os.path.join(EXAMPLES, name)


def run(name, *arguments):
    done = subprocess.run([sys.executable, example(name), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Examples(unittest.TestCase):
    def test_they_are_short(self):
        for name in os.listdir(EXAMPLES):
            if name.endswith(".py"):
                with open(example(name)) as file:
                    self.assertLess(len(file.readlines()), 100, name)

    def test_before_and_after(self):
        before = support.launch(3, os.path.join(support.HERE, "rest.py"), example("01_before.py"), os.devnull)
        with tempfile.TemporaryDirectory() as folder:
            after = support.launch(3, example("02_after.py"), f"{folder}/digits.pt")
            self.assertTrue(os.path.exists(f"{folder}/digits.pt"))
        for output in (before, after):
            losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("epoch")]
            self.assertEqual(len(losses), 2, output)
        self.assertLess(losses[1], 2.0)
        self.assertGreater(float(after.split("right: ")[1].split("%")[0]), 50)

    def test_planning(self):
        output = run("03_planning.py")
        for cluster in ("hap-a100-p100", "hapt-case", "hap-64"):
            self.assertIn(cluster, output)

    def test_a_plan_file(self):
        with tempfile.TemporaryDirectory() as folder:
            plan = f"{folder}/plan.json"
            self.assertIn("problems: none", run("04_plan_file.py", plan))
            self.assertIn("step 4: loss", support.launch(3, example("04_plan_file.py"), plan))

    def test_resuming_elsewhere(self):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = f"{folder}/checkpoint.pt"
            three = support.launch(3, example("05_resume.py"), example("three.yaml"), checkpoint)
            two = support.launch(2, example("05_resume.py"), example("two.yaml"), checkpoint)
            self.assertIn("step 4 on 3 workers", three)
            self.assertIn("step 5 on 2 workers", two)
            self.assertIn("step 9 on 2 workers", two)

    def test_going_on_without_a_worker(self):
        def losses(folder, faults, restarts):
            command = [sys.executable, "-m", "motley.launch", "--nproc_per_node", "3", "--max_restarts", restarts, "--master_addr", "127.0.0.1",
                       "--master_port", str(support.free_port()), example("08_elastic.py"), folder]  # fmt: skip
            environment = {**support.environment(), "MOTLEY_FAULTS": faults}
            done = subprocess.run(command, env=environment, timeout=200, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return {line.split(" on ")[0]: line.split()[-1] for line in done.stdout.splitlines() if line.startswith("step")}, done.stderr

        with tempfile.TemporaryDirectory() as folder:
            plain, _ = losses(f"{folder}/a", "", "0")
            after, said = losses(f"{folder}/b", "kill:step:1:17", "2")
        self.assertIn("[elastic] goes on on all devices, from step", said)
        self.assertEqual(len(plain), 40)
        self.assertEqual(after.keys(), plain.keys())
        for step, loss in plain.items():
            self.assertAlmostEqual(float(after[step]), float(loss), delta=2e-3)


if __name__ == "__main__":
    unittest.main()
