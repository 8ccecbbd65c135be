"""Optimizers that need whole tensors, for tests of ``WholeTensors``; no tests."""

import functools

import torch

from hpcfsdp.optim import Muon
from tests.mpi.optim_cases import ByParameter


class Shampoo(ByParameter):
    """Preconditions the gradient of a matrix by sums of its products with itself from both sides."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    def _step(self, param, state, lr):
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            if param.dim() == 2:
                for name, size in zip(("left", "right"), param.shape, strict=True):
                    state[name] = torch.eye(size, dtype=param.dtype) * 1e-3
        state["step"] += 1
        update = param.grad
        if param.dim() == 2:
            state["left"] += update @ update.T
            state["right"] += update.T @ update
            update = _root(state["left"]) @ update @ _root(state["right"])
        param.sub_(lr * update)


class Soap(ByParameter):
    """Steps in the eigenbasis of ``Shampoo``'s sums, with moments of one value for each element there."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    def _step(self, param, state, lr):
        if not state:
            state["count"] = 0
            state["square"] = torch.zeros_like(param)
            if param.dim() == 2:
                for name, size in zip(("left", "right"), param.shape, strict=True):
                    # Of different eigenvalues: those of equal ones have no basis of their own.
                    state[name] = torch.diag(torch.linspace(0.5, 1.5, size, dtype=param.dtype))
        state["count"] += 1
        grad = param.grad
        if param.dim() == 2:
            state["left"].lerp_(grad @ grad.T, 0.1)
            state["right"].lerp_(grad.T @ grad, 0.1)
            left, right = (_basis(state[name]) for name in ("left", "right"))
            grad = left.T @ grad @ right
        state["square"].lerp_(grad.square(), 0.1)
        update = grad / (state["square"].sqrt() + 1e-3)
        if param.dim() == 2:
            update = left @ update @ right.T
        param.sub_(lr * update)


def _root(matrix):
    """To the power of -1/4."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T


def _basis(matrix):
    vectors = torch.linalg.eigh(matrix)[1]
    return vectors * vectors.sum(0).sign()  # which eigh leaves open


EXACT = {"ns_dtype": "float64"}
OPTIMIZERS = {
    "muon": functools.partial(Muon, lr=0.02, adamw_lr=1e-2, **EXACT),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.02, weight_decay=0.1),
    "shampoo": Shampoo,
    "soap": Soap,
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
}
"""By name, what makes one of parameters."""


def class_and_options(name):
    """The class of an optimizer, and the options that it is made with."""
    make = OPTIMIZERS[name]
    return (make.func, make.keywords) if isinstance(make, functools.partial) else (make, {})
