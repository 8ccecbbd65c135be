"""Adapters of PEFT in sharded models: whole tensors of the adapter alone, and the folder that PEFT loads.

``hpcfsdp.checkpoint.export_peft`` does the same from a checkpoint file.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Collection
from pathlib import Path

import safetensors.torch
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from hpcfsdp import _compat
from hpcfsdp.checkpoint.convert.peft import WEIGHTS_NAME, adapter_names
from hpcfsdp.comm import raise_together
from hpcfsdp.errors import StateDictError, nearest
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.hang.calls import public_call
from hpcfsdp.state.model import communicator_of, model_tensors
from hpcfsdp.state.tensors import buffers_of
from hpcfsdp.state.wrappers import clean_fqn


@public_call("adapter_state_dict")
def adapter_state_dict(model: nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Return an adapter's whole tensors on rank 0, by PEFT's names; {} elsewhere. Collective over the model's ranks.

    It gathers the adapter alone: the frozen model stays in shards. The result is what
    ``peft.set_peft_model_state_dict`` takes: tensors on the CPU, in the dtype and shape of the parameters. `model` is a
    ``PeftModel`` in ``FullyShardedDataParallel``, and `adapter` a name in it; else StateDictError is raised.
    """
    comm, inner = communicator_of(model), _peft_model(model, adapter)
    whole = _whole_tensors(model, tensors_of_adapter(model, adapter))
    prompts: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if inner.peft_config[adapter].is_prompt_learning:  # PEFT computes the prompts that it saves
        prompts = FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False)
    with prompts, raise_together(comm):
        if comm.rank != 0:
            return {}
        if _is_plain_lora(inner, adapter):
            found = {outside: whole[name] for name, outside in adapter_names(whole, adapter).items()}
        else:
            found = _selected_by_peft(inner, whole, adapter)
        if not found:
            raise StateDictError(f"adapter {adapter!r} has no tensors")
        return found


def _selected_by_peft(inner: PeftModel, whole: dict[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    """PEFT's own choice and names. It compares names with those of modules, which are in wrappers now."""
    paths = {clean_fqn(path): path for path, _ in inner.named_modules()}  # the innermost comes last
    wrapped = {}
    for name, tensor in whole.items():
        path, _, last = name.rpartition(".")
        wrapped[f"{paths[path]}.{last}"] = tensor
    found = get_peft_model_state_dict(inner, state_dict=wrapped, adapter_name=adapter, save_embedding_layers=False)
    return {clean_fqn(name): tensor.detach().cpu().clone() for name, tensor in found.items()}


@public_call("save_adapter")
def save_adapter(model: nn.Module, folder: str | os.PathLike[str], adapter: str = "default") -> None:
    """Write an adapter as ``PeftModel.from_pretrained(base, folder)`` loads it. Collective over the model's ranks.

    Rank 0 gathers the adapter alone, and writes adapter_model.safetensors and adapter_config.json to `folder`, which is
    made if it is missing; files in it are replaced. `model` and `adapter` are as in ``adapter_state_dict``. All ranks
    raise the OSError of a rank 0 that cannot write.
    """
    found = adapter_state_dict(model, adapter)
    comm, inner = communicator_of(model), _peft_model(model, adapter)
    with raise_together(comm):
        if comm.rank == 0:
            folder = Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.contiguous() for name, tensor in found.items()}
            safetensors.torch.save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
            base = inner.get_base_model()
            config = copy.copy(inner.peft_config[adapter])
            config.inference_mode = True
            config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None)
            kind = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
            config.save_pretrained(folder, auto_mapping_dict=kind if config.task_type is None else None)


def tensors_of_adapter(model: nn.Module, adapter: str = "default") -> list[str]:
    """Return names in the model of an adapter's tensors, and of all that is trained with it. Not collective."""
    inner = _peft_model(model, adapter)
    tensors = {tensor.name for tensor in model_tensors(model)}
    found = set(adapter_names(tensors, adapter)) if _is_plain_lora(inner, adapter) else set()
    trained = {clean_fqn(name) for name, param in model.named_parameters() if param.requires_grad}
    return sorted(found | (trained & tensors))


def _peft_model(model: nn.Module, adapter: str) -> PeftModel:
    inner = model.module if isinstance(model, FullyShardedDataParallel) else model
    if not isinstance(inner, PeftModel):
        raise StateDictError(f"this is a {type(inner).__name__}, and not a PeftModel in FullyShardedDataParallel")
    if adapter not in inner.peft_config:
        known = list(inner.peft_config)
        raise StateDictError(f"the model has no adapter {adapter!r}{nearest(adapter, known)}; it has {known}")
    return inner


def _is_plain_lora(model: PeftModel, adapter: str) -> bool:
    config = model.peft_config[adapter]
    return getattr(config.peft_type, "value", config.peft_type) == "LORA" and config.bias == "none"


@_compat.outside_of_modes
def _whole_tensors(model: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return some of its tensors, on the CPU of rank 0; {} on other ranks. Collective over the model's ranks."""
    comm, chosen = communicator_of(model), set(names)
    tensors = [tensor for tensor in model_tensors(model) if chosen & {tensor.name, *tensor.aliases}]
    for buffer in buffers_of(tensors):
        buffer.gather()
    mine = [[(piece.start, piece.flat().cpu().clone()) for piece in tensor.pieces] for tensor in tensors]
    everyone = comm.all_gather_object(mine)
    for buffer in buffers_of(tensors):
        buffer.free()
    if comm.rank != 0:
        return {}
    found = {}
    for number, tensor in enumerate(tensors):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for pieces in reversed(everyone):  # rank 0's last: its values count where ranks have copies
            for start, values in pieces[number]:
                whole.view(-1)[start : start + values.numel()] = values
        found[tensor.name] = whole
    return found
