"""Tensor subclasses with torch's hooks around a gather, as libraries of quantized training have them."""

import torch
from torch import nn
from torch.utils import _pytree as pytree

_KEEP = {"detach", "empty_like", "new_zeros", "slice", "copy_", "view", "as_strided", "_to_copy", "split", "clone"}


class Wrapped(torch.Tensor):
    """A tensor that computes as the one that it holds; operations that move rows return the class again."""

    @staticmethod
    def __new__(cls, values):
        kwargs = {"strides": values.stride(), "dtype": values.dtype, "device": values.device}
        return torch.Tensor._make_wrapper_subclass(cls, values.size(), **kwargs)

    def __init__(self, values):
        self.values = values

    def __tensor_flatten__(self):
        return ["values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _meta, _size, _stride):
        return cls(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda each: each.values, (args, kwargs or {}))
        found = function(*args, **kwargs)
        name = function._schema.name.split("::")[1]
        return pytree.tree_map_only(torch.Tensor, cls, found) if name in _KEEP else found


class InHalves(Wrapped):
    """Trained float64 values, sent as two tensors of float32; modules compute with a plain tensor."""

    def fsdp_pre_all_gather(self, mesh):
        high = self.values.float()
        return (high, (self.values - high).float()), mesh.size()

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        high, low = outputs
        whole = (high.double() + low.double()).to(param_dtype)
        if out is None:
            return whole, (whole,)
        out = getattr(out, "_local_tensor", out)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole.as_strided(out.shape, out.stride()))


class Noted(Wrapped):
    """Trained values that note what the hooks were called with."""

    calls = []  # noqa: RUF012 (emptied by tests)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        given = mesh.ndim, mesh.size(), tuple(outer_size), tuple(outer_stride), type(module).__name__, mp_policy
        Noted.calls.append(("before", str(given), tuple(self.shape)))
        values, rows = self.values, -(-outer_size[0] // mesh.size())
        if mp_policy.param_dtype is not None:
            values = values.to(mp_policy.param_dtype)
        if len(values) < rows:
            values = torch.cat([values, values.new_zeros(rows - len(values), *values.shape[1:])])
        return (values,), "metadata"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        shapes = [tuple(each.shape) for each in outputs]
        Noted.calls.append(("after", metadata, param_dtype, shapes, type(out).__name__))
        if out is None:
            return Wrapped(outputs[0]), outputs
        out = getattr(out, "_local_tensor", out)
        assert out.values.untyped_storage().data_ptr() == outputs[0].untyped_storage().data_ptr()


class Codes(Wrapped):
    """Frozen weights in int8 with a scale for each row; modules compute with the class."""

    @staticmethod
    def __new__(cls, codes, scales):
        kwargs = {"strides": codes.stride(), "dtype": scales.dtype, "device": codes.device}
        return torch.Tensor._make_wrapper_subclass(cls, codes.size(), **kwargs)

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _meta, _size, _stride):
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def of(cls, values):
        scales = values.abs().amax(1) / 127
        return cls((values / scales[:, None]).round().to(torch.int8), scales)

    def fsdp_pre_all_gather(self, mesh):
        return (self.codes, self.scales), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (Codes(*outputs), outputs)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return _CodesLinear.apply(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name not in _KEEP:
            raise NotImplementedError(f"{name} of codes")
        weight, *others = args
        if name == "as_strided":  # of the whole, behind which there may be more rows
            return cls(weight.codes[: others[0][0]], weight.scales[: others[0][0]])
        if name == "view":  # as it is, or flat, which torch keeps of the rows
            return cls(weight.codes.view(others[0]), weight.scales)
        if name == "copy_":
            weight.codes.copy_(others[0].codes)
            weight.scales.copy_(others[0].scales)
            return weight
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "dtype"}
        scales = [list(others[0])[:1], *others[1:]] if name == "new_zeros" else others
        found = function(weight.codes, *others, **kwargs), function(weight.scales, *scales, **kwargs)
        if isinstance(found[0], torch.Tensor):
            return cls(*found)
        return [cls(*pair) for pair in zip(*found, strict=True)]


class _CodesLinear(torch.autograd.Function):
    """Keeps the codes, and not the values, for the backward."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, _values_of(weight), bias)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ _values_of(weight), None, grad.flatten(0, -2).sum(0)


def inner(value):
    """The tensors within one of these; any other value itself."""
    return (
        {name: getattr(value, name) for name in value.__tensor_flatten__()[0]} if isinstance(value, Wrapped) else value
    )


def _values_of(weight):
    return weight.codes * weight.scales[:, None]
