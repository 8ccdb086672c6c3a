"""Functions of torch that shape, index, make and draw tensors; see functions.py."""

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
