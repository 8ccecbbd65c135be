"""``hpcfsdp export FILE OUT``: a checkpoint for other programs: safetensors, .pt, a DCP folder, an adapter of PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.convert.export import FORMATS, PT_SUFFIXES, export_checkpoint
from hpcfsdp.checkpoint.convert.peft import CONFIG_NAME, FORMAT as PEFT, export_peft
from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.printing import print_result
from hpcfsdp.errors import UsageError
from hpcfsdp.output.progress_bar import byte_progress
from hpcfsdp.text.terminal import readable_bytes

parser = Parser(
    "export",
    "Write the model of a checkpoint in another format. Every byte is checked against its checksum; a file appears "
    "when it is complete.",
    "hpcfsdp export my_model.h5 my_model.safetensors                  # the model",
    "hpcfsdp export my_model.h5 first.safetensors --names 'layers.0.*' --names '*.bias'",
    "hpcfsdp export my_model.h5 all.pt --optimizer                    # for torch.load",
    "hpcfsdp export my_model.h5 shards --shard-bytes 2000000000       # several files of 2 GB",
    "hpcfsdp export my_model.h5 a_folder --format dcp                 # for torch.distributed.checkpoint",
)
add = parser.add_argument
add("file", metavar="FILE", type=Path, help="a checkpoint")
_OUT = f"a file *.safetensors or *{', *'.join(PT_SUFFIXES)}, or a folder (with --format or --shard-bytes)"
add("out", metavar="OUT", type=Path, help=_OUT)
add("--format", choices=(*FORMATS, PEFT), help="default: by the name of OUT")
_NAMES = "of the tensors to export, one pattern as for ls; may be repeated"
add("--names", action="append", default=[], metavar="PATTERN", help=_NAMES)
add("--shard-bytes", type=int, metavar="N", help="split safetensors into files of at most N bytes, in a folder OUT")
add("--optimizer", action="store_true", help="export the optimizer's state, too")
add("--config", metavar="FILE", help=f"for {PEFT}: the adapter's {CONFIG_NAME}, as PEFT writes it")
add("--adapter", metavar="NAME", help=f"for {PEFT}: its name in the model; default: default")
add("--force", action="store_true", help="replace existing files")


def main(arguments: Sequence[str]) -> int:
    """Export, and return the exit code."""
    options = parser.parse_args(arguments)
    is_peft = options.format == PEFT
    for_peft = {"--config": options.config, "--adapter": options.adapter}
    for_others = {"--names": options.names, "--shard-bytes": options.shard_bytes, "--optimizer": options.optimizer}
    for name, value in (for_others if is_peft else for_peft).items():
        if value:
            raise UsageError(f"{name} is {'not ' if is_peft else ''}for --format {PEFT}")
    ways: dict[str, Any] = {"force": options.force, "progress": byte_progress}
    if not is_peft:
        ways |= {name: getattr(options, name) for name in ("format", "names", "shard_bytes", "optimizer")}
        done = export_checkpoint(options.file, options.out, **ways)
    elif options.config:
        done = export_peft(options.file, options.out, options.config, adapter=options.adapter or "default", **ways)
    else:
        raise UsageError(
            f"--format {PEFT} needs --config {CONFIG_NAME}, which peft_model.peft_config['default']"
            ".save_pretrained(folder) writes"
        )
    facts = {
        "format": done.format,
        "files": [str(path) for path in done.files],
        "tensors": done.tensors,
        "bytes": done.nbytes,
        "tied_names": dict(done.ties),
    }
    rows = [
        ("format", done.format),
        ("tensors", done.tensors),
        ("bytes", f"{done.nbytes} ({readable_bytes(done.nbytes)})"),
        *(("file", path) for path in done.files),
        *(("tied name", f"{alias} = {name}") for alias, name in done.ties.items()),
    ]
    print_result(options.json, facts, ("what", "value"), rows, text=("value",))
    return 0
