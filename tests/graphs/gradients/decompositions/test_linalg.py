"""Inverses, systems, determinants and Cholesky factors against autograd."""

from __future__ import annotations

import pytest
import torch

from torch_ort_ckpt.graphs.gradients.decompositions import linalg

from .agreement import check, operators, trace

DOUBLE = torch.float64
GONE = ["linalg_inv_ex", "_linalg_solve_ex", "_linalg_det", "_linalg_slogdet", "linalg_cholesky_ex", "linalg_solve_triangular",
        "cholesky_solve", "linalg_lu_solve", "triangular_solve"]  # fmt: skip


def _positive(x: torch.Tensor) -> torch.Tensor:
    return x @ x.transpose(-1, -2) + torch.eye(x.shape[-1], dtype=x.dtype)


FUNCTIONS = {
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, x.transpose(-1, -2)),
    "solve right": lambda x: torch.linalg.solve(x, x.transpose(-1, -2), left=False),
    "solve a vector": lambda x: torch.linalg.solve(x, x[..., 0]),
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x).logabsdet,
    "sign": lambda x: torch.linalg.slogdet(x).sign * x.sum([-1, -2]),
    "logdet": lambda x: torch.logdet(_positive(x)),
    "cholesky": lambda x: torch.linalg.cholesky(_positive(x)),
    "cholesky upper": lambda x: torch.linalg.cholesky(_positive(x), upper=True),
    "cholesky_solve": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(_positive(x))),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(torch.linalg.cholesky(_positive(x))),
    "lower": lambda x: torch.linalg.solve_triangular(_positive(x).tril(), x, upper=False),
    "upper": lambda x: torch.linalg.solve_triangular(_positive(x).triu(), x, upper=True),
    "upper right": lambda x: torch.linalg.solve_triangular(_positive(x).triu(), x, upper=True, left=False),
    "ones on the diagonal": lambda x: torch.linalg.solve_triangular(x.tril(), x, upper=False, unitriangular=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batch_of_matrices(name):
    batches = [[torch.randn(n, 3, 3, dtype=DOUBLE)] for n in (4, 6)]
    check(FUNCTIONS[name], *batches, dynamic=[[0]], gone=GONE, tolerance=1e-8)


@pytest.mark.parametrize("name", ["inv", "det", "slogdet"])
def test_rows_are_exchanged_where_the_diagonal_has_zeros(name):
    x = torch.tensor([[[0.0, 2, 1], [1, 0, 3], [2, 1, 0]], [[0.0, 0, 1], [1, 0, 0], [0, 1, 0]]], dtype=DOUBLE)
    check(FUNCTIONS[name], [x], gone=GONE)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_one_matrix_of_any_size_in_float32(size):
    x = torch.randn(size, size) + 3 * torch.eye(size)
    for name in ("inv", "det", "cholesky"):
        check(FUNCTIONS[name], [x], gone=GONE, tolerance=1e-4)


def test_large_matrices_stay_operators_that_are_refused():
    size = linalg.LARGEST + 1
    assert "linalg_inv_ex.default" in operators(trace(torch.linalg.inv, [torch.eye(size)]))
