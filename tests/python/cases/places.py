"""Places and positions: what is repeated, shifted, resized or put together from windows."""

import torch
import torch.nn.functional as F
from torch import nn

from cases.blocks import Of
from corpus import case


@case()
def repeated_for_each_sample():
    """Slopes of heads (Bloom) and positions (DeBERTa), as often as there are samples and heads."""

    def forward(m, x):
        samples, heads, length = x.shape[0], 2, 4
        q, k, v = m.project(x).view(samples, length, 3, heads, 3).permute(2, 0, 3, 1, 4).reshape(3, samples * heads, length, 3)
        slopes = (torch.arange(1, heads + 1)[:, None, None] * 0.5 * torch.arange(length)).repeat(samples, 1, 1)
        places = m.places(m.table).view(length, heads, 3).transpose(0, 1).repeat(samples, 1, 1)
        weights = (torch.baddbmm(slopes.to(x.dtype), q, k.transpose(1, 2)) + torch.bmm(q, places.transpose(1, 2))).softmax(-1)
        mixed = torch.bmm(weights, v).view(samples, heads, length, 3).transpose(1, 2).reshape(samples, length, 6)
        return m.head(mixed.mean(1))

    model = Of(forward, project=nn.Linear(6, 18), places=nn.Linear(5, 6), head=nn.Linear(6, 6))
    model.table = nn.Parameter(torch.randn(4, 5))
    return model, F.cross_entropy, lambda g: (torch.randn(12, 4, 6, generator=g), torch.randint(6, (12,), generator=g))


@case()
def windows_that_overlap():
    """im2col and back (ConvBERT, Performer's and T2T's tokens)."""

    def forward(m, x):
        windows = F.unfold(x, 3, padding=1)  # [samples, channels * 9, places]
        mixed = m.mix(windows.transpose(1, 2)).transpose(1, 2)
        return m.head(F.fold(mixed, (4, 4), 3, padding=1).flatten(1))

    head = nn.Sequential(nn.Linear(48, 160), nn.ReLU(), nn.Linear(160, 6))
    model = Of(forward, mix=nn.Linear(27, 27), head=head)
    return model, F.cross_entropy, lambda g: (torch.randn(12, 3, 4, 4, generator=g), torch.randint(6, (12,), generator=g))


@case()
def scores_shifted_by_position():
    """index_select along positions (XLNet's relative attention)."""

    def forward(m, x):
        q, places = m.q(x), m.places(m.table)
        scores = torch.einsum("bid,jd->bij", q, places)
        scores = torch.index_select(scores, 2, (torch.arange(5) + 2) % 7)
        return m.head((scores.softmax(-1) @ x).mean(1))

    model = Of(forward, q=nn.Linear(6, 6), places=nn.Linear(5, 6), head=nn.Linear(6, 6))
    model.table = nn.Parameter(torch.randn(7, 5))
    return model, F.cross_entropy, lambda g: (torch.randn(12, 5, 6, generator=g), torch.randint(6, (12,), generator=g))


@case()
def volumes_and_borders():
    """Pools of volumes, borders by reflection, resizing and sampling at learnt places."""

    def forward(m, x):
        x = F.pad(x, [1] * 6, mode="replicate")  # [samples, channels, 4, 4, 4]
        x = F.avg_pool3d(m.first(x), 2) + F.max_pool3d(m.first(x), 2)
        x = F.interpolate(x, scale_factor=2, mode="trilinear").mean(2)
        x = F.pad(x, [1, 1, 1, 1], mode="reflect")
        x = F.interpolate(x, size=(5, 5), mode="bicubic")
        grid = torch.tanh(m.places).expand(x.shape[0], 3, 3, 2)
        x = F.grid_sample(x, grid, align_corners=False)
        return m.head(x.unfold(2, 2, 1).mean(2).flatten(1))

    head = nn.Sequential(nn.Linear(24, 160), nn.ReLU(), nn.Linear(160, 6))
    model = Of(forward, first=nn.Conv3d(2, 4, 3, padding=1), head=head)
    model.places = nn.Parameter(torch.randn(3, 3, 2))
    return model, F.cross_entropy, lambda g: (torch.randn(12, 2, 2, 2, 2, generator=g), torch.randint(6, (12,), generator=g))


@case()
def places_mixed_by_fourier():
    """FNet; and a filter by frequency."""

    def forward(m, x):
        x = m.norm(x + torch.fft.fftn(x, dim=(1, 2)).real)
        frequencies = torch.fft.rfft(m.deep(x), dim=1, norm="ortho") * m.filter
        return m.head((x + torch.fft.irfft(frequencies, x.shape[1], dim=1, norm="ortho")).mean(1))

    model = Of(forward, norm=nn.LayerNorm(6), deep=nn.Linear(6, 6), head=nn.Linear(6, 6))
    model.filter = nn.Parameter(torch.randn(4, 1))
    return model, F.cross_entropy, lambda g: (torch.randn(12, 7, 6, generator=g), torch.randint(6, (12,), generator=g))


@case()
def windows_of_memory():
    """Longformer: keys in windows that overlap."""

    def forward(m, x):
        samples, length, width = x.shape
        q, k = m.q(x).view(samples, length // 4, 4, width), m.k(x)
        windows = F.pad(k, (0, 0, 2, 2))
        s, l, h = windows.stride()
        windows = windows.as_strided((samples, length // 4, 8, width), (s, 4 * l, l, h))
        mixed = torch.einsum("bcid,bcjd->bcij", q, windows).softmax(-1) @ windows
        return m.head(mixed.flatten(1, 2).mean(1))

    model = Of(forward, q=nn.Linear(6, 6), k=nn.Linear(6, 6), head=nn.Linear(6, 6))
    return model, F.cross_entropy, lambda g: (torch.randn(12, 8, 6, generator=g), torch.randint(6, (12,), generator=g))


@case()
def matrices_of_samples():
    """Solved, decomposed and measured for each sample."""

    def forward(m, x):
        square = x.mT @ m.mix(x) + 8 * torch.eye(6)
        solved = torch.linalg.solve(square, m.side(x).mT)
        near = torch.cdist(x, m.side(x))
        features = torch.cat([solved.mean(2), near.mean(2), torch.linalg.slogdet(square)[1][:, None], torch.linalg.inv(square).diagonal(dim1=1, dim2=2)], 1)
        return m.head(features)

    model = Of(forward, mix=nn.Linear(6, 6), side=nn.Linear(6, 6), head=nn.Linear(6 + 5 + 1 + 6, 6))
    return model, F.cross_entropy, lambda g: (torch.randn(12, 5, 6, generator=g), torch.randint(6, (12,), generator=g))
