"""Inverses, systems of equations, determinants and Cholesky factors of small matrices, by elimination written out.

ONNX has none of them but Det. The number of nodes grows with the matrix, so its size must be known and at most `LARGEST`; larger ones stay
operators that can't be translated. Autograd's formulas for inverse and Cholesky factor need only products and triangular systems.
"""

from __future__ import annotations

from typing import Any

import torch

from .registry import after, before, shape_of
from .sizes import is_static

aten = torch.ops.aten
LARGEST = 64


def is_small(matrix: torch.Tensor) -> bool:
    return is_static(matrix.shape[-1]) and matrix.shape[-1] <= LARGEST and not matrix.is_complex()


def _eye(matrix: torch.Tensor) -> torch.Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _no_info(matrix: torch.Tensor) -> torch.Tensor:
    """What LAPACK returns where nothing went wrong."""
    return torch.zeros(list(matrix.shape[:-2]), dtype=torch.int32, device=matrix.device)


def _largest_to(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchanges row k with the row below it that has the largest element in column k. Returns whether they differ, as 1 or 0, too."""
    size = rows.shape[-2]
    chosen = rows[..., k:, k].detach().abs().argmax(-1, keepdim=True) + k
    order = torch.arange(size, device=rows.device).expand([*rows.shape[:-2], size])
    order = torch.where(order == k, chosen, torch.where(order == chosen, k, order))
    return torch.gather(rows, -2, order.unsqueeze(-1).expand(rows.shape)), (chosen.squeeze(-1) != k).to(rows.dtype)


@after(aten.linalg_inv_ex.default)
def linalg_inv_ex(matrix: torch.Tensor, check_errors: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Gauss and Jordan, with the largest pivot of each column."""
    if not is_small(matrix):
        return NotImplemented
    size = matrix.shape[-1]
    rows = torch.cat([matrix, _eye(matrix).expand(matrix.shape)], -1)
    for k in range(size):
        rows, _ = _largest_to(rows, k)
        pivot = rows[..., k : k + 1, :] / rows[..., k : k + 1, k : k + 1]
        factors = rows[..., k : k + 1] - (torch.arange(size, device=matrix.device) == k).to(matrix.dtype).unsqueeze(-1)
        rows = rows - factors * pivot  # row k itself becomes the pivot row
    return rows[..., size:], _no_info(matrix)


@before(aten.linalg_inv.default, aten.inverse.default)
def linalg_inv(matrix: torch.Tensor) -> torch.Tensor:
    return aten.linalg_inv_ex(matrix)[0]


@before(aten.linalg_solve.default)
def linalg_solve(matrix: torch.Tensor, other: torch.Tensor, *, left: bool = True) -> torch.Tensor:
    """PyTorch takes `other` for a batch of vectors where it has one axis less."""
    vectors = other.dim() == 1 or (matrix.dim() - 1 == other.dim() and list(other.shape) == list(matrix.shape[:-1]))
    inverse = aten.linalg_inv_ex(matrix)[0]
    if vectors:
        return torch.matmul(inverse, other.unsqueeze(-1)).squeeze(-1)
    return torch.matmul(inverse, other) if left else torch.matmul(other, inverse)


@before(aten.linalg_solve_ex.default)
def linalg_solve_ex(
    matrix: torch.Tensor, other: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return linalg_solve(matrix, other, left=left), _no_info(matrix)


@before(aten.linalg_slogdet.default, aten.slogdet.default)
def linalg_slogdet(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Autograd differentiates the elimination."""
    if not is_small(matrix):
        return NotImplemented
    pivots, sign = _pivots(matrix)
    return sign * torch.sign(pivots.detach()).prod(-1), torch.log(pivots.abs()).sum(-1)


@before(aten.logdet.default)
def logdet(matrix: torch.Tensor) -> torch.Tensor:
    """NaN for a negative determinant, as in PyTorch."""
    if not is_small(matrix):
        return NotImplemented
    sign, value = linalg_slogdet(matrix)
    return value + torch.log(sign)


@before(aten.linalg_det.default, aten.det.default)
def linalg_det(matrix: torch.Tensor) -> torch.Tensor:
    if not is_small(matrix):
        return NotImplemented
    pivots, sign = _pivots(matrix)
    result = sign
    for k in range(matrix.shape[-1]):
        result = result * pivots[..., k]
    return result


def _pivots(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The diagonal after elimination, and 1 or -1 for an even or odd number of exchanges."""
    rows = matrix
    sign = torch.ones(list(matrix.shape[:-2]), dtype=matrix.dtype, device=matrix.device)
    pivots = []
    for k in range(matrix.shape[-1]):
        rows, exchanged = _largest_to(rows, 0)
        sign = sign * (1.0 - 2.0 * exchanged)
        pivots.append(rows[..., 0, 0])
        rows = rows[..., 1:, 1:] - rows[..., 1:, :1] / rows[..., :1, :1] * rows[..., :1, 1:] if k + 1 < matrix.shape[-1] else rows
    return torch.stack(pivots, -1), sign


@shape_of(aten._linalg_det.default)
def det_shape(fake_mode: Any, operator: Any, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """PyTorch's own takes no symbolic batch."""
    with fake_mode:
        pivots = torch.empty(list(matrix.shape[:-1]), dtype=torch.int32, device=matrix.device)
        return matrix.new_empty(list(matrix.shape[:-2])), matrix.new_empty(list(matrix.shape)), pivots


@shape_of(aten._linalg_slogdet.default)
def slogdet_shape(fake_mode: Any, operator: Any, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with fake_mode:
        return matrix.new_empty(list(matrix.shape[:-2])), *det_shape(fake_mode, operator, matrix)


@after(aten.linalg_cholesky_ex.default)
def linalg_cholesky_ex(matrix: torch.Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Column by column: what is left of the matrix loses the product of each new column with itself. Only the lower half is read."""
    if not is_small(matrix):
        return NotImplemented
    size = matrix.shape[-1]
    rest = matrix.transpose(-1, -2) if upper else matrix
    columns = []
    for k in range(size):
        column = rest[..., k] * (torch.arange(size, device=matrix.device) >= k).to(matrix.dtype)
        column = column / torch.sqrt(rest[..., k : k + 1, k])
        columns.append(column)
        rest = rest - column.unsqueeze(-1) * column.unsqueeze(-2)
    return torch.stack(columns, -2 if upper else -1), _no_info(matrix)


@before(aten.linalg_cholesky.default)
def linalg_cholesky(matrix: torch.Tensor, *, upper: bool = False) -> torch.Tensor:
    return aten.linalg_cholesky_ex(matrix, upper=upper)[0]


@before(aten.cholesky.default)
def cholesky(matrix: torch.Tensor, upper: bool = False) -> torch.Tensor:
    return aten.linalg_cholesky_ex(matrix, upper=upper)[0]


@before(aten.linalg_solve_triangular.default)
@after(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(
    matrix: torch.Tensor, other: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """Row by row, from the top or from the bottom: each solved row leaves the rows still to be solved."""
    if not is_small(matrix):
        return NotImplemented
    if not left:  # X A = B is the same as A' X' = B'
        flipped = linalg_solve_triangular(
            matrix.transpose(-1, -2), other.transpose(-1, -2), upper=not upper, left=True, unitriangular=unitriangular
        )
        return flipped if flipped is NotImplemented else flipped.transpose(-1, -2)
    size = matrix.shape[-1]
    rest = other
    solved: dict[int, torch.Tensor] = {}
    for k in reversed(range(size)) if upper else range(size):
        row = rest[..., k : k + 1, :]
        solved[k] = row if unitriangular else row / matrix[..., k : k + 1, k : k + 1]
        if len(solved) < size:
            rest = rest - matrix[..., :, k : k + 1] * solved[k]
    lead = torch.broadcast_shapes(matrix.shape[:-2], other.shape[:-2])
    return torch.cat([solved[k].expand([*lead, 1, other.shape[-1]]) for k in range(size)], -2)


@before(aten.triangular_solve.default)
def triangular_solve(
    other: torch.Tensor, matrix: torch.Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    used = matrix.transpose(-1, -2) if transpose else matrix
    return linalg_solve_triangular(used, other, upper=upper != transpose, unitriangular=unitriangular), matrix


@before(aten.cholesky_solve.default)
def cholesky_solve(other: torch.Tensor, factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    lower = factor.transpose(-1, -2) if upper else factor
    half: Any = linalg_solve_triangular(lower, other, upper=False)
    return half if half is NotImplemented else linalg_solve_triangular(lower.transpose(-1, -2), half, upper=True)


@before(aten.cholesky_inverse.default)
def cholesky_inverse(factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    return cholesky_solve(_eye(factor).expand(factor.shape), factor, upper)
