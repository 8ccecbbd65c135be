"""Matrices made orthogonal by a Newton-Schulz iteration, many of one shape at a time."""

from __future__ import annotations

import torch

Coefficients = tuple[float, float, float]


def orthogonalize(
    matrices: torch.Tensor, *, coefficients: Coefficients, steps: int, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Each matrix U S V^T as about U V^T: its singular values become numbers around 1.

    A step maps each singular value x to a x + b x^3 + c x^5. The usual coefficients (a, b, c) reach 0.7 to 1.2 within
    five steps, and do not converge.

    Args:
        matrices: shape (rows, columns), or (count, rows, columns) for many; any floating dtype; stays unchanged.
        coefficients: a, b, c.
        steps: of the iteration.
        eps: least norm that a matrix is divided by; keeps matrices of zeros as they are.
        dtype: to compute in.

    Returns:
        A new tensor of the same shape, in `dtype`.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).to(dtype)  # the product of rows is the smaller one
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        squares = x @ x.mT
        x = multiply(x, multiply(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def newton_schulz_flops(shape: tuple[int, ...], steps: int) -> float:
    """The floating-point operations of ``orthogonalize`` for one matrix."""
    short, long = sorted(shape)
    return steps * (4.0 * short**2 * long + 2.0 * short**3)
