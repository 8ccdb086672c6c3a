"""Every architecture's graph, by random programs of the theory on threads: each must be the step of one device."""

import unittest

import torch

import motley
import soundness_module
import support


class Soundness(unittest.TestCase):
    def test_random_programs_equal_one_device(self):
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        for name, build in support.architectures():
            with self.subTest(name):
                torch.manual_seed(0)
                model, loss_fn, batch = build()
                example = support.batches_of(batch, 1)[0]
                step = motley._capture.Step(model, example, loss_fn)
                graph = motley.capture(model, example, loss_fn)
                tensors = [{slot.name: slot.tensor.detach().clone() for slot in slots}
                           for slots in (step.parameters, step.buffers)]  # fmt: skip
                error, what = soundness_module.worst_error(
                    str(graph), *tensors, dict(step.leaves), [2, 3], 4, 11
                )
                self.assertLess(error, 1e-9, what)


if __name__ == "__main__":
    unittest.main()
