"""Where a planned model comes from: numbers, the configuration of a run, a factory, or transformers.

All of them become a module on the meta device with a step, which ``ModelSource.step`` traces.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpcfsdp import config
from hpcfsdp.engine.nested import apply_to_tensors, tensors_in
from hpcfsdp.errors import UsageError
from hpcfsdp.examples.gpt.run_config import ModelConfig, RunConfig, check
from hpcfsdp.examples.gpt.transformer import GPT, Block
from hpcfsdp.plan.meta_trace import cast_floating, describe_units, trace
from hpcfsdp.plan.traced_step import TracedStep, without_activations

_HEAD_WIDTH = 128
_WIDTH_STEP = 256
_GATE_RATIO = 8 / 3  # hidden units of the feed-forward network for each of the width, as most such models have


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * block + 2 * self.vocabulary * self.width + self.width


def shape_of(
    params: float, layers: int, *, width: int | None = None, heads: int | None = None, vocabulary: int = 32000
) -> DecoderShape:
    """Return the decoder with about so many parameters: its hidden units are chosen so that the number fits.

    By default its `width` is that at which feed-forward networks are 8/3 times as wide, and its heads have 128 elements
    each. Raises UsageError where there is no such decoder, or counts do not divide.
    """
    if not (layers >= 1 and vocabulary >= 1 and params >= 1):
        raise UsageError("plan: --params, --layers and --vocabulary must be positive")
    if width is None:
        a, b = (4 + 3 * _GATE_RATIO) * layers, 2.0 * vocabulary
        ideal = (-b + (b * b + 4 * a * params) ** 0.5) / (2 * a)
        step = _WIDTH_STEP if ideal >= _WIDTH_STEP else 16
        width = max(step, round(ideal / step) * step)
    if heads is None:
        heads = max(1, width // _HEAD_WIDTH)
    if width % heads or width // heads % 2:
        raise UsageError(
            f"plan: --width {width} must be a multiple of twice --heads {heads}, so that each head has an even "
            "number of elements"
        )
    rest = params - 2 * vocabulary * width - width - layers * (4 * width**2 + 2 * width)
    hidden = round(rest / (3 * width * layers))
    if hidden < 1:
        raise UsageError(
            f"plan: {params:.3g} parameters are too few for {layers} layers of width {width} and a vocabulary of "
            f"{vocabulary}: give fewer --layers, a smaller --width or --vocabulary, or more --params"
        )
    return DecoderShape(layers, width, heads, hidden, vocabulary)


class DecoderBlock(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, shape.hidden, bias=False), nn.Linear(width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) -> the same shape."""
        normed = self.attention_norm(x)
        query, key, value = (
            project(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = _rotated(query, cosines, sines), _rotated(key, cosines, sines)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        normed = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class Decoder(nn.Module):
    """Predicts the next token."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) -> logits (batch, tokens, vocabulary)."""
        x = self.embed(ids)
        angles = torch.empty(ids.shape[1], self.head_width, dtype=x.dtype, device=x.device)
        cosines, sines = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cosines, sines)
        return self.head(self.norm(x))


META = torch.device("meta")


@dataclass(frozen=True)
class ModelSource:
    """A model, and how to make it."""

    name: str  # for tables
    make: Callable[[], nn.Module]  # makes the module, on the meta device
    # the step: calls the model and returns its loss; None if its inputs are not known
    loss_of: Callable[[nn.Module], torch.Tensor] | None
    tokens: int  # of a step on one rank; 0 without a step
    wrap: tuple[str, ...] = ()  # names of the classes of modules that become units; empty to find them
    note: str = ""  # what the user should know about it; may be empty

    def step(
        self, *, compute: torch.dtype | None = None, param: torch.dtype | None = None, checkpointed: bool = False
    ) -> TracedStep:
        """Return the step of one rank, or only the parameters if the inputs of the model are not known.

        `compute` is the dtype of the computation, None for that of the parameters; `param` that of the parameters, None
        for that which the model is made with. With `checkpointed`, each unit computes its forward again in the
        backward. Raises UsageError where no module has one of the classes `wrap`, or the step does not run on meta.
        """
        model = _on_meta(self.make, self.name)
        if param is not None:
            cast_floating(model, param)
        units = units_of(model, self.wrap)
        if self.loss_of is None:
            return without_activations(describe_units(model, [*units, model])[0], self.name)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(f"plan: no parameter of {self.name} requires gradients: there is nothing to train")
        try:
            return trace(
                model,
                units,
                self.loss_of,
                name=self.name,
                tokens=self.tokens,
                compute=compute,
                checkpointed=checkpointed,
            )
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"plan: the step of {self.name} does not run on the meta device ({_one_line(error)}): "
                "have it read no values of tensors, give fitting inputs with the factory, or plan without "
                "activations by --no-activations"
            ) from error


def from_numbers(shape: DecoderShape, *, batch: int, sequence: int) -> ModelSource:
    """Return a decoder-only transformer of this shape."""
    ids = torch.zeros(batch, sequence, dtype=torch.int64, device=META)
    return ModelSource(
        f"{shape.numel / 1e9:.3g}B decoder, {shape.layers} layers of width {shape.width}",
        lambda: Decoder(shape),
        lambda model: next_token_loss(model(ids), ids),
        ids.numel(),
        (DecoderBlock.__name__,),
    )


def from_run(path: str, ranks: int, ranks_per_node: int) -> tuple[ModelSource, RunConfig]:
    """Return the GPT of ``hpcfsdp train``, with the batch that its configuration gives to each of so many ranks."""
    found = config.parse(RunConfig, [path], prog="hpcfsdp plan")
    check(found, ranks, -(-ranks // ranks_per_node))
    if found.mesh.tensor > 1:
        raise UsageError(
            f"plan: {path}: mesh.tensor is {found.mesh.tensor}, and tensor-parallel layers are not planned: set it "
            "to 1, or plan the other dimensions alone"
        )
    batch = -(-found.train.batch // (ranks * found.train.accumulation))
    return from_shape(found.model, batch=batch, name=f"the GPT of {path}"), found


def from_shape(shape: ModelConfig, *, batch: int, name: str) -> ModelSource:
    """Return the GPT of ``hpcfsdp train`` of this shape."""
    ids = torch.zeros(batch, shape.context, dtype=torch.int64, device=META)
    return ModelSource(
        name, lambda: GPT(shape), lambda model: next_token_loss(model(ids), ids), ids.numel(), (Block.__name__,)
    )


def from_factory(
    text: str, *, batch: int | None = None, sequence: int | None = None, wrap: Sequence[str] = ()
) -> ModelSource:
    """Return the model of a user's function, given as ``package.module:function``: see ``from_function``."""
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"plan: --factory {text!r} is not package.module:function")
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())  # as with python -m
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"plan: --factory {text}: cannot import {module_name} ({type(error).__name__}: {_one_line(error)}): run "
            "the command where python -c 'import " + module_name + "' works"
        ) from error
    finally:
        sys.path[:] = before
    found: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(
            f"plan: --factory {text}: {module_name} has no function {name!r}; it has {', '.join(known) or 'none'}"
        )
    return from_function(found, name=text, batch=batch, sequence=sequence, wrap=wrap)


def from_function(
    function: Callable[[], Any],
    *,
    name: str,
    batch: int | None = None,
    sequence: int | None = None,
    wrap: Sequence[str] = (),
) -> ModelSource:
    """Return the model of a function, which returns a module, or a module and its inputs; it is called on meta.

    Inputs are a tensor, a tuple of arguments or a dict of keyword arguments; without them the model gets token ids
    (`batch`, default 1, and `sequence`, default 4096) if it has an embedding, and only its parameters are planned
    otherwise. The loss is the output "loss" of the model, or the mean of its first floating-point tensor.
    """
    made = _on_meta(function, name)
    made, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"plan: --factory {name} returned a {type(made).__name__}: it must return a torch.nn.Module, or a module "
            "and its inputs"
        )
    note = ""
    if inputs is not None and (batch or sequence):
        raise UsageError(
            f"plan: --batch and --sequence have no effect with {name}, which returns inputs: leave them out"
        )
    if inputs is None:
        if any(isinstance(module, nn.Embedding) for module in made.modules()):
            inputs = torch.zeros(batch or 1, sequence or 4096, dtype=torch.int64, device=META)
        else:
            note = f"{name} returns no inputs: activations and computation are not counted"

    def make() -> nn.Module:
        again = _on_meta(function, name)
        module: nn.Module = again[0] if isinstance(again, tuple) else again
        return module

    inputs = apply_to_tensors(lambda tensor: tensor.to(META), inputs)
    args, kwargs = (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})
    if isinstance(inputs, dict):
        args, kwargs = (), inputs
    tokens = next(map(_tokens_of, tensors_in((args, kwargs))), 0)
    step = None if inputs is None else lambda model: _any_loss(model(*args, **kwargs))
    return ModelSource(name, make, step, tokens if step else 0, tuple(wrap), note)


def from_transformers(path: str, *, batch: int, sequence: int, wrap: Sequence[str] = ()) -> ModelSource:
    """Return a causal language model of transformers, by its config.json, the folder of it, or a name in its cache."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f"plan: --config {path} needs transformers ({_one_line(error)}): pip install 'hpcfsdp[hf]'"
        ) from None
    try:
        found = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        if not os.path.exists(path):
            raise UsageError(
                f"plan: --config {path}: there is no such file or folder, and none of this name in the cache of "
                "transformers"
            ) from None
        raise UsageError(
            f"plan: --config {path} is no configuration of transformers: {_one_line(error)}: give a config.json, or "
            "the folder of one"
        ) from None

    def make() -> nn.Module:
        model = transformers.AutoModelForCausalLM
        made: nn.Module = model.from_config(found, attn_implementation="sdpa", dtype=torch.float32).train()
        found.use_cache = False
        return made

    ids = torch.zeros(batch, sequence, dtype=torch.int64, device=META)
    longest = getattr(found, "max_position_embeddings", None)
    if longest and sequence > longest:
        raise UsageError(f"plan: --sequence {sequence} is more than the {longest} positions of {path}")
    name = f"{found.model_type} of {path}"
    return ModelSource(name, make, lambda model: model(input_ids=ids, labels=ids).loss, ids.numel(), tuple(wrap))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def units_of(model: nn.Module, wrap: Sequence[str] = ()) -> list[nn.Module]:
    """Return the modules inside of a model that become units: of the classes `wrap`, or those that it has a list of."""
    if wrap:
        known = Counter(type(module).__name__ for module in model.modules())
        if (name := next((name for name in wrap if name not in known), None)) is not None:
            most = ", ".join(kind for kind, _ in known.most_common(8))
            raise UsageError(f"plan: no module of the model is a {name}: there are {most}")
        return [module for module in model.modules() if type(module).__name__ in wrap and module is not model]
    lists: list[list[nn.Module]] = []
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            ((kind, count),) = Counter(map(type, module)).most_common(1)
            if count > 1:
                lists.append([child for child in module if type(child) is kind])
    return max(lists, key=lambda found: sum(p.numel() for each in found for p in each.parameters()), default=[])


def _on_meta(make: Callable[[], Any], name: str) -> Any:
    try:
        with META:
            made = make()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"plan: {name} could not be made on the meta device ({type(error).__name__}: {_one_line(error)})"
        ) from error
    module = made[0] if isinstance(made, tuple) and made else made
    if isinstance(module, nn.Module):
        module.to(META)  # what the factory has put on a device of its own
    return made


def _tokens_of(tensor: torch.Tensor) -> int:
    """Return the tokens of a batch: of ids (batch, length), of embeddings (batch, length, width); otherwise samples."""
    is_sequence = (tensor.dim() == 2 and not tensor.is_floating_point()) or tensor.dim() == 3
    return tensor.shape[: 2 if is_sequence else 1].numel()


def _any_loss(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found = next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)
    if found is None:
        raise UsageError(f"plan: the model returns a {type(output).__name__} without a floating-point tensor")
    return found.float().mean()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return textwrap.shorten(text, 300, placeholder=" ...") if text else type(error).__name__
