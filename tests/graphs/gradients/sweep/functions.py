"""Functions of `torch` that networks are made of, each between a trainable scale and a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from .case import layer


def _spd(x: torch.Tensor) -> torch.Tensor:
    return x @ x.transpose(-1, -2) + 3 * torch.eye(x.shape[-1])


FUNCTIONS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = [
    ("inv", lambda x: torch.linalg.inv(_spd(x)), (3, 3)),
    ("solve", lambda x: torch.linalg.solve(_spd(x), x), (3, 3)),
    ("cholesky", lambda x: torch.linalg.cholesky(_spd(x)), (3, 3)),
    ("det", lambda x: torch.linalg.det(_spd(x)), (3, 3)),
    ("logdet", lambda x: torch.logdet(_spd(x)), (3, 3)),
    ("slogdet", lambda x: torch.linalg.slogdet(_spd(x)).logabsdet, (3, 3)),
    ("solve_triangular", lambda x: torch.linalg.solve_triangular(torch.tril(_spd(x)), x, upper=False), (3, 3)),
    ("cholesky_solve", lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(_spd(x))), (3, 3)),
    ("pinv", lambda x: torch.linalg.pinv(_spd(x)), (3, 3)),
    ("matrix_exp", lambda x: torch.linalg.matrix_exp(x * 0.1), (3, 3)),
    ("matrix_power", lambda x: torch.linalg.matrix_power(x, 3), (3, 3)),
    ("vector_norm", lambda x: torch.linalg.vector_norm(x, 3, -1), (3, 4)),
    ("rfft", lambda x: torch.view_as_real(torch.fft.rfft(x)), (3, 8)),
    ("rfft odd", lambda x: torch.view_as_real(torch.fft.rfft(x, norm="ortho")), (3, 7)),
    ("rfft abs", lambda x: torch.fft.rfft(x).abs(), (3, 8)),
    ("irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1]), (3, 8)),
    ("fft of real part", lambda x: torch.fft.fft2(x).real, (4, 6)),
    ("fft and back", lambda x: torch.fft.ifft2(torch.fft.fft2(x)).real, (4, 6)),
    ("stft", lambda x: torch.view_as_real(torch.stft(x, 8, 4, window=torch.hann_window(8), return_complex=True)), (24,)),
    ("cummax", lambda x: torch.cummax(x, 1).values, (4, 5)),
    ("cummin", lambda x: torch.cummin(x, -1).values, (4, 5)),
    ("cumprod", lambda x: torch.cumprod(x, 1), (4, 5)),
    ("cumsum", lambda x: torch.cumsum(x, 1), (4, 5)),
    ("logcumsumexp", lambda x: torch.logcumsumexp(x, 1), (4, 5)),
    ("prod", lambda x: torch.prod(x, 1), (4, 5)),
    ("cdist", lambda x: torch.cdist(x, x.flip(1)), (4, 5)),
    ("cdist 1", lambda x: torch.cdist(x, x.flip(1), p=1.0), (4, 5)),
    ("median", lambda x: torch.median(x, 1).values, (5, 4)),
    ("kthvalue", lambda x: torch.kthvalue(x, 2, 1).values, (5, 4)),
    ("quantile", lambda x: torch.quantile(x, 0.3, dim=1), (5, 4)),
    ("mode", lambda x: torch.mode(x, 1).values, (5, 4)),
    ("diagonal", lambda x: torch.diagonal(x, 1, 1, 2), (5, 4)),
    ("diag_embed", lambda x: torch.diag_embed(x, 1), (5,)),
    ("trace", lambda x: torch.einsum("bii->b", x), (4, 4)),
    ("grid_sample", lambda x: F.grid_sample(x, torch.tanh(x[:, :2].permute(0, 2, 3, 1)), align_corners=False), (3, 5, 4)),
    ("grid_sample nearest", lambda x: F.grid_sample(x, torch.tanh(x[:, :2].permute(0, 2, 3, 1)), "nearest", "border", True), (3, 5, 4)),
    ("affine_grid", lambda x: F.grid_sample(x, F.affine_grid(x[:, 0, :2, :3], list(x.shape), False), align_corners=False), (3, 5, 4)),
    ("std", lambda x: torch.std(x, 1), (5, 4)),
    ("logsumexp", lambda x: torch.logsumexp(x, 1), (5, 4)),
    ("sort", lambda x: torch.sort(x, 1).values, (5, 4)),
    ("topk", lambda x: torch.topk(x, 2, 1).values, (5, 4)),
    ("amax", lambda x: torch.amax(x, 1), (5, 4)),
    ("aminmax", lambda x: torch.aminmax(x, dim=1).max, (5, 4)),
    ("renorm", lambda x: torch.renorm(x, 2, 1, 0.5), (5, 4)),
    ("roll", lambda x: torch.roll(x, 2, 1), (5, 4)),
    ("flip", lambda x: torch.flip(x, [1]), (5, 4)),
    ("unfold", lambda x: x.unfold(1, 3, 2), (7, 2)),
    ("as_strided", lambda x: x.contiguous().as_strided((3, 2), (2, 1), 1), (4, 2)),
    ("tril", lambda x: torch.tril(x), (4, 4)),
    ("masked_fill", lambda x: x.masked_fill(x > 0.5, 0.0), (4, 4)),
    ("masked_scatter", lambda x: torch.where(x > 0, x, x * 2), (4, 4)),
    ("gather", lambda x: torch.gather(x, 1, torch.argsort(x, 1)), (4, 3)),
    ("scatter_add", lambda x: torch.zeros_like(x).scatter_add(1, torch.argsort(x, 1), x), (4, 3)),
    ("scatter_reduce amax", lambda x: torch.zeros_like(x).scatter_reduce(1, torch.argsort(x, 1), x, "amax"), (4, 3)),
    ("index_add", lambda x: torch.zeros_like(x).index_add(1, torch.tensor([0, 2, 2, 1]), x), (4, 3)),
    ("index_select", lambda x: torch.index_select(x, 1, torch.tensor([0, 2, 2])), (4, 3)),
    ("in-place slices", lambda x: _write_slices(x), (4, 3)),
    ("repeat_interleave", lambda x: torch.repeat_interleave(x, 2, 1), (4, 3)),
    ("einsum", lambda x: torch.einsum("bij,bkj->bik", x, x), (4, 3)),
    ("atan2", lambda x: torch.atan2(x, x.flip(1)), (4, 3)),
    ("erf family", lambda x: torch.erf(x) + torch.erfc(x * 0.3) + torch.erfinv(torch.tanh(x) * 0.9), (4, 3)),
    ("lgamma", lambda x: torch.lgamma(x.abs() + 0.5), (4, 3)),
    ("sinc", lambda x: torch.sinc(x), (4, 3)),
    ("logaddexp", lambda x: torch.logaddexp(x, x.flip(1)), (4, 3)),
    ("xlogy", lambda x: torch.xlogy(x.abs(), x.abs() + 1), (4, 3)),
    ("lerp", lambda x: torch.lerp(x, x.flip(1), 0.3), (4, 3)),
    ("fmod, remainder", lambda x: torch.fmod(x, 0.7) + torch.remainder(x, 0.7), (4, 3)),
    ("clamp", lambda x: x.clamp(-0.5, 0.5), (4, 3)),
    ("nan_to_num", lambda x: torch.nan_to_num(x / x.abs().clamp(min=0.1)), (4, 3)),
    ("cross", lambda x: torch.linalg.cross(x, x.flip(1)), (4, 3)),
    ("kron", lambda x: torch.einsum("bi,bj->bij", x[:, 0], x[:, 1]), (4, 3)),
    ("bmm, baddbmm", lambda x: torch.baddbmm(x, x, x.transpose(1, 2), beta=0.5), (4, 4)),
    ("addcmul, addcdiv", lambda x: torch.addcmul(x, x, x, value=0.3) + torch.addcdiv(x, x, x.abs() + 1, value=0.2), (4, 4)),
    ("var_mean", lambda x: torch.var_mean(x, 1, correction=0)[0], (4, 4)),
    ("dist", lambda x: torch.dist(x, x.flip(1), 2).reshape(1), (4, 3)),
    ("bucketize", lambda x: x * torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])), (4, 3)),
    ("searchsorted", lambda x: x * torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x.detach()), (4, 3)),
    ("polar", lambda x: torch.view_as_real(torch.polar(x.abs(), x)), (4, 3)),
    ("rotary", lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.polar(torch.ones(3), torch.arange(3.0))), (3, 2)),
    ("histogram-like one_hot", lambda x: F.one_hot(x.argmax(1), 4).to(x.dtype) * x.mean(), (4,)),
    ("vmap", lambda x: torch.func.vmap(lambda row: row * row.sum())(x), (4, 3)),
]  # fmt: skip


def _write_slices(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(x)
    result[:, 1:] = x[:, :-1] * 2
    result[:, 0] += x[:, -1]
    return result


def _itself(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return function


OFTEN = ("inv", "affine_grid")
CASES = [layer(f"torch.{name}", partial(_itself, function), *shape, ordinary=name in OFTEN) for name, function, shape in FUNCTIONS]
