"""Optimizers as users write them: what torch.optim does not have, element by element or not."""

import torch


class Written(torch.optim.Optimizer):
    """Calls update(p, gradient, state, group) on every parameter."""

    def __init__(self, params, lr=1e-2, **more):
        super().__init__(params, dict(lr=lr, **more))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)


class Lion(Written):
    """By element: the sign of a mean."""

    def update(self, p, g, state, group):
        mean = state.setdefault("mean", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * 0.1).add_(torch.sign(mean * 0.9 + g * 0.1), alpha=-group["lr"])
        mean.mul_(0.99).add_(g, alpha=0.01)


class LARS(Written):
    def update(self, p, g, state, group):
        moment = state.setdefault("moment", torch.zeros_like(p))
        rate = 0.02 * p.norm() / (g.norm() + 1e-9)
        moment.mul_(0.9).add_(g * torch.where(rate > 0, rate, torch.ones_like(rate)))
        p.sub_(group["lr"] * moment)


class LAMB(Written):
    def update(self, p, g, state, group):
        one, two = state.setdefault("m", torch.zeros_like(p)), state.setdefault("v", torch.zeros_like(p))
        one.mul_(0.9).add_(g, alpha=0.1)
        two.mul_(0.99).addcmul_(g, g, value=0.01)
        change = one / (two.sqrt() + 1e-6) + 0.01 * p
        p.sub_(group["lr"] * change * p.norm() / change.norm())


class Adam(LAMB):
    """Has the name of one that works by element."""


class Adafactor(Written):
    """Factored where both sides are long; clipped by the size of the whole change."""

    def update(self, p, g, state, group):
        square = g * g + 1e-30
        if p.dim() >= 2 and min(p.shape[-2:]) >= group.get("least", 1):
            rows = state.setdefault("rows", torch.zeros_like(p[..., 0]))
            columns = state.setdefault("columns", torch.zeros_like(p[..., 0, :]))
            rows.lerp_(square.mean(-1), 0.2)
            columns.lerp_(square.mean(-2), 0.2)
            size = (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)
        else:
            size = state.setdefault("square", torch.zeros_like(p)).lerp_(square, 0.2)
        change = g / size.sqrt()
        if group.get("clip", True):
            change = change / max(1.0, change.square().mean().sqrt().item())
        p.sub_(group["lr"] * change)


class Muon(Written):
    """Matrices are made orthogonal, the others go by sign."""

    def update(self, p, g, state, group):
        moment = state.setdefault("moment", torch.zeros_like(p)).mul_(0.9).add_(g)
        if p.dim() != 2:
            p.sub_(group["lr"] * moment.sign())
            return
        x = moment / (moment.norm() + 1e-7)
        for _ in range(4):
            x = 1.5 * x - 0.5 * x @ x.t() @ x
        p.sub_(group["lr"] * x)


class Centred(Written):
    """Gradients without their mean over all but the first dimension."""

    def update(self, p, g, state, group):
        p.sub_(group["lr"] * (g - g.mean(tuple(range(1, g.dim())), keepdim=True) if g.dim() > 1 else g))


class LateNorm(Written):
    """By element for five steps, then by norm."""

    def update(self, p, g, state, group):
        state["step"] = state.get("step", 0) + 1
        p.sub_(group["lr"] * (g / (g.norm() + 1e-9) if state["step"] > 5 else g))


class FlatDecay(Written):
    """Decays matrices but not vectors."""

    def update(self, p, g, state, group):
        p.sub_(group["lr"] * (g + (0.1 * p if p.dim() > 1 else 0)))


class GlobalClip(torch.optim.Optimizer):
    """SGD that clips by the norm of all gradients."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        all_of = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in all_of]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / max(1.0, norm.item() / 0.05))


class Growing(torch.optim.Optimizer):
    """A rate kept in the group, that grows with the distance gone (D-Adaptation, Prodigy)."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, dict(lr=lr, d=1e-3))

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        gone = 0.0
        for p in group["params"]:
            start = self.state[p].setdefault("start", p.clone())
            if p.grad is not None:
                gone += (p.grad * (start - p)).sum().item()
                p.sub_(group["lr"] * group["d"] * p.grad)
        group["d"] = max(group["d"], 1e-3 + abs(gone))


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer: every third step goes half the way."""

    def __init__(self, base):
        self.base, self.param_groups, self.defaults, self.count = base, base.param_groups, base.defaults, 0
        self.state = base.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # torch 2 asks for them
        self.slow = {p: p.detach().clone() for group in base.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            for p, slow in self.slow.items():
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


class Noisy(Written):
    def update(self, p, g, state, group):
        p.sub_(group["lr"] * (g + torch.randn_like(g)))


class Sharpness(torch.optim.Optimizer):
    """SAM: needs the gradient at another point too."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, dict(lr=lr))

    def step(self, closure=None):
        assert closure is not None, "SAM needs a closure"
