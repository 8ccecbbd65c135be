"""Muon, with matrices of one shape computed together, and AdamW for everything that is no matrix."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from hpcfsdp import accelerator
from hpcfsdp.errors import UsageError
from hpcfsdp.reshard.sharded_tensors import is_sharded
from hpcfsdp.units.own import unit_fqn, whole_shape

Coefficients = tuple[float, float, float]


def orthogonalize(
    matrices: torch.Tensor, *, coefficients: Coefficients, steps: int, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return each matrix U S V^T as about U V^T: its singular values become numbers around 1.

    A step maps each singular value x to a x + b x^3 + c x^5. The usual coefficients (a, b, c) reach 0.7 to 1.2 within
    five steps, and do not converge. `matrices` of shape (rows, columns), or (count, rows, columns) for many, have any
    floating dtype, and stay as they are; the result has `dtype`, which is computed in. A matrix is divided by a norm of
    at least `eps`, which keeps matrices of zeros as they are.
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
    """Return the floating-point operations of ``orthogonalize`` for one matrix."""
    short, long = sorted(shape)
    return steps * (4.0 * short**2 * long + 2.0 * short**3)


MUON, ADAMW = "muon", "adamw"

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float32, torch.float64)}
_BOTH = ("lr", "weight_decay", "eps")
_OF_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "ns_dtype", "adjust_lr_fn")
_OF_ADAMW = ("betas", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
ELEMENT_FLOPS = 10.0  # operations of AdamW, and of others that step each element, about, for each element
_BATCH_BYTES = 64 << 20
"""Most bytes of matrices that are computed together: larger ones keep a device busy by themselves."""
_HOST_BATCH_BYTES = 128 << 10
"""The same on CPUs, which need no more to be busy, and are slower at stacks than at single large matrices."""


class Muon(torch.optim.Optimizer):
    """Steps matrices by their orthogonalized momentum, and all other parameters by AdamW.

    The update of a matrix is that of ``torch.optim.Muon``. Matrices of one shape are stacked, so that the iteration
    takes a few calls for all of them. Each group of parameters is divided into a group of its matrices and one of
    the rest; both have a learning rate of their own for schedulers. Embeddings and the last layer are usually
    better off with AdamW: give them in a group with ``"algorithm": "adamw"``::

        Muon([{"params": hidden}, {"params": embeddings, "algorithm": "adamw", "lr": 1e-3}], lr=0.02)

    Every rank must have the whole matrices. With a sharded model that is ``ShardingStrategy.NO_SHARD`` with
    ``use_orig_params=True``.
    """

    _stepper: torch.optim.AdamW | None = None  # steps the groups of AdamW, with the state of this optimizer

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | str = torch.bfloat16,
        adjust_lr_fn: str | None = None,
        adamw_lr: float | torch.Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
    ) -> None:
        """Not collective.

        Args:
            params: parameters, (name, parameter) pairs, or groups of either. A group may have "algorithm": "muon" or
                "adamw" for all of its parameters, and values by the names that ``torch.optim.Muon`` and
                ``torch.optim.AdamW`` have for them; "lr", "weight_decay" and "eps" then hold for both kinds in it.
            lr: the learning rate of matrices.
            weight_decay: of matrices, decoupled: times `lr`.
            momentum: share of the old momentum that is kept.
            nesterov: add the momentum to the gradient once more.
            ns_coefficients: of the Newton-Schulz iteration.
            eps: least norm that a matrix is divided by.
            ns_steps: of the iteration.
            ns_dtype: to iterate in: bfloat16, float32 or float64.
            adjust_lr_fn: how the learning rate depends on the shape, as in torch: None or "original",
                sqrt(max(1, rows / columns)); "match_rms_adamw", 0.2 sqrt(max(rows, columns)), which makes updates as
                large as AdamW's, so that both can have one learning rate.
            adamw_lr: the learning rate of other parameters; None: `lr`.
            adamw_betas, adamw_eps: of AdamW.
            adamw_weight_decay: of other parameters; None: `weight_decay`.

        Raises:
            UsageError: a value is out of range, a parameter is sharded or complex, or one that is not a matrix is in a
                group with "algorithm": "muon".
            TypeError: parameters are no tensors, or in a set.
            ValueError: as optimizers of torch, for a parameter in two groups, or a value that AdamW refuses.
        """
        self._muon: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._adamw = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
            "betas": adamw_betas,
            "eps": adamw_eps,
        }
        super().__init__(params, {"momentum": momentum})  # which schedulers look for

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not collective. Add parameters, as one group for matrices and one for others.

        Args:
            param_group: as a group of `params`.

        Raises:
            UsageError, TypeError, ValueError: as ``Muon``; nothing is added.
        """
        given, algorithm = param_group["params"], param_group.get("algorithm")
        if isinstance(given, set):
            raise TypeError("Muon: parameters in a set have no order, which state dicts need: give a list")
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        for param in params:
            _check_param(param)
        if algorithm is not None:
            _check_algorithm(algorithm)
        if foreign := next((key for key in param_group if key.startswith("adamw_")), None):
            key = foreign.removeprefix("adamw_")
            raise UsageError(f'Muon: a group has {foreign!r}: give "{key}" in a group with "algorithm": "adamw"')
        matrices = [p for p in params if algorithm == MUON or (algorithm is None and _tensor(p).dim() == 2)]
        others = [p for p in params if algorithm == ADAMW or (algorithm is None and _tensor(p).dim() != 2)]
        values = {key: value for key, value in param_group.items() if key not in ("params", "algorithm")}
        groups = []
        if matrices or (not params and algorithm != ADAMW):
            own = {key: value for key, value in values.items() if key not in _OF_ADAMW}
            if values.get("maximize"):
                raise UsageError("Muon: a group with matrices has maximize=True, which Muon does not support")
            groups.append(_muon_group({**self._muon, **own, "params": matrices}))
        if others or (not params and algorithm == ADAMW):
            own = {key: value for key, value in values.items() if key not in _OF_MUON}
            groups.append(_adamw_group({**self._adamw, **own, "params": others}))
        for group in groups:
            super().add_param_group(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Torch's Muon and AdamW save no algorithm, and versions of them may lack keys.
        before = [group["algorithm"] for group in self.__dict__.get("param_groups", ())]
        defaults = {MUON: state.get("_muon") or self._muon, ADAMW: state.get("_adamw") or self._adamw}
        groups = []
        for group, known in itertools.zip_longest(state["param_groups"], before[: len(state["param_groups"])]):
            algorithm = group.get("algorithm", known or MUON)
            _check_algorithm(algorithm)
            complete = _muon_group if algorithm == MUON else _adamw_group
            groups.append(complete({**defaults[algorithm], **group}))
        super().__setstate__({**state, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Not collective. Step all parameters that have gradients.

        The state of a matrix is its ``momentum_buffer``, of its shape and the dtype of its gradient.

        Args:
            closure: computes the loss again, with gradients.

        Returns:
            The loss of `closure`.

        Raises:
            UsageError: a matrix has a sparse gradient; nothing was stepped.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        matrices = [group for group in self.param_groups if group["algorithm"] == MUON]
        others = [group for group in self.param_groups if group["algorithm"] == ADAMW and group["params"]]
        if any(p.grad is not None and p.grad.is_sparse for group in matrices for p in group["params"]):
            raise UsageError("Muon: a matrix has a sparse gradient, which has no whole update: give it to AdamW")
        for group in matrices:
            self._step_matrices(group)
        if others:
            if self._stepper is None:
                self._stepper = torch.optim.AdamW(others[0]["params"])
            self._stepper.param_groups, self._stepper.state = others, self.state
            self._stepper.step()
        return loss

    @staticmethod
    def step_flops(shape: tuple[int, ...], group: Mapping[str, Any]) -> float:
        """Return about the floating-point operations of a step of a parameter of this `shape`, in this `group`."""
        if group["algorithm"] == MUON:
            return newton_schulz_flops(shape, group["ns_steps"])
        return ELEMENT_FLOPS * math.prod(shape)

    def _step_matrices(self, group: Mapping[str, Any]) -> None:
        dtype, momentum, nesterov = _DTYPES[group["ns_dtype"]], group["momentum"], group["nesterov"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        for params in _batches(group["params"], dtype.itemsize):
            grads = [param.grad for param in params if param.grad is not None]
            momenta = []
            for param, grad in zip(params, grads, strict=True):
                state = self.state[param]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
                momenta.append(state["momentum_buffer"].lerp_(grad, 1 - momentum))
            updates = _stacked(momenta)
            if nesterov:
                updates = _stacked(grads).lerp(updates, momentum)
            updates = orthogonalize(
                updates, coefficients=group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"], dtype=dtype
            )
            scale = -lr * _lr_factor(group["adjust_lr_fn"], params[0].shape)
            for param, update in zip(params, updates.unbind() if len(params) > 1 else [updates], strict=True):
                param.mul_(1 - lr * decay)
                param.add_(update, alpha=scale)


def _tensor(param: Any) -> torch.Tensor:
    """Return a parameter, or that of a pair of its name and it."""
    found: torch.Tensor = param[1] if isinstance(param, tuple) else param
    return found


def _name(param: Any) -> str:
    given = param[0] if isinstance(param, tuple) else unit_fqn(param)
    return repr(given) if given else "a parameter"


def _check_param(param: Any) -> None:
    """Raise a UsageError unless this rank has the whole parameter, of real numbers."""
    tensor = _tensor(param)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"Muon: a parameter is of {type(tensor).__name__}: give tensors")
    shape = whole_shape(tensor)
    if is_sharded(tensor) or (shape is not None and shape != tuple(tensor.shape)):
        raise UsageError(
            f"Muon: {_name(param)} is sharded, but Muon needs whole matrices: shard the model with "
            "ShardingStrategy.NO_SHARD and use_orig_params=True"
        )
    if tensor.is_complex():
        raise UsageError(f"Muon: {_name(param)} is complex, which Muon does not support: use another optimizer for it")


def _muon_group(group: dict[str, Any]) -> dict[str, Any]:
    """Make values fit for JSON. Raise a UsageError for one that is out of range, or what is no matrix."""
    for param in group.get("params", ()):
        if _tensor(param).dim() != 2:
            raise UsageError(
                f"Muon: {_name(param)} of shape {tuple(_tensor(param).shape)} is no matrix, but in a group with "
                '"algorithm": "muon": leave "algorithm" out, and AdamW steps it'
            )
    for key in ("lr", "weight_decay", "momentum", "eps"):
        _check_number(key, group[key])
    coefficients, steps, dtype = group["ns_coefficients"], group["ns_steps"], group["ns_dtype"]
    if not isinstance(coefficients, (list, tuple)) or len(coefficients) != 3:
        raise UsageError(f"Muon: ns_coefficients is {coefficients!r}: give three numbers")
    if not isinstance(steps, int) or not 0 <= steps < 100:
        raise UsageError(f"Muon: ns_steps is {steps!r}: give a whole number from 0 to 99")
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise UsageError(f"Muon: ns_dtype is {dtype}: choose one of {', '.join(_DTYPES)}")
    _lr_factor(group["adjust_lr_fn"], (1, 1))
    fit = {"lr": _own(group["lr"]), "ns_coefficients": tuple(coefficients), "ns_dtype": name}
    return {**group, **fit, "algorithm": MUON}


def _adamw_group(group: dict[str, Any]) -> dict[str, Any]:
    """Add all values that ``torch.optim.AdamW`` knows. Raise a ValueError as it does."""
    for key in ("lr", "weight_decay", "eps"):
        _check_number(key, group[key])
    known = {key: value for key, value in group.items() if key in _BOTH + _OF_ADAMW}
    some = [_tensor(param) for param in group["params"]] or [torch.zeros(1)]
    complete = torch.optim.AdamW(some, **known).defaults
    return {**complete, **group, "lr": _own(group["lr"]), "algorithm": ADAMW}


def _check_algorithm(algorithm: Any) -> None:
    if algorithm not in (MUON, ADAMW):
        raise UsageError(f'Muon: "algorithm" of a group is {algorithm!r}: give "muon" or "adamw", or leave it out')


def _check_number(key: str, value: Any) -> None:
    if not (isinstance(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)):
        raise UsageError(f"Muon: {key} is {value!r}: give a number")
    if not 0 <= float(value) < math.inf:
        raise UsageError(f"Muon: {key} is {float(value)}: it must be finite, and not negative")


def _own(lr: Any) -> Any:
    """Return a learning rate of one group: a scheduler changes a tensor in place."""
    return lr.clone() if isinstance(lr, torch.Tensor) else lr


def _lr_factor(kind: str | None, shape: Iterable[int]) -> float:
    """Return the factor of matrices of a shape. Raise a UsageError for an unknown kind."""
    rows, columns = shape
    if kind is None or kind == "original":
        return math.sqrt(max(1, rows / columns))
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise UsageError(f'Muon: adjust_lr_fn is {kind!r}: give "original", "match_rms_adamw" or None')


def _batches(params: Iterable[torch.Tensor], itemsize: int) -> Iterator[list[torch.Tensor]]:
    """Return parameters with gradients that can be stacked, in batches of limited size."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for param in params:
        if param.grad is not None and param.numel():
            alike.setdefault((param.shape, param.dtype, param.device, param.grad.dtype), []).append(param)
    for found in alike.values():
        most = _BATCH_BYTES if accelerator.is_accelerator(found[0].device) else _HOST_BATCH_BYTES
        count = max(1, most // (found[0].numel() * itemsize))
        for first in range(0, len(found), count):
            yield found[first : first + count]


def _stacked(matrices: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(matrices) if len(matrices) > 1 else matrices[0]
