"""``export_peft``: LoRA adapters of a checkpoint as ``PeftModel.from_pretrained`` reads them. Not collective."""

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.convert import safetensors
from hpcfsdp.checkpoint.convert.export import Exported, write_tensors
from hpcfsdp.checkpoint.convert.output import Progress, absolute, new_files, no_progress
from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.errors import CheckpointError

FORMAT = "peft"
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
"""What ``PeftModel.from_pretrained`` looks for in a folder."""

_MODEL = f"{schema.MODEL}/"
_INNER = "base_model.model."
"""What PEFT's names have before those of the model that it has put adapters into."""
_LAYER = "lora_"
_WHOLE_MODULES = "modules_to_save"
_TOKENS = "trainable_tokens_delta"
_MAGNITUDE = "lora_magnitude_vector"


def export_peft(
    source: str | os.PathLike[str] | CheckpointIndex,
    folder: str | os.PathLike[str],
    config: Any,
    *,
    adapter: str = "default",
    force: bool = False,
    progress: Progress = no_progress,
) -> Exported:
    """Not collective. Export a LoRA or DoRA adapter, and modules that were trained as a whole, for PEFT.

    Args:
        source: a checkpoint of the whole ``PeftModel``, or of its adapters alone.
        folder: the folder to write; created if it is missing.
        config: ``model.peft_config[adapter]``, or the same as a dict, or the path of an ``adapter_config.json``.
        adapter: its name in the model.
        force: replace existing files.
        progress: shows the bytes of tensors written, as for ``export_checkpoint``.

    Returns:
        A description of what was written; its ``files`` are the weights and the configuration.

    Raises:
        CheckpointError: the configuration is not one of LoRA, the checkpoint has no such adapter, a file exists
            already, or it cannot be written.
        CheckpointCorruptError: the checkpoint is damaged.
    """
    settings = _settings(config)
    index = source if isinstance(source, CheckpointIndex) else open_index(os.path.expanduser(source))
    paths = [path for path in (*index.tensors, *index.links) if path.startswith(_MODEL)]
    names = adapter_names([path.removeprefix(_MODEL) for path in paths], adapter)
    if not names:
        raise CheckpointError(
            f"{index.info.path}: has no LoRA adapter {adapter!r}: no name in it has {_LAYER!r} and {adapter!r}; "
            "`hpcfsdp ls` shows the names"
        )
    target = absolute(folder)
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; give the name of a folder")
    weights, description = target / WEIGHTS_NAME, target / CONFIG_NAME
    tensors = [(outside, index.resolve(_MODEL + name)) for name, outside in names.items()]
    head, entries = safetensors.pack(tensors, {"format": "pt"})
    inside = {outside: _MODEL + name for name, outside in names.items()}
    text = json.dumps(settings, indent=2, sort_keys=True).encode()
    nbytes = sum(entry.nbytes for entry in entries)
    sizes = {weights: len(head) + nbytes, description: len(text)}
    with progress("exporting", nbytes) as step, BlockReader(index) as reader, new_files(sizes, force=force) as fds:
        write_tensors(reader, inside, head, entries, fds[weights], step)
        disk.write(fds[description], [memoryview(text)], 0)
    return Exported(FORMAT, (weights, description), len(names), nbytes, {})


def adapter_names(names: Iterable[str], adapter: str) -> dict[str, str]:
    """PEFT's names for the tensors of an adapter, by their names in the model. Pure."""
    found = {name: outside for name in names if (outside := _outside(name, adapter)) is not None}
    if any(outside.startswith(_INNER) for outside in found.values()):
        return found
    return {name: _INNER + outside for name, outside in found.items()}  # adapters put into a model without PeftModel


def _outside(name: str, adapter: str) -> str | None:
    """Return the name of an adapter's tensor without the adapter's name; None for other tensors."""
    parts = name.split(".")
    for place, (part, after) in enumerate(itertools.pairwise(parts)):
        if after != adapter:
            continue
        if part == _WHOLE_MODULES:
            return ".".join(parts[:place] + parts[place + 2 :])
        if part == _MAGNITUDE and parts[place + 2 :] == ["weight"]:
            return ".".join(parts[: place + 1])
        if part.startswith(_LAYER) or part == _TOKENS:
            return ".".join(parts[: place + 1] + parts[place + 2 :])
    return None


def _settings(config: Any) -> dict[str, Any]:
    """Return the configuration as JSON; raise CheckpointError unless it is of LoRA without trained biases."""
    if isinstance(config, (str, os.PathLike)):
        try:
            config = json.loads(Path(config).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{config}: cannot be read as the configuration of an adapter: {error}") from error
    elif hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"config is a {type(config).__name__}: give model.peft_config['default'], or the path of its file"
        )
    settings = {key: _plain(value) for key, value in config.items()} | {"inference_mode": True}
    kind, bias = settings.get("peft_type"), settings.get("bias", "none")
    if kind != "LORA" or bias != "none":
        what = f"peft_type {kind!r}" if kind != "LORA" else f"bias={bias!r}"
        raise CheckpointError(
            f"adapters with {what} cannot be exported from a checkpoint: have PEFT write them, by "
            "model.module.save_pretrained(folder, state_dict=model.state_dict()) with the model's full state dict"
        )
    return settings


def _plain(value: Any) -> Any:
    """Return a value as JSON; PEFT's configurations contain enumerations and sets."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(entry) for entry in value)
    return getattr(value, "value", value)
