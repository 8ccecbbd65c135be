"""Runs of torchtitan's trainer on CPUs: debug models of two layers, tokens drawn by step and rank, losses printed.

It takes what torch.distributed.run and ``python -m hpcfsdp.run`` give a program, and asks for neither. What torchtitan
finds on a GPU but not here stands in for it: the memory statistics of the device, and torch's ``set_timeout``, which
is newer than 2.13. Attention is torch's SDPA, as FlexAttention has no backward on CPUs.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._utils
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "cpu"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.current_device = lambda: 0
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda timeout, group=None: None

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.quantization import Float8LinearConverter  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models import deepseek_v3, llama3  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.deepseek_v3 import config_registry as of_deepseek_v3  # noqa: E402
from torchtitan.models.llama3 import config_registry as of_llama3  # noqa: E402

from hpcfsdp.checkpoint import HDF5Reader, HDF5Writer  # noqa: E402


class Tokens(BaseDataLoader):
    """Tokens of a known number for each step and rank, also after a restart."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        self.shape, self.rank, self.step = (local_batch_size, seq_len + 1), dp_rank, 0

    def __iter__(self):
        while True:
            self.step += 1
            seeded = torch.Generator().manual_seed(1000 * self.step + self.rank)
            tokens = torch.randint(2048, self.shape, generator=seeded)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self):
        return {"batches": self.step}

    def load_state_dict(self, state):
        self.step = state["batches"]


class FolderWriter(HDF5Writer):
    """Writes checkpoint.h5 into the folder of a step, and the mark that torchtitan looks for."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True

    def reset(self, checkpoint_id=None):
        self.folder = Path(checkpoint_id)
        super().reset(self.folder / "checkpoint.h5")

    def finish(self, metadata, results):
        super().finish(metadata, results)
        (self.folder / ".metadata").touch()


class FolderReader(HDF5Reader):
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return super().validate_checkpoint_id(Path(checkpoint_id) / "checkpoint.h5")

    def reset(self, checkpoint_id=None):
        super().reset(Path(checkpoint_id) / "checkpoint.h5")


class HDF5Manager(CheckpointManager):
    """Saves and resumes through hpcfsdp's storage; initial weights come as torch's."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def dcp_save(self, state_dict, checkpoint_id, *_, **__):
        dcp.save(state_dict, storage_writer=FolderWriter(), checkpoint_id=checkpoint_id)

    def dcp_load(self, state_dict, checkpoint_id, *others, **named):
        if not (Path(checkpoint_id) / "checkpoint.h5").exists():
            super().dcp_load(state_dict, checkpoint_id, *others, **named)
            return
        dcp.load(state_dict, storage_reader=FolderReader(), checkpoint_id=checkpoint_id)
        self.states["model"].load_state_dict(state_dict)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return 2048


class Printed(MetricsProcessor):
    """All digits of what torchtitan logs."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config, *, dump_folder, **others):
        super().__init__(config, dump_folder=dump_folder, **others)
        self.folder = dump_folder

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if dist.get_rank() == 0:
            print(self.folder, step, repr(global_avg_loss), repr(global_max_loss), repr(grad_norm), flush=True)


def parsed(run):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="for the run's files")
    parser.add_argument("--model", default="llama3")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--weights", help="a checkpoint of initial weights")
    parser.add_argument("--save-weights", action="store_true", help="make such a checkpoint instead of training")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--hdf5", action="store_true")
    parser.add_argument("--float8", action="store_true")
    for name in ("replicate", "tp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    return parser.parse_args(run.split())


def configured(run):
    module, registry = (llama3, of_llama3) if run.model == "llama3" else (deepseek_v3, of_deepseek_v3)
    config = getattr(registry, f"{run.model}_debugmodel")()
    if run.float8:
        converter = Float8LinearConverter.Config(emulate=True, model_compile_enabled=False)
        config.model_spec = module.model_registry("debugmodel", converters=[converter])
    model = config.model_spec.model
    del model.layers[2:]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.dump_folder = run.folder
    config.dataloader, config.tokenizer = Tokens.Config(), NoTokenizer.Config()
    config.metrics = Printed.Config(log_freq=1, enable_tensorboard=True)
    config.validator.enable = False
    training, parallelism = config.training, config.parallelism
    training.local_batch_size, training.seq_len, training.steps = 2, 16, run.steps
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", True
    parallelism.spmd_backend = "partial_dtensor"
    parallelism.data_parallel_replicate_degree = run.replicate
    parallelism.tensor_parallel_degree = run.tp
    parallelism.expert_parallel_degree = run.ep
    config.debug.seed = 0
    config.checkpoint = (HDF5Manager if run.hdf5 else CheckpointManager).Config(
        enable=True,
        interval=run.save_every or 1000,
        last_save_model_only=False,
        create_seed_checkpoint=run.save_weights,
        initial_load_path=run.weights and os.path.abspath(run.weights),
        load_only=not (run.save_weights or run.save_every),
    )
    return config


for run in map(parsed, sys.argv[1:]):
    trainer = configured(run).build()
    if dist.get_backend() == "gloo":  # which cannot scale what it sums; the factor is 1
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    if dist.get_rank() == 0:
        print(run.folder, "0", type(trainer.model_parts[0]).__mro__[1].__module__, flush=True)
    if run.save_weights:
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.train()
    trainer.close()
dist.destroy_process_group()
