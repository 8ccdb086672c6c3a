"""The examples of a Trainer and of a plain loop, against the same scripts without motley on one process."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch

import support

EXAMPLES = os.path.join(os.path.dirname(os.path.dirname(support.HERE)), "examples")


def text_of(name, *changes):
    with open(os.path.join(EXAMPLES, name)) as file:
        text = file.read()
    for old, new in (("import os\n", f"import os\nimport torch\ntorch.set_num_threads(1)\n__file__ = {os.path.join(EXAMPLES, name)!r}\n"), *changes):
        assert old in text, old
        text = text.replace(old, new)
    return text


@unittest.skipUnless(importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"), "needs transformers and accelerate")
class HuggingFace(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def run_text(self, text, workers, out):
        """Runs a script with these words; returns what it prints."""
        script = os.path.join(self.folder, "script.py")
        with open(script, "w") as file:
            file.write(text)
        if workers > 1:
            return support.launch(workers, script, out)
        done = subprocess.run([sys.executable, script, out], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def same(self, got, wanted):
        self.assertEqual(sorted(got), sorted(wanted))
        for name, value in wanted.items():
            self.assertLess((got[name] - value).abs().max().item(), 1e-5 * max(1, value.abs().max().item()), name)

    def test_trainer(self):
        from safetensors.torch import load_file

        # Adam takes the sign of a gradient that is zero but for rounding, that of the keys' bias.
        sgd = ("learning_rate=1e-2", "learning_rate=1e-1, optim='sgd'")
        plain = text_of(
            "06_trainer.py", sgd,
            ("from motley.huggingface import Trainer  # from transformers import Trainer", "from transformers import Trainer"),
            (', cluster=f"{HERE}/three.yaml"', ""),
            ("per_device_train_batch_size=4", "per_device_train_batch_size=12"),
        )
        one, three = os.path.join(self.folder, "one"), os.path.join(self.folder, "three")
        self.run_text(plain, 1, one)
        self.run_text(text_of("06_trainer.py", sgd), 3, three)
        wanted = load_file(os.path.join(one, "model", "model.safetensors"))
        self.same(load_file(os.path.join(three, "model", "model.safetensors")), wanted)
        # A checkpoint of three workers goes on, on three and on one without motley.
        go_on = ("trainer.train()", "trainer.train(resume_from_checkpoint=f'{OUT}/checkpoint-3')")
        for text, workers in ((text_of("06_trainer.py", sgd, go_on), 3), (plain.replace(*go_on), 1)):
            shutil.rmtree(os.path.join(three, "model"))
            self.run_text(text, workers, three)
            self.same(load_file(os.path.join(three, "model", "model.safetensors")), wanted)

    def test_losses_that_a_trainer_makes(self):
        """compute_loss of a subclass, with smooth labels, terms of its own and a second pass before each step."""
        from safetensors.torch import load_file

        changes = (
            ("learning_rate=1e-2", "learning_rate=1e-1, optim='sgd', label_smoothing_factor=0.1, gradient_accumulation_steps=2"),
            ("save_steps=3", "save_strategy='no'"),
            ("max_steps=6", "max_steps=3"),
            ("trainer = Trainer(", """class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, output = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters()) + 1e-2 * output.logits.logsumexp(-1).square().mean()
        return (loss, output) if return_outputs else loss


trainer = Own("""),
        )  # fmt: skip
        plain = text_of(
            "06_trainer.py", *changes,
            ("from motley.huggingface import Trainer  # from transformers import Trainer", "from transformers import Trainer"),
            (', cluster=f"{HERE}/three.yaml"', ""),
            ("per_device_train_batch_size=4", "per_device_train_batch_size=12"),
        )
        one, three = os.path.join(self.folder, "one"), os.path.join(self.folder, "three")
        said = [self.run_text(text, workers, out) for text, workers, out in ((plain, 1, one), (text_of("06_trainer.py", *changes), 3, three))]
        state = [load_file(os.path.join(folder, "model", "model.safetensors")) for folder in (three, one)]
        self.same(*state)
        evaluated = [float(words.split("evaluated ")[1].split()[0]) for words in said]
        self.assertAlmostEqual(*evaluated, places=5)

    def test_loop(self):
        """The loss, the other outputs and the state of the model are those of the plain loop."""
        sgd = ("torch.optim.AdamW(model.parameters(), lr=1e-2)", "torch.optim.SGD(model.parameters(), lr=1e-1)")
        told = ("    if model.dist.rank == 0:\n        print(", "    if int(os.environ.get('RANK', 0)) == 0:\n        torch.save(model.state_dict(), sys.argv[1])\n        print(")
        more = ("import os\n", "import os, sys\n")
        plain = text_of(
            "07_loop.py", sgd, told, more,
            ('model = motley.wrap(model, optimizer, f"{HERE}/three.yaml")  # accelerator.prepare(model, optimizer, loader)', ""),
            ("model.clip_grad_norm_(1.0)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
        )  # fmt: skip
        one, three = os.path.join(self.folder, "one.pt"), os.path.join(self.folder, "three.pt")
        words = self.run_text(plain, 1, one)
        self.assertIn("epoch 2", words)
        self.assertIn(words.strip(), self.run_text(text_of("07_loop.py", sgd, told, more), 3, three))
        self.same(torch.load(three), torch.load(one))


if __name__ == "__main__":
    unittest.main()
