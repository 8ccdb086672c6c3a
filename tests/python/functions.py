"""Functions of torch as models call them: expressions of the tensors below, which test_capture_functions.py captures.

x and y are inputs (6, 4), i integers (6,) below 4, b booleans (6, 4). The rest are parameters: w (6, 4), p positive (6, 4),
s (4, 4) well conditioned, f the same with columns in memory order, d positive definite, v (4,), img (2, 3, 8, 8),
sig (2, 3, 10), vol (1, 2, 4, 6, 6), and buf a buffer (4,).
"""

from functions_of_layers import LAYERS, LOSSES, MODULES
from functions_of_shapes import SHAPES

POINTWISE = """
w.abs()
w.tanh().acos()
p.acosh() + 1
p.add(1).acosh()
w + x
w.add(x, alpha=2)
torch.add(w, 2)
torch.addcdiv(w, x, p, value=0.5)
torch.addcmul(w, x, p, value=0.5)
w.tanh().asin()
w.asinh()
w.atan()
torch.atan2(w, p)
w.tanh().atanh()
w.ceil() + w
w.clamp(-0.5, 0.5)
w.clamp(min=x)
w.clamp(x, x + 1)
torch.clip(w, max=0.3)
w.clamp_min(0.1)
w.clamp_max(0.1)
w.cos()
w.cosh()
w.deg2rad()
w / p
w / 3
3 / p
torch.div(w, p, rounding_mode="floor") + w
torch.true_divide(w, p)
p.digamma()
w.erf()
w.erfc()
w.tanh().erfinv()
w.exp()
w.exp2()
w.expm1()
w.floor() + w
torch.fmod(w, 0.7)
torch.fmod(w, p)
w % 0.7
w % p
w.frac()
torch.hypot(w, p)
p.lgamma()
p.log()
p.log10()
p.log1p()
p.log2()
torch.logaddexp(w, x)
torch.logaddexp2(w, x)
torch.logit(w.sigmoid())
torch.logit(w.sigmoid(), eps=0.3)
torch.lerp(w, x, 0.3)
torch.lerp(w, x, p)
torch.maximum(w, x)
torch.minimum(w, x)
torch.fmax(w, x)
torch.fmin(w, x)
torch.max(w, x)
torch.min(w, x)
w * x
w.mul(3)
-w
w.negative()
w.nan_to_num()
torch.nan_to_num(w / 0, posinf=1.0, neginf=-1.0) + w
w.polygamma(1) * 0 + w
p.polygamma(1)
p ** 2
p ** -0.5
p ** x
2 ** w
10000 ** w
2.5 ** w
True + w
torch.pow(2, w)
torch.float_power(p, 2)
p.reciprocal()
w.relu()
w.round() + w
w.round(decimals=1) + w
p.rsqrt()
w.sigmoid()
w.sign() + w
w.sgn() + w
w.sin()
w.sinc()
w.sinh()
p.sqrt()
w.square()
w - x
3 - w
torch.rsub(w, x)
torch.sub(w, x, alpha=2)
w.tan()
w.tanh()
w.trunc() + w
w.fix() + w
torch.xlogy(w, p)
torch.special.entr(p)
torch.special.i0(w)
torch.special.i0e(w)
torch.special.i1(w)
torch.special.ndtr(w)
torch.special.log_ndtr(w)
torch.special.ndtri(w.sigmoid())
torch.special.xlog1py(w, p)
torch.special.erfcx(w)
torch.copysign(w, x)
torch.heaviside(w.detach(), x) + w
torch.ldexp(w, i[:, None])
torch.where(w > 0, w, x)
torch.where(b, w, x)
torch.where(b, w, torch.zeros(()))
torch.where(b, p.log(), -p)
torch.where(x > 0, x.sqrt() * w, w)
w.masked_fill(b, 0.0)
w.masked_fill(b, float("-inf")).softmax(0)
w.masked_fill(b[:1], 2.0)
w[0].masked_fill(b, 2.0)
w.masked_fill(b, torch.tensor(3.0))
torch.isclose(w, x) * w
w.isnan() * 1.0 + w
w.isinf().logical_not() * w
w.isfinite() * w
w.signbit() * w
(w > x) & (w < p) | b
(w > x) ^ b
~b * w
(i.bitwise_and(1) + i.bitwise_or(2) + i.bitwise_xor(3)).sum() * w
(i << 1).sum() * w + (i >> 1).sum()
torch.gcd(i, i + 2).sum() * w
i.remainder(3).sum() * w
i.float().double()[:, None] * w
w.to(torch.float32).double()
w.half().double() + w.bfloat16().double()
w.int().double() + w
w.long().sum() + w
w.type_as(x)
w.clone().add_(1).mul_(2).sub_(x).div_(p).pow_(2)
w.slice_scatter(x[:2], 0, 1, 5, 2)
w.clone().fill_(2.0) * w
w.clone().zero_() + w
w.clone().copy_(x) * w
w.clone().clamp_(-0.5, 0.5)
w.clone().masked_fill_(b, -1.0)
w.clone().addcmul_(x, p).lerp_(x, 0.5)
w.clone().neg_().abs_().sqrt_()
torch.nn.Parameter(w.data) * 0 + w
w.detach() * w
w.data * w
w.requires_grad_() * 1
w.frexp()[0]
torch.polar(w, x).real
torch.complex(w, x).abs()
w.as_strided((5, 2, 4), (4, 4, 1)) * 2
w.as_strided((2, 3, 4), (8, 4, 1)).transpose(1, 2)
(w * 1).t().as_strided((4, 2, 3), (1, 8, 4))
(w * 1).view(2, 3, 4).as_strided((5, 2, 4), (4, 4, 1))
torch.as_strided(w * p, (3, 1, 2), (8, 24, 2))
(w * 1).as_strided((4, 4), (5, 1))
torch.fft.rfft(w).abs()
torch.fft.fft2(w).real
torch.view_as_complex(w.reshape(6, 2, 2)).real
"""

ACTIVATIONS = """
F.celu(w)
F.elu(w)
F.elu(w, 0.7)
F.gelu(w)
F.gelu(w, approximate="tanh")
F.glu(w)
F.hardshrink(w)
F.hardsigmoid(w)
F.hardswish(w)
F.hardtanh(w)
F.leaky_relu(w, 0.2)
F.logsigmoid(w)
F.mish(w)
F.prelu(w, v)
F.prelu(w, v[:1])
F.relu6(w)
F.rrelu(w)
F.rrelu(w, training=True)
F.selu(w)
F.silu(w)
F.softmin(w, 1)
F.softplus(w)
F.softshrink(w)
F.softsign(w)
F.tanhshrink(w)
F.threshold(w, 0.1, 20)
F.softmax(w, 1)
F.log_softmax(w, 0)
F.gumbel_softmax(w)
F.gumbel_softmax(w, hard=True)
F.dropout(w, 0.5, training=False)
F.dropout(w, 0.0)
F.dropout(w, 1.0)
F.alpha_dropout(w, 0.5)
F.feature_alpha_dropout(img, 0.5)
F.normalize(w)
F.normalize(w, p=1, dim=0)
nn.Softmax2d()(img)
"""

REDUCTIONS = """
w.sum()
w.sum(0)
w.sum(1, keepdim=True)
w.sum((0, 1))
w.mean()
w.mean(1)
w.mean((0, 1), True)
w.prod()
w.prod(1)
p.prod(0)
w.amax(1)
w.amax((0, 1))
w.amin(0)
w.max()
w.max(1)[0]
w.max(1)
w.min()
w.min(0)[0]
w.argmax(1) + w.sum()
w.argmin() + w.sum()
w.median()
w.median(1)[0]
w.nanmedian()
w.mode(1)[0]
w.kthvalue(2, 1)[0]
w.quantile(0.3)
w.quantile(torch.tensor([0.2, 0.7]), 1)
w.nanquantile(0.3)
w.var()
w.var(1)
w.var(0, unbiased=False)
w.std()
w.std(1)
w.std((0, 1), unbiased=False)
torch.var_mean(w, 1)
torch.std_mean(w)
w.norm()
w.norm(1)
w.norm(2, 1)
w.norm(3, 1)
w.norm(float("inf"))
w.norm(float("inf"), 1)
w.norm(float("-inf"), 1)
w.norm(0, 1) + w.sum()
w.norm(p="fro", dim=(0, 1))
torch.linalg.norm(w)
torch.linalg.norm(w, ord="nuc")
torch.linalg.norm(w, ord=2)
torch.linalg.vector_norm(w, 3, 0)
torch.linalg.matrix_norm(w)
torch.linalg.matrix_norm(w, 1)
torch.linalg.matrix_norm(w, -2)
w.renorm(2, 0, 0.5)
w.dist(x)
w.logsumexp(1)
w.logsumexp((0, 1))
torch.logcumsumexp(w, 1)
w.cumsum(0)
w.cumsum(-1)
w.cumprod(1)
p.cumprod(1)
w.cummax(0)[0]
w.cummin(1)[0]
w.nansum()
w.nanmean(1)
w.all() + w
w.any(1)[:, None] + w
torch.count_nonzero(w) + w
w.trace()
s.trace()
w.diff()
torch.trapezoid(w)
torch.trapz(w, x)
torch.cumulative_trapezoid(w)
torch.cov(w)
torch.corrcoef(w)
torch.histc(w.detach()) .sum() + w
torch.bincount(i).sum() + w
w.topk(2)[0]
w.topk(2, largest=False, sorted=True)[0]
w.sort(1)[0]
w.sort(0, descending=True)[0]
w.sort(stable=True)[0]
w.msort()
w.argsort(1) + w
torch.searchsorted(x.sort(1)[0].contiguous(), w.detach().contiguous()) + w
torch.bucketize(w.detach(), x[0].sort()[0]) + w
torch.unique(i).sum() + w
"""

LINEAR = """
w.t() @ x
torch.matmul(w, x.t())
torch.mm(w, s)
torch.mv(s, v)
torch.dot(v, v)
torch.vdot(v, buf)
torch.inner(w, x)
torch.outer(v, v)
torch.ger(v, v)
torch.addmm(x, w, s)
torch.addmm(x, w, s, beta=0.5, alpha=2)
torch.addmv(v, s, v)
torch.addr(s, v, v)
torch.bmm(w[:, :, None], x[:, None])
torch.baddbmm(s[None], w[:, :, None], x[:, None])
torch.addbmm(s, w[:, :, None], x[:, None])
torch.chain_matmul(w, s, s)
torch.linalg.multi_dot([w, s, s])
torch.einsum("bi,bj->ij", w, x)
torch.einsum("bi,ij,bj->b", w, s, x)
torch.einsum("...i,ij->...j", img, torch.cat([s, s])) 
torch.tensordot(w, x, dims=([0], [0]))
torch.kron(v, s)
torch.cross(w[:, :3], x[:, :3], dim=1)
torch.linalg.cross(w[:, :3], x[:, :3])
torch.cartesian_prod(v, v)
torch.combinations(v)
torch.block_diag(s, s)
torch.cdist(w, x)
torch.cdist(w, x, p=1)
torch.cdist(w, x, compute_mode="donot_use_mm_for_euclid_dist")
torch.cdist(w[None], x[None], p=3)
torch.cdist(w.repeat(6, 1), x.repeat(6, 1))
F.pdist(w)
F.cosine_similarity(w, x)
F.pairwise_distance(w, x)
F.linear(w, s, v)
F.bilinear(w, x, s[None].repeat(2, 1, 1))
F.bilinear(w, x, s[None])
torch.det(s)
torch.det(f)
torch.det(s.t())
torch.det(s @ s)
torch.slogdet(s)[1]
torch.slogdet(f)[1]
torch.linalg.slogdet(s.t())[1]
torch.linalg.slogdet((s @ s).t())[1]
torch.logdet(d)
torch.logdet(d.t())
torch.det(torch.stack([s, s.t(), d]))
torch.det(torch.stack([s, s.t(), d]).transpose(1, 2))
torch.linalg.slogdet(torch.stack([s, d], -1).permute(2, 0, 1))[1]
torch.inverse(s)
torch.inverse(f)
torch.linalg.inv(s.t())
torch.linalg.solve(s, v)
torch.linalg.solve(f, x.t())
torch.linalg.solve(s.t(), x.t())
torch.linalg.solve(s, w, left=False)
torch.linalg.solve(s.t(), w, left=False)
torch.linalg.tensorsolve(s.reshape(2, 2, 4), v.reshape(2, 2))
torch.linalg.tensorinv(s.reshape(4, 2, 2), ind=1)
torch.linalg.solve_triangular(s.tril() + torch.eye(4), x.t(), upper=False)
torch.linalg.solve_triangular(s.triu().t() + torch.eye(4), x.t(), upper=False)
torch.triangular_solve(x.t(), s.triu() + torch.eye(4))[0]
torch.linalg.cholesky(d)
torch.linalg.cholesky(d, upper=True)
torch.linalg.cholesky(d.t())
torch.cholesky(d)
torch.cholesky_solve(x.t(), torch.linalg.cholesky(d))
torch.cholesky_inverse(torch.linalg.cholesky(d))
torch.linalg.qr(w)[1]
torch.linalg.qr(s)[0].abs()
torch.linalg.qr(s.t())[0].abs()
torch.linalg.qr(w, mode="complete")[1].detach() .sum() + w
torch.linalg.svdvals(w)
torch.linalg.svd(w, full_matrices=False)[0].abs()
torch.svd(w)[1]
torch.linalg.eigvalsh(d)
torch.linalg.eigh(d)[1].abs()
torch.linalg.eigh(d.t())[0]
torch.linalg.eigvals(s).abs()
torch.linalg.lstsq(w, x).solution
torch.linalg.pinv(w)
torch.linalg.pinv(s.t())
torch.linalg.pinv(d, hermitian=True)
torch.linalg.matrix_power(s, 3)
torch.linalg.matrix_power(s, -1)
torch.matrix_exp(s)
torch.matrix_exp(f)
torch.linalg.matrix_exp(s.t())
torch.linalg.lu(s)[2]
torch.linalg.lu(s.t())[1]
torch.lu(s)[0]
torch.linalg.lu_factor(s)[0]
torch.linalg.lu_factor(f)[0]
torch.lu_solve(x.t(), *torch.linalg.lu_factor(s))
torch.linalg.lu_solve(*torch.linalg.lu_factor(s.t()), x.t())
torch.linalg.lu_solve(*torch.linalg.lu_factor(s), w, left=False)
torch.linalg.lu_solve(*torch.linalg.lu_factor(s), x.t(), adjoint=True)
torch.linalg.matrix_rank(s.detach()) + w
torch.linalg.cond(s)
torch.linalg.householder_product(w, v)
torch.linalg.vecdot(w, x)
torch.geqrf(w)[0].detach().sum() + w
torch.lobpcg(d)[0] + w.sum()
torch.trapz(w)
"""

GROUPS = {
    "pointwise": POINTWISE,
    "activations": ACTIVATIONS,
    "reductions": REDUCTIONS,
    "linear": LINEAR,
    "shapes": SHAPES,
    "layers": LAYERS,
    "modules": MODULES,
    "losses": LOSSES,
}


def expressions(group):
    return [line.strip() for line in GROUPS[group].strip().splitlines()]
