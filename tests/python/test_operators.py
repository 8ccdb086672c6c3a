"""Every operator of the table with hostile numbers: random programs of each call equal one device."""

import unittest

import torch

import operators


class Operators(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)

    def test_random_programs_equal_one_device(self):
        for op in operators.operators():
            for seed in range(2):
                call = operators.Call(op, 101 * seed + 3)
                if call.arguments is None:
                    continue
                with self.subTest(op, seed=seed):
                    error, what = call.worst([2, 3, 4], 2, seed)
                    self.assertLess(error, 1e-9, what)

    def test_numbers_are_hostile(self):
        calls = [operators.Call("aten::add.Tensor", seed) for seed in range(20)]
        numbers = torch.cat([call.operands[0].tensor.flatten() for call in calls])
        self.assertGreater(numbers.isinf().sum(), 20)
        self.assertGreater((numbers == 0).sum(), 20)
        self.assertTrue((numbers.abs() > 2**15).any())
        self.assertFalse(numbers.isnan().any())
        self.assertTrue(any(call.summed for call in calls) and not all(call.summed for call in calls))


if __name__ == "__main__":
    unittest.main()
