"""Lightning's Trainer over MPI: its own DDPStrategy with the backend hpcmpi, and the strategy that shards.

What comes out is what Lightning gives in one process that takes the batches of all ranks.
"""

import dataclasses
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint as LightningModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment, MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import hpcfsdp.mpi  # noqa: F401, the backend
from hpcfsdp import accelerator
from hpcfsdp.errors import HpcfsdpError, LaunchError, UsageError
from hpcfsdp.fsdp import CPUOffload, FullyShardedDataParallel as FSDP, ShardingStrategy
from hpcfsdp.integrations.lightning import (
    HpcfsdpStrategy,
    ModelCheckpoint,
    MPIClusterEnvironment,
    strategy as strategy_module,
)
from hpcfsdp.launch import job
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.programs.lightning_programs import *  # noqa: F403
from tests.programs.lightning_programs import Block, Classifier, Curves, close, data, sharded, trainer_of

CPU = torch.device("cpu")
SIZE = MPIEnvironment().world_size()


def fit(folder, strategy, ranks, epochs=2, resume=None, module=None, save=ModelCheckpoint, **options):
    """The curves of a training, its trainer, and the path of its last checkpoint."""
    torch.manual_seed(0)
    curves = Curves()
    saver = save(folder, monitor="val_loss", filename="best", save_last=True, save_top_k=1)
    options = {"gradient_clip_val": 0.5, "max_epochs": epochs, "enable_checkpointing": True, **options}
    trainer = trainer_of(folder, strategy, callbacks=[curves, saver], **options)
    trainer.fit(module or Classifier(), data(ranks, train=True), data(ranks), ckpt_path=resume)
    return curves.values, trainer, saver.last_model_path


def alone(folder, **options):
    """Curves and state of one process."""
    values, trainer, _ = fit(
        folder, "auto", 1, save=LightningModelCheckpoint, devices=1, plugins=[LightningEnvironment()], **options
    )
    assert not dist.is_initialized()
    return values, trainer.model.state_dict()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return alone(tmp_path_factory.mktemp("alone"))


def test_data_parallel(shared_path, expected):
    strategy = DDPStrategy(process_group_backend="hpcmpi")
    values, trainer, _ = fit(shared_path, strategy, SIZE, save=LightningModelCheckpoint, devices=SIZE)
    assert dist.get_backend() == "hpcmpi" or SIZE == 1
    close(values, expected[0])
    close(trainer.lightning_module.state_dict(), expected[1])


def test_data_parallel_goes_on(shared_path, expected):
    given = {"save": LightningModelCheckpoint, "devices": SIZE}
    first, _, last = fit(shared_path, DDPStrategy(process_group_backend="hpcmpi"), SIZE, epochs=1, **given)
    then, trainer, _ = fit(shared_path, DDPStrategy(process_group_backend="hpcmpi"), SIZE, resume=last, **given)
    close(first + then, expected[0])
    close(trainer.lightning_module.state_dict(), expected[1])


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_sharded_and_resumed(shared_path, expected, original):
    first, _, last = fit(shared_path, sharded(use_orig_params=original), SIZE, epochs=1)
    then, trainer, _ = fit(shared_path, sharded(use_orig_params=original), SIZE, resume=last)
    close(first + then, expected[0])
    close(dict(trainer.model.state_dict()), dict(expected[1]))
    assert (
        sum(param.numel() for param in trainer.model.parameters()) < 3 * sum(map(torch.numel, expected[1].values())) / 4
    )
    (again,) = trainer.validate(trainer.lightning_module, data(SIZE), verbose=False)
    close(again["val_loss"], expected[0][-2])
    (again,) = trainer.test(trainer.lightning_module, data(SIZE), verbose=False)
    close(again["accuracy"], expected[0][-1])


@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"cpu_offload": True},
        {"cpu_offload": CPUOffload(offload_params=True), "forward_prefetch": True},
        {"auto_wrap_policy": {Block, nn.Linear}, "sync_module_states": False},
        {"auto_wrap_policy": None},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(shared_path, expected, options):
    strategy = HpcfsdpStrategy(**{"auto_wrap_policy": ModuleWrapPolicy({Block}), **options})
    values, trainer, _ = fit(shared_path, strategy, SIZE, accelerator="auto", devices="auto", num_nodes=1)
    close(values, expected[0])
    close(dict(trainer.model.state_dict()), dict(expected[1]))
    if "sharding_strategy" in options:
        assert trainer.model.sharding_strategy.name in ("SHARD_GRAD_OP", "NO_SHARD")


def test_values_of_rank_0_count(shared_path, expected):
    torch.manual_seed(0)
    module = Classifier()
    if MPIEnvironment().global_rank():
        with torch.no_grad():
            module.model[0].weight.add_(1)
    values, *_ = fit(shared_path, sharded(), SIZE, module=module)
    close(values, expected[0])


def test_the_number_of_processes_comes_from_mpi(shared_path):
    trainer = trainer_of(shared_path, sharded(), devices=SIZE)
    assert (trainer.world_size, trainer.num_devices, trainer.num_nodes) == (SIZE, SIZE, 1)
    environment = MPIClusterEnvironment()
    assert (environment.world_size(), environment.local_size()) == (SIZE, SIZE)
    assert environment.local_rank() == environment.global_rank() == trainer.global_rank
    assert MPIClusterEnvironment.detect() == (SIZE > 1)


def test_a_rank_that_sees_one_device_uses_it(monkeypatch):
    given, (device, other) = [], (torch.device("cuda", n) for n in range(2))
    monkeypatch.setattr(accelerator, "device_type", lambda: "cuda")
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(
        strategy_module.hpcfsdp, "init", lambda wanted: given.append(wanted) or SimpleNamespace(device=CPU)
    )
    strategy = HpcfsdpStrategy()
    strategy.parallel_devices = [device]
    assert strategy.root_device == device
    with pytest.raises(LaunchError, match="give Trainer"):
        strategy.setup_environment()
    assert given == ["cuda"]  # the one next to the rank's cores
    # What hpcfsdp.init has chosen counts, where it is of the same kind.
    for chosen, expected in ((other, other), (CPU, device)):
        monkeypatch.setattr(strategy_module, "current_world", lambda chosen=chosen: SimpleNamespace(device=chosen))
        assert strategy.root_device == expected


def test_a_strategy_of_other_ranks_is_refused(shared_path, monkeypatch):
    trainer = trainer_of(shared_path, sharded())
    monkeypatch.setattr(job, "_job", dataclasses.replace(job.current_job()))  # as where ranks were lost, or are spares
    with pytest.raises(LaunchError, match=f"for other ranks, as rank .* of {SIZE}.* within the function"):
        trainer.fit(Classifier(), data(SIZE, train=True), data(SIZE))


def test_numbers_that_contradict_mpi(shared_path):
    with pytest.raises(LaunchError, match=rf"devices={SIZE + 3}\), but MPI started {SIZE} process.*leave devices"):
        trainer_of(shared_path, sharded(), devices=SIZE + 3)
    with pytest.raises(LaunchError, match=r"num_nodes=7\), but MPI has its .* on 1 node.*leave devices and num_nodes"):
        trainer_of(shared_path, sharded(), num_nodes=7)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": None},
    ],
    ids=["accumulate", "value", "no clipping"],
)
def test_gradients(shared_path, tmp_path, options):
    expected = alone(tmp_path, **options, max_epochs=4)
    values, trainer, _ = fit(shared_path, sharded(), SIZE, **options, max_epochs=4)
    close(values, expected[0])
    close(dict(trainer.model.state_dict()), dict(expected[1]))


def test_gradients_are_reduced_once_for_accumulated_batches(shared_path, monkeypatch):
    entered = []
    no_sync = FSDP.no_sync
    monkeypatch.setattr(FSDP, "no_sync", lambda self: entered.append(self) or no_sync(self))
    (*_,) = fit(shared_path, sharded(), SIZE, accumulate_grad_batches=2)
    assert len(entered) == 2  # of two batches in each of two epochs


def test_predict(shared_path, expected):
    _, trainer, _ = fit(shared_path, sharded(), SIZE)
    found = torch.cat(trainer.predict(trainer.lightning_module, data(SIZE)))
    plain = Classifier()
    plain.load_state_dict(expected[1])
    rows = torch.cat([x for x, _ in data(1)])[trainer.global_rank :: SIZE]
    with torch.no_grad():
        close(found, plain(rows))


class ByHand(Classifier):
    """Its submodules are wrapped where Lightning builds large models."""

    def configure_model(self):
        for index in (1, 2):
            if not isinstance(self.model[index], FSDP) and dist.is_initialized():
                self.model[index] = FSDP(self.model[index], use_orig_params=True)


def test_configure_model(shared_path, expected):
    torch.manual_seed(0)
    values, trainer, last = fit(shared_path, HpcfsdpStrategy(), SIZE, module=ByHand())
    close(values, expected[0])
    close(dict(trainer.model.state_dict()), dict(expected[1]))
    trainer.validate(trainer.lightning_module, data(SIZE), verbose=False, ckpt_path=last)
    assert sum(isinstance(module, FSDP) for module in trainer.model.modules()) == 3


def test_messages(shared_path):
    _, trainer, _ = fit(shared_path, sharded(), SIZE, epochs=1)
    strategy, rank = trainer.strategy, trainer.global_rank
    total = SIZE * (SIZE - 1) // 2
    mean = strategy.reduce(torch.tensor([rank, 7]))
    assert mean.tolist() == [total // SIZE, 7] and not mean.is_floating_point()
    close(strategy.reduce(torch.tensor(float(rank)), reduce_op="avg"), torch.tensor(total / SIZE))
    assert strategy.reduce(torch.tensor(rank), reduce_op="sum") == total
    assert strategy.reduce(torch.tensor(rank), reduce_op="max") == SIZE - 1
    assert strategy.reduce("text") == "text"
    with pytest.raises(UsageError, match="reduce_op='median': use 'mean'"):
        strategy.reduce(torch.tensor(rank), reduce_op="median")
    assert strategy.broadcast({"rank": rank}, src=SIZE - 1) == {"rank": SIZE - 1}
    close(trainer.lightning_module.all_gather(torch.tensor([float(rank)])).flatten(), torch.arange(float(SIZE)))
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert strategy.reduce_boolean_decision(rank == 0) == (SIZE == 1)
    strategy.barrier("here")


class OneLoss(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sync_batchnorm": True}, "convert the module in configure_model"),
        ({"callbacks": [ModelCheckpoint(save_on_exception=True)]}, "saves on an exception"),
        ({"callbacks": [pl.callbacks.OnExceptionCheckpoint(".")]}, "saves on an exception"),
        ({"callbacks": [pl.callbacks.StochasticWeightAveraging(1e-2)]}, "average checkpoint files"),
        ({"plugins": [pl.plugins.TorchCheckpointIO()]}, "leave the plugin TorchCheckpointIO out"),
        ({"plugins": [pl.plugins.FSDPPrecision("bf16-mixed")]}, "FSDPPrecision: use precision="),
        ({"module": OneLoss}, "LBFGS"),
        ({"strategy": {"auto_wrap_polcy": None}}, "no such argument; did you mean 'auto_wrap_policy'"),
        ({"strategy": {"sharding_strategy": "FULL"}}, "use one of FULL_SHARD"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported(shared_path, options, message):
    given = {"enable_checkpointing": True, **options}
    make, strategy = given.pop("module", Classifier), given.pop("strategy", {})
    with pytest.raises(HpcfsdpError, match=message):
        trainer_of(shared_path, HpcfsdpStrategy(**strategy), **given).fit(make(), data(SIZE, train=True), data(SIZE))


def test_a_module_keeps_its_options(shared_path):
    module = Classifier()
    trainer_of(shared_path, sharded()).validate(module, data(SIZE), verbose=False)
    trainer_of(shared_path, sharded()).validate(module, data(SIZE), verbose=False)
    with pytest.raises(UsageError, match=r"sharded before with use_orig_params=True.* False"):
        trainer_of(shared_path, sharded(use_orig_params=False)).validate(module, data(SIZE), verbose=False)
