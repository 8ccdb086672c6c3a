"""Rows that a step takes in an order of its own and puts back (graph/unsorted.h), or of each sample (graph/aligned.h): the graph
computes what plain PyTorch does, without the order where nobody sees it, and with it where somebody does."""

import random
import unittest

import torch
import torch.nn.functional as F
from torch import nn

import motley

ROWS, WIDTH = 12, 8
GROUPED = hasattr(torch, "_grouped_mm")


class Model(nn.Module):
    def __init__(self, body, experts=3):
        super().__init__()
        torch.manual_seed(2)
        self.router = nn.Linear(WIDTH, experts)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 16) / 4)
        self.down = nn.Parameter(torch.randn(experts, 8, WIDTH) / 4)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


class Rows(unittest.TestCase):
    def check(self, body, gone=(), there=(), seed=0, experts=3):
        """Loss and gradients are those of plain PyTorch; which operators the graph has, and has not."""
        torch.manual_seed(seed)
        model, x = Model(body, experts), torch.randn(ROWS, WIDTH)
        graph = motley.capture(model, (x,), lambda out: out.float().pow(2).mean())
        for op in gone:
            self.assertNotIn(op, graph.ops)
        for op in there:
            self.assertIn(op, graph.ops)
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        got, gradients, _ = motley._motley.interpret(graph, parameters, {}, {"inputs": x}, 0, 0)
        want = model(x).float().pow(2).mean()
        want.backward()
        self.assertAlmostEqual(got.item(), want.item(), delta=1e-5 * max(1, abs(want.item())))
        for name, p in model.named_parameters():
            self.assertEqual(name in gradients, p.grad is not None, name)
            if p.grad is not None:
                self.assertLess((gradients[name] - p.grad).abs().max().item(), 1e-5 * max(1, p.grad.abs().max().item()), name)

    # ---- of each sample

    def test_a_part_of_each_sample(self):
        numbers = torch.arange(ROWS)
        for index in (numbers % 4, -1 - numbers % 4, numbers % 4 - 2):
            self.check(lambda m, x, i=index: m.linear(x).view(ROWS, 4, 2)[torch.arange(ROWS), i], gone=["aten::index.Tensor", "aten::index_put"], there=["aten::gather", "aten::scatter_add"])  # fmt: skip
        several = (numbers[:, None] * torch.tensor([1, 3, 3])) % 4
        for rows in (torch.arange(ROWS)[:, None], torch.arange(ROWS).unsqueeze(1)):
            self.check(lambda m, x, r=rows: m.linear(x).view(ROWS, 4, 2)[torch.arange(ROWS)[:, None], several] + r[:, :, None], gone=["aten::index.Tensor"])  # fmt: skip

    def test_parts_of_other_samples(self):
        others = torch.arange(ROWS).flip(0)
        self.check(lambda m, x: m.linear(x)[torch.arange(ROWS) // 2, torch.arange(ROWS) % WIDTH], there=["aten::index.Tensor"])
        self.check(lambda m, x: m.linear(x)[others, torch.arange(ROWS) % WIDTH], there=["aten::index.Tensor"])
        self.check(lambda m, x: m.linear(x)[torch.arange(WIDTH), torch.arange(WIDTH)], there=["aten::index.Tensor"])
        self.check(lambda m, x: m.linear(x).t()[torch.arange(WIDTH), torch.arange(WIDTH)], gone=["aten::index.Tensor"])

    # ---- rows that are sorted

    @staticmethod
    def keys(m, x):
        return m.router(x).argmax(1)

    @staticmethod
    def inverse(order, way):
        if way == 0:
            return order.argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return back

    def test_rows_there_and_back(self):
        for way in (0, 1):

            def body(m, x, way=way):
                order = self.keys(m, x).argsort()
                return F.gelu(m.linear(x[order]))[self.inverse(order, way)]

            self.check(body, gone=["aten::sort", "aten::sort.stable", "aten::index.Tensor", "aten::index_put"])

    def test_a_sum_of_sorted_rows(self):
        self.check(lambda m, x: F.gelu(m.linear(x[self.keys(m, x).argsort()])).sum(0), gone=["aten::sort"])
        self.check(lambda m, x: m.linear(x)[(m.router(x).argmax(1) * 5 % 7).argsort(descending=True)].pow(3).sum(0), gone=["aten::sort"])

    def test_an_order_that_is_seen(self):
        def rows(m, x):
            return m.linear(x[self.keys(m, x).argsort()])

        seen = [lambda m, x: rows(m, x), lambda m, x: rows(m, x).cumsum(0), lambda m, x: rows(m, x) + m.linear(x),
                lambda m, x: rows(m, x)[:5], lambda m, x: rows(m, x).view(4, 3, WIDTH).sum(1), lambda m, x: rows(m, x).flip(0),
                lambda m, x: rows(m, x) * torch.arange(ROWS)[:, None], lambda m, x: torch.cat([rows(m, x), x]),
                lambda m, x: rows(m, x) @ torch.ones(WIDTH, 2), lambda m, x: rows(m, x).softmax(0).pow(2),
                lambda m, x: torch.ones(3, ROWS).cumsum(1) @ rows(m, x)]  # fmt: skip
        for body in seen:
            self.check(body, there=["aten::sort"])

    def test_two_orders_at_once(self):
        def body(m, x):
            first, second = self.keys(m, x).argsort(), m.linear(x).argmax(1).argsort()
            return m.linear(x[first]) * m.linear(x[second])

        self.check(body, there=["aten::sort"])

    @unittest.skipUnless(GROUPED, "torch has no _grouped_mm")
    def test_experts(self):
        """A mixture of experts in the forms in which people write it."""
        for seed in range(40):
            chosen = random.Random(seed)
            experts, top = chosen.choice((2, 3, 5)), chosen.choice((1, 2))
            way, back, counted, extra = chosen.randrange(3), chosen.randrange(2), chosen.randrange(2), chosen.randrange(2)

            def body(m, x, experts=experts, top=top, way=way, back=back, counted=counted, extra=extra):
                weights, ids = m.router(x).softmax(1).topk(top)
                flat, weights = ids.reshape(-1), weights.reshape(-1)
                values, order = flat.sort(stable=way == 1) if way else (None, flat.argsort())
                values = flat[order] if values is None else values
                count = torch.histc((flat if counted else values).float(), bins=experts, min=0, max=experts - way % 2)
                ends = count.cumsum(0).int()
                rows = x[order // top] if back == 0 else x.gather(0, (order // top)[:, None].expand(-1, WIDTH))
                hidden = torch._grouped_mm(rows, m.up, offs=ends)
                gate, hidden = hidden.chunk(2, -1)
                out = torch._grouped_mm(F.silu(gate) * hidden, m.down, offs=ends) * weights[order][:, None]
                if back == 0:
                    out = out[self.inverse(order, way % 2)].view(ROWS, top, WIDTH).sum(1)
                else:
                    out = torch.zeros_like(x).scatter_add(0, (order // top)[:, None].expand(-1, WIDTH), out)
                return out + count.sum() * extra * m.linear(x)

            with self.subTest(seed=seed):
                self.check(body, gone=["aten::sort", "aten::sort.stable", "aten::_grouped_mm"], there=["motley_torch::rows_mm", "motley_torch::rows_outer"], seed=seed, experts=experts)  # fmt: skip

    @unittest.skipUnless(GROUPED, "torch has no _grouped_mm")
    def test_experts_whose_rows_end_elsewhere(self):
        """Ends that are not those of the sorted keys."""

        def body(m, x):
            order = self.keys(m, x).argsort()
            ends = torch.tensor([4, 8, 12], dtype=torch.int32)
            return torch._grouped_mm(x[order], m.up, offs=ends)[order.argsort()]

        self.check(body, there=["aten::_grouped_mm"])


if __name__ == "__main__":
    unittest.main()
