"""A tensor as the product of two thin factors: one power iteration from the last tensor's subspace (PowerSGD,
Vogels et al. 2019, algorithm 1), with an orthonormal left factor.

M (R, C)   P (R, r)   Q (C, r)   M ~ P Q^T
"""

from __future__ import annotations

import torch

LARGEST = 2.0**60  #: of an element: products of two stay finite

_COLD_ITERATIONS = 2


def factorise(matrix: torch.Tensor, rank: int, basis: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (P, Q) of a float32 matrix; None if an element is Inf, NaN or beyond LARGEST.

    `basis` is the Q of the tensor before; without one the iteration starts from fixed random numbers.
    """
    columns = matrix.shape[1]
    if not bool(matrix.abs().amax() <= LARGEST):
        return None
    if basis is not None and basis.shape == (columns, rank):
        q, iterations = basis.to(matrix.device), 1
    else:
        q, iterations = _cold_basis(columns, rank).to(matrix.device), _COLD_ITERATIONS
    p = matrix.new_empty(0)
    for _ in range(iterations):
        p = torch.linalg.qr(matrix @ q).Q
        q = matrix.T @ p
    return p, q


def multiply(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the matrix (R, C) of factors that are given as rows, (r, R) and (r, C)."""
    return p.T @ q


def _cold_basis(columns: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(columns, rank, generator=generator)
