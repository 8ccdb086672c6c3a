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

    @unittest.skipUnless(hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"), "this torch has no such operator")
    def test_attention_by_products_is_that_of_the_cpu(self):
        """What other devices do where none of torch's kernels fits."""
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        here, here_backward = torch.ops.motley_torch.attention.default, torch.ops.motley_torch.attention_backward.default
        numbers, inf = torch.Generator().manual_seed(5), float("inf")

        def draw(*shape):
            return torch.randn(*shape, generator=numbers, dtype=torch.float64)

        for heads, shared in ((4, 4), (4, 2), (6, 1)):
            for s, t in ((3, 5), (7, 7), (33, 40)):
                for mask in (None, draw(2, 1, s, t), draw(s, t), draw(1, heads, s, t)):
                    for scale in (None, 0.3):
                        if mask is not None:
                            mask[..., 1] = -inf
                            mask[0] = -inf  # sees nothing
                        q, k, v, d = draw(2, heads, s, 8), draw(2, shared, t, 8), draw(2, shared, t, 8), draw(2, heads, s, 8)
                        out = forward(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
                        expected = (*out, *backward(d, q, k, v, *out, 0.0, mask is None, attn_mask=mask, scale=scale))
                        out = here(q, k, v, mask is None, mask, scale)
                        found = (*out, *here_backward(d, q, k, v, *out, mask is None, mask, scale))
                        for a, b in zip(found, expected):
                            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

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
