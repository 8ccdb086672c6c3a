"""Functions of torch as models call them: expressions of the tensors below, which test_capture_functions.py captures.

x and y are inputs (6, 4), i integers (6,) below 4, b booleans (6, 4). The rest are parameters: w (6, 4), p positive (6, 4),
s (4, 4) well conditioned, f the same with columns in memory order, d positive definite, v (4,), img (2, 3, 8, 8),
sig (2, 3, 10), vol (1, 2, 4, 6, 6), and buf a buffer (4,).
"""

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

SHAPES = """
w.view(4, 6)
w.reshape(2, 12)
w.t().reshape(-1)
w.flatten()
w.ravel()
w.unflatten(1, (2, 2))
w.unsqueeze(1).squeeze()
w.permute(1, 0)
w.transpose(0, 1).contiguous()
w.T
w.mT
w.movedim(0, 1)
w.swapaxes(0, 1)
img.movedim(1, -1).flatten(2)
w.expand(3, 6, 4)
w[:1].expand(5, -1)
w.expand_as(img[0, 0, :6, :4])
w.repeat(2, 1, 2)
w.repeat(1, 0) .sum() + w
w.tile(2)
w.repeat_interleave(2, 0)
w.repeat_interleave(3)
w.repeat_interleave(torch.tensor([1, 2, 0, 1, 1, 1]), 0)
w.chunk(3)[1]
w.split(4)[1]
w.split([1, 2, 3])[2]
w.tensor_split(4)[3]
torch.hsplit(w, 2)[1]
torch.vsplit(w, 2)[0]
w.unbind(1)[2]
w.narrow(1, 1, 2)
w.select(1, 2)
w[2]
w[-1, 1:3]
w[1:5:2]
w[..., 1]
w[None, :, None]
w[:, [0, 2]]
w[[0, 2]]
w[[0, 2], [1, 3]]
w[:, torch.tensor([3, 0, 0])]
w[:, [[0], [1]]]
w[[[0, 1], [1, 2]]]
w[[]]
w[:, [True, False, True, True]]
w[range(3)]
w[numpy.array([1, 2])]
w[:, numpy.array([True, False, True, True])]
w[True]
w.clone().__setitem__(([0, 1], slice(None)), 0.0) or w
w[i]
w[i, i]
w[:, i]
w[i][:, i]
img[:, [0, 2], 1:3, [1, 1]]
img[:, i[1:4] % 3, i[:3]]
img[[0, 1], :, :, i[:2]]
w[torch.tensor([True, False, True, True, False, False])]
w[b]
w[w > 0]
w[x[:, 0] > 0]
torch.masked_select(w, b)
w[torch.arange(6), i]
w[torch.arange(6)[:, None], torch.tensor([1, 2])]
w.gather(1, i[:, None])
torch.take(w, i)
torch.take_along_dim(w, i[:, None], 1)
w.index_select(1, i)
w.index_add(0, i, x)
w.index_copy(0, torch.arange(6).flip(0), x)
w.index_fill(0, i[:1], 2.0)
w.index_put((i,), x)
w.index_put((i,), x, accumulate=True)
w.clone().index_put_((i, i), v[0], accumulate=True)
torch.index_reduce(w, 0, i, x, "prod")
w.scatter(1, i[:, None], 2.0)
w.scatter(1, i[:, None], x)
w.scatter_add(1, i[:, None], x)
w.scatter_reduce(0, i[:, None].expand(6, 4), x, "amax")
w.scatter_reduce(0, i[:, None].expand(6, 4), x, "mean", include_self=False)
w.scatter_reduce(0, i[:, None].expand(6, 4), x, "sum")
w.masked_scatter(b, x)
w.select_scatter(v, 0, 2)
w.diagonal_scatter(v)
w.diagonal()
w.diagonal(1)
img.diagonal(dim1=2, dim2=3)
torch.diag(v)
torch.diag(s, 1)
torch.diag_embed(w)
torch.diagflat(v)
w.tril()
w.triu(1)
w.clone().fill_diagonal_(0.0)
(w @ x.t()).fill_diagonal_(0)
w.repeat(3, 1).fill_diagonal_(1.0, wrap=True)
torch.diagonal(w.t() @ x).add_(-1)
w.flip(0)
w.fliplr()
w.flipud()
w.rot90()
w.roll(1)
w.roll((1, 2), (0, 1))
torch.cat([w, x])
torch.cat([w, x, w], 1)
torch.concat((w, x), -1)
torch.stack([w, x], 1)
torch.hstack([w, x])
torch.vstack([w, x])
torch.dstack([w, x])
torch.column_stack([w, x])
torch.broadcast_to(v, (6, 4))
torch.broadcast_tensors(v, w)[0]
torch.atleast_3d(w)
torch.meshgrid(v, v, indexing="ij")[0]
torch.tril_indices(4, 4).sum() + w
s[torch.tril_indices(4, 4)[0], torch.tril_indices(4, 4)[1]]
s[tuple(torch.triu_indices(4, 4, 1))]
torch.combinations(v, 2)
w.as_strided((3, 4), (4, 1))
w.as_strided((4,), (5,))
w.as_strided((4, 3, 2), (4, 4, 1)) 
sig.as_strided((2, 3, 4, 3), (30, 10, 2, 1))
sig.as_strided((2, 3, 8, 3), (30, 10, 1, 1))
sig.unfold(2, 4, 2)
sig.unfold(2, 3, 1)
w.view_as(x.reshape(6, 4))
w.unsqueeze(0).squeeze(0)
w.view(torch.int64).sum() + w
w.new_zeros(3).sum() + w
w.new_full((2,), 3.0).sum() + w
w.new_tensor([1.0, 2.0]).sum() + w
w.new_ones(4) * w
torch.zeros_like(w) + w
torch.ones_like(w) * w
torch.full_like(w, 0.5) * w
torch.empty_like(w).fill_(1.0) * w
torch.arange(4) * w
torch.arange(0.0, 1.0, 0.25) * w
torch.linspace(0, 1, 4) * w
torch.logspace(0, 1, 4) * w
torch.eye(4) * s
torch.eye(6, 4) * w
torch.tensor([1.0, 2.0, 3.0, 4.0]) * w
torch.tensor(3.0) * w
torch.tensor([[True, False, True, False]]) * w
torch.as_tensor([1.0, 2.0, 3.0, 4.0]) * w
torch.from_numpy(numpy.arange(4.0)) * w
torch.full((4,), 2.0) * w
torch.full((4,), 7) / 2 * w
torch.full((4,), 7) // 2 * w
~torch.full((4,), True) * w
torch.full((6, 1), 2).expand(6, 2).gather(1, torch.full((6, 1), 1)) * w
torch.full_like(i, 7).sum() * w
torch.arange(7, 3, -1) // 2 * w
torch.arange(0, 4, dtype=torch.float32).double() * w
torch.linspace(0, 3, 4, dtype=torch.int64) * w
torch.zeros(4, dtype=torch.bool).logical_not() * w
torch.scalar_tensor(7) * w
torch.hann_window(4) * w
torch.randperm(6).sum() * 0 + w
w[torch.randperm(6)].sum(0)
w.gather(1, torch.multinomial(p.detach(), 1)) * 0
torch.bernoulli(w.detach().sigmoid()) * 0 + w
torch.poisson(p.detach()) * 0 + w
torch.normal(w.detach(), 1.0) * 0 + w
torch.normal(0.0, 1.0, (6, 4)) * 0 + w
torch.empty(6, 4).exponential_() * 0 + w
torch.empty(6, 4).log_normal_() * 0 + w
torch.empty(6, 4).cauchy_() * 0 + w
torch.empty(6, 4).geometric_(0.5) * 0 + w
torch.empty(6, 4).bernoulli_(0.5) * 0 + w
torch.empty(6, 4).normal_() * 0 + w
torch.empty(6, 4).uniform_() * 0 + w
torch.randn_like(w) * 0 + w
torch.rand(6, 4, generator=torch.Generator()) * 0 + w
torch.randint(0, 4, (6, 4)) * 0 + w
w[:, torch.randint(0, 4, (2,))] * 0
nn.init.normal_(torch.empty(6, 4)) * 0 + w
torch.distributions.Normal(w, p).rsample() * 0 + w
torch.distributions.Normal(w, p).log_prob(x)
torch.distributions.Categorical(logits=w).log_prob(i)
torch.distributions.Categorical(logits=w).entropy()
torch.distributions.Categorical(logits=w).sample() * 0 + w.sum()
torch.distributions.kl_divergence(torch.distributions.Normal(w, p), torch.distributions.Normal(x, 1.0))
torch.distributions.Bernoulli(logits=w).log_prob(b.double())
torch.distributions.MultivariateNormal(v, d).log_prob(x)
torch.distributions.Dirichlet(p).log_prob(x.softmax(1))
torch.distributions.Beta(p, p).log_prob(x.sigmoid())
torch.distributions.Gamma(p, p).rsample() * 0 + w
torch.distributions.Laplace(w, p).log_prob(x)
torch.distributions.StudentT(p).log_prob(x)
torch.distributions.VonMises(w, p).log_prob(x)
torch.distributions.RelaxedOneHotCategorical(0.5, logits=w).rsample() * 0 + w
w.sum().item() * w
w if w.sum() > 0 else -w
float(w[0, 0]) * w
w.tolist()[0][0] * w
torch.nonzero(w).sum() + w
torch.is_nonzero(w[0, 0]) * w
torch.equal(w, w) * w
torch.allclose(w, w) * w
len(w) * w
w.numel() * w
w.is_contiguous() * w
w.stride(0) * w
w.t().is_contiguous() * w
w.shape[0] * w
torch.sparse_coo_tensor([[0, 1], [1, 2]], [1.0, 2.0], (6, 6)) @ w
torch.eye(6).to_sparse() @ w
torch.sparse.mm(torch.eye(6).to_sparse(), w)
(w.float().softmax(1) + x.float()).double()
torch.fake_quantize_per_tensor_affine(w, 0.1, 0, -128, 127)
torch.vmap(lambda r: r * 2)(w) if hasattr(torch, "vmap") else w
functorch.vmap(lambda r: (r * v).sum())(w)
torch.utils.checkpoint.checkpoint(torch.tanh, w)
torch.utils.checkpoint.checkpoint(torch.tanh, w, use_reentrant=False)
"""

LAYERS = """
F.conv1d(sig, sig[:, :, :3])
F.conv1d(sig, sig[:1, :1, :3].repeat(3, 1, 1), groups=3, padding="same")
F.conv2d(img, img[:, :, :3, :3], v[:2])
F.conv2d(img, img[:, :, :3, :3], stride=2, padding=1, dilation=2)
F.conv2d(img[0], img[:, :, :3, :3])
F.conv2d(img.to(memory_format=torch.channels_last), img[:, :, :3, :3])
F.conv3d(vol, vol[:, :, :2, :2, :2])
F.conv_transpose1d(sig, sig[:1, :, :3].transpose(0, 1))
F.conv_transpose2d(img, img[:1, :, :3, :3].transpose(0, 1), stride=2, output_padding=1)
F.conv_transpose3d(vol, vol[:, :, :2, :2, :2].transpose(0, 1))
F.avg_pool1d(sig, 2)
F.avg_pool2d(img, 2)
F.avg_pool2d(img, 3, 2, 1, count_include_pad=False)
F.avg_pool3d(vol, 2)
F.max_pool1d(sig, 2)
F.max_pool1d(sig, 3, 2, 1)
F.max_pool2d(img, 2)
F.max_pool2d(img, 3, 2, 1, ceil_mode=True)
F.max_pool2d(img, 2, return_indices=True)[0]
F.max_pool3d(vol, (1, 2, 2))
F.max_unpool2d(*F.max_pool2d(img, 2, return_indices=True), 2)
F.max_unpool1d(*F.max_pool1d(sig, 2, return_indices=True), 2)
F.adaptive_avg_pool1d(sig, 4)
F.adaptive_avg_pool2d(img, 1)
F.adaptive_avg_pool2d(img, (3, 5))
F.adaptive_avg_pool3d(vol, 2)
F.adaptive_avg_pool3d(vol, 1)
F.adaptive_max_pool1d(sig, 4)
F.adaptive_max_pool2d(img, (3, 5))
F.adaptive_max_pool3d(vol, 2)
F.fractional_max_pool2d(img, 2, output_size=3) * 0 + img.sum()
F.lp_pool1d(sig, 2, 2)
F.lp_pool2d(img, 2, 2)
F.pad(w, (1, 2))
F.pad(w, (1, 2, 0, 1), value=2.0)
F.pad(w, (-1, 1))
F.pad(sig, (2, 1), "reflect")
F.pad(img, (1, 1, 2, 0), "reflect")
F.pad(vol, (1, 1, 1, 1, 1, 1), "reflect")
F.pad(sig, (2, 1), "replicate")
F.pad(img, (1, 1, 2, 0), "replicate")
F.pad(vol, (1, 1, 1, 1, 1, 1), "replicate")
F.pad(sig, (2, 1), "circular")
F.pad(img, (1, 1, 2, 0), "circular")
nn.ReflectionPad2d(1)(img)
nn.ZeroPad2d(1)(img)
F.unfold(img, 3)
F.unfold(img, 2, stride=2)
F.fold(F.unfold(img, 2, stride=2), (8, 8), 2, stride=2)
F.fold(F.unfold(img, 3, padding=1), (8, 8), 3, padding=1)
F.pixel_shuffle(img[:, :1].repeat(1, 4, 1, 1), 2)
F.pixel_unshuffle(img, 2)
F.interpolate(img, scale_factor=2)
F.interpolate(img, size=(5, 6), mode="bilinear")
F.interpolate(img, scale_factor=2, mode="bilinear", align_corners=True)
F.interpolate(img, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True)
F.interpolate(img, scale_factor=0.5, mode="area")
F.interpolate(img, size=5, mode="bicubic")
F.interpolate(img, size=5, mode="bilinear", antialias=True)
F.interpolate(img, size=5, mode="nearest-exact")
F.interpolate(sig, size=15, mode="linear")
F.interpolate(sig, scale_factor=2)
F.interpolate(vol, scale_factor=2)
F.interpolate(vol, size=(3, 4, 5), mode="trilinear")
F.upsample(img, scale_factor=2)
F.grid_sample(img, x.tanh()[:4].reshape(2, 2, 2, 2), align_corners=False)
F.grid_sample(img, w.tanh()[:4].reshape(2, 2, 2, 2), mode="nearest", align_corners=True) + img.sum()
F.grid_sample(img, w.tanh()[:4].reshape(2, 2, 2, 2), padding_mode="reflection", align_corners=False)
F.grid_sample(vol, w.tanh().reshape(1, 2, 2, 2, 3), align_corners=False)
F.affine_grid(w.reshape(4, 2, 3), (4, 1, 3, 3), align_corners=False)
F.grid_sample(img, F.affine_grid(w[:3].reshape(2, 2, 3), (2, 3, 4, 4), align_corners=False), align_corners=False)
F.layer_norm(w, (4,), v, buf)
F.layer_norm(w, (4,))
F.layer_norm(w, (6, 4))
F.batch_norm(w, None, None, training=True)
F.batch_norm(w, None, None, v, v, training=True)
F.batch_norm(img, torch.zeros(3), torch.ones(3), training=False)
nn.BatchNorm2d(3, affine=False)(img)
F.instance_norm(img)
F.instance_norm(img, weight=v[:3], bias=v[:3])
F.instance_norm(sig)
F.group_norm(img, 3)
F.group_norm(img, 1, v[:3], v[:3])
F.group_norm(w, 2)
F.local_response_norm(img, 2)
F.embedding(i, w)
F.embedding(i, w, padding_idx=0)
F.embedding(i, w, scale_grad_by_freq=True)
F.embedding(i, w, max_norm=0.5)
F.embedding_bag(i[None], w)
F.embedding_bag(i[None].repeat(2, 1), w, mode="sum")
F.embedding_bag(i[None].repeat(2, 1), w, mode="max")
F.embedding_bag(i, w, torch.tensor([0, 2]), mode="mean")
F.embedding_bag(i[None], w, mode="sum", per_sample_weights=x[:1, :1].expand(1, 6))
F.embedding_bag(i[None], w, mode="sum", padding_idx=0)
F.one_hot(i) * w
nn.utils.rnn.pad_sequence([w[:2], w[:4]])
nn.Flatten()(img)
nn.Unflatten(1, (2, 2))(w)
nn.Identity()(w)
nn.PixelShuffle(1)(img)
nn.CosineSimilarity()(w, x)
nn.Upsample(scale_factor=2)(img)
nn.Fold((4, 4), 2, stride=2)(img.reshape(2, 96, 2)[:, :48].reshape(2, 24, 4))
"""

# A module k that the model has, and what it is called with.
MODULES = """
nn.MultiheadAttention(4, 2, batch_first=True) -> k(w[None], w[None], w[None])[0]
nn.BatchNorm1d(4) -> k(w)
nn.BatchNorm3d(2) -> k(vol)
nn.RNN(4, 3) -> k(w[None])[0]
nn.LSTM(4, 3, bidirectional=True) -> k(w[None])[0]
nn.GRU(4, 3, num_layers=2) -> k(w[None])[0]
nn.LSTM(4, 3, proj_size=2) -> k(w[None])[0]
nn.LSTMCell(4, 3) -> k(w)[0]
nn.GRUCell(4, 3) -> k(w)
nn.RNN(4, 3) -> k(nn.utils.rnn.pack_padded_sequence(w[:, None].repeat(1, 2, 1), torch.tensor([6, 4])))[0].data
nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) -> k(w[None])
nn.TransformerEncoderLayer(4, 2, 8, 0.0) -> k(w[:, None], src_mask=nn.Transformer.generate_square_subsequent_mask(6).double())
nn.TransformerEncoderLayer(4, 2, 8, 0.0) -> k(w[:, None], src_mask=nn.Transformer.generate_square_subsequent_mask(6).double(), src_key_padding_mask=b[None, :, 0] & False)
nn.TransformerDecoderLayer(4, 2, 8, 0.0) -> k(w[:, None], x[:, None], tgt_mask=nn.Transformer.generate_square_subsequent_mask(6).double())
nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)) -> k(w)
nn.utils.weight_norm(nn.Linear(4, 4)) -> k(w)
nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)) -> k(w)
nn.Bilinear(4, 4, 3) -> k(w, x)
nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6]) -> k(w, i).loss
nn.BatchNorm1d(4, momentum=None) -> k(w)
nn.BatchNorm2d(3, track_running_stats=False) -> k(img)
nn.InstanceNorm2d(3, affine=True, track_running_stats=True) -> k(img)
nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True) -> k(w[None], x[None])
nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=True), 2) -> k(w[None], src_key_padding_mask=b[None, :, 0] & (i[None] > 9))
nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) -> k(w.reshape(2, 3, 4), src_mask=nn.Transformer.generate_square_subsequent_mask(3), src_key_padding_mask=i.reshape(2, 3) > 2)
nn.MultiheadAttention(4, 2, bias=False, add_zero_attn=True) -> k(w[:, None], x[:, None], x[:, None], need_weights=True)[1]
nn.ConvTranspose2d(3, 4, 3, 2) -> k(img)
nn.Conv2d(3, 6, 3, groups=3, padding_mode="reflect", padding=1) -> k(img)
nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular") -> k(img)
nn.Conv3d(2, 3, 2) -> k(vol)
nn.LSTM(4, 3, batch_first=True) -> k(w.reshape(2, 3, 4))[1][0]
nn.RNNCell(4, 3, nonlinearity="relu") -> k(w)
nn.EmbeddingBag(4, 3, mode="mean") -> k(i.reshape(2, 3)) + w.sum()
nn.Embedding(4, 3, padding_idx=1) -> k(i) + w.sum()
nn.PReLU(4) -> k(w)
nn.LayerNorm((6, 4)) -> k(w)
nn.GroupNorm(3, 3) -> k(img)
nn.LocalResponseNorm(2) -> k(img)
nn.CrossMapLRN2d(2) -> k(img)
"""

LOSSES = """
F.l1_loss(w, x)
F.l1_loss(w, x, reduction="sum")
F.mse_loss(w, x)
F.mse_loss(w, x, reduction="none")
F.smooth_l1_loss(w, x)
F.smooth_l1_loss(w, x, beta=0.5, reduction="sum")
F.huber_loss(w, x, delta=0.5)
F.cross_entropy(w, i)
F.cross_entropy(w, i, reduction="sum")
F.cross_entropy(w, i, reduction="none")
F.cross_entropy(w, i, weight=buf.abs())
F.cross_entropy(w, i, ignore_index=1)
F.cross_entropy(w, i, label_smoothing=0.1)
F.cross_entropy(w, i, label_smoothing=0.1, ignore_index=1)
F.cross_entropy(w, i, label_smoothing=0.1, weight=buf.abs())
F.cross_entropy(w, i, label_smoothing=0.1, reduction="none")
F.cross_entropy(w, x.softmax(1))
F.cross_entropy(w, x.softmax(1), label_smoothing=0.2)
F.cross_entropy(w.reshape(2, 3, 4).transpose(1, 2), i.reshape(2, 3))
F.cross_entropy(img, i[:1].reshape(1, 1, 1).clamp(max=2).expand(2, 8, 8))
F.nll_loss(w.log_softmax(1), i)
F.nll_loss(w.log_softmax(1), i, weight=buf.abs(), reduction="sum")
F.binary_cross_entropy(w.sigmoid(), b.double())
F.binary_cross_entropy(w.sigmoid(), b.double(), weight=buf.abs())
F.binary_cross_entropy_with_logits(w, b.double())
F.binary_cross_entropy_with_logits(w, b.double(), pos_weight=buf.abs())
F.binary_cross_entropy_with_logits(w, b.double(), weight=buf.abs(), reduction="sum")
F.kl_div(w.log_softmax(1), x.softmax(1), reduction="batchmean")
F.kl_div(w.log_softmax(1), x.log_softmax(1), log_target=True)
F.poisson_nll_loss(w, x.abs())
F.poisson_nll_loss(w, x.abs(), full=True)
F.gaussian_nll_loss(w, x, p)
F.gaussian_nll_loss(w, x, p, full=True, reduction="sum")
F.hinge_embedding_loss(w, b.double() * 2 - 1)
F.margin_ranking_loss(w, x, b.double() * 2 - 1)
F.multi_margin_loss(w, i)
F.multilabel_margin_loss(w, i[:, None].repeat(1, 4))
F.multilabel_soft_margin_loss(w, b.double())
F.soft_margin_loss(w, b.double() * 2 - 1)
F.cosine_embedding_loss(w, x, b[:, 0].double() * 2 - 1)
F.triplet_margin_loss(w, x, p)
F.triplet_margin_with_distance_loss(w, x, p)
F.ctc_loss(w[:, None].repeat(1, 2, 1).log_softmax(-1), torch.tensor([[1, 2], [3, 1]]), torch.tensor([6, 6]), torch.tensor([2, 1]))
F.ctc_loss(w[:, None].repeat(1, 2, 1).log_softmax(-1), i[:4].reshape(2, 2).clamp(min=1), torch.full((2,), 6), torch.full((2,), 2))
F.ctc_loss(w[:, None].repeat(1, 2, 1).log_softmax(-1), i[:4].reshape(2, 2).clamp(min=1), (6, 6), (2, 2), reduction="sum")
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
