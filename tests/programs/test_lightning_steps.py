"""Steps of Lightning's Trainer with the strategy that shards: precision, and manual optimization."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision as Autocast
from lightning.pytorch.plugins.environments import LightningEnvironment, MPIEnvironment
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpcfsdp.errors import EngineError, UsageError
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardedGradScaler
from hpcfsdp.integrations.lightning import HpcfsdpStrategy, ModelCheckpoint
from tests.programs.lightning_programs import *  # noqa: F403
from tests.programs.lightning_programs import Block, Classifier, Curves, close, data, sharded, trainer_of

SIZE = MPIEnvironment().world_size()
ALONE = {"devices": 1, "plugins": [LightningEnvironment()]}


class Seen(Classifier):
    """Notes dtypes within a step."""

    def training_step(self, batch, index):
        self.dtypes = {"weight": self.model[0].weight.dtype, "scores": self(batch[0]).dtype}
        return super().training_step(batch, index)


def fit(folder, strategy, ranks, **options):
    torch.manual_seed(0)
    curves, module = Curves(), Seen()
    trainer = trainer_of(folder, strategy, callbacks=[curves], **options)
    trainer.fit(module, data(ranks, train=True), data(ranks))
    return curves.values, module, trainer


def near(values, expected):
    """Numbers of a training in 8 bits of precision."""
    torch.testing.assert_close(values, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("precision, kept", [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_bf16(shared_path, tmp_path, precision, kept):
    expected, *_ = fit(tmp_path, "auto", 1, precision=precision, **ALONE)
    values, module, trainer = fit(shared_path, sharded(), SIZE, precision=precision)
    near(values, expected)
    assert module.dtypes == {"weight": torch.bfloat16, "scores": torch.bfloat16}
    assert {param.dtype for param in trainer.model.parameters()} == {kept}
    if precision == "bf16-mixed":
        assert trainer.model.mixed_precision == MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def test_64_true(shared_path, tmp_path):
    expected, *_ = fit(tmp_path, "auto", 1, precision="64-true", **ALONE)
    values, module, _ = fit(shared_path, sharded(), SIZE, precision="64-true")
    close(values, expected)
    assert module.dtypes == {"weight": torch.float64, "scores": torch.float64}


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # overflow skips all steps of an epoch
def test_16_mixed_scales_gradients_alike_on_all_ranks(shared_path, tmp_path):
    expected, *_ = fit(tmp_path, "auto", 1, **ALONE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)  # the first steps overflow
    plugin = Autocast("16-mixed", "cpu", scaler)
    values, module, trainer = fit(shared_path, sharded(), SIZE, plugins=[plugin], max_epochs=8)
    assert module.dtypes == {"weight": torch.float16, "scores": torch.float16}
    assert isinstance(trainer.scaler, ShardedGradScaler)
    scale = trainer.strategy.broadcast(trainer.scaler.get_scale())
    assert trainer.scaler.get_scale() == scale < 2.0**40
    assert all(map(torch.isfinite, map(torch.tensor, values)))
    near(values[0], expected[0])


def test_mixed_precision_of_the_strategy(shared_path, tmp_path):
    expected, *_ = fit(tmp_path, "auto", 1, **ALONE)
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    values, module, _ = fit(shared_path, sharded(mixed_precision=mixed), SIZE)
    near(values, expected)
    assert module.dtypes["weight"] == torch.bfloat16
    with pytest.raises(
        UsageError, match=r"precision='bf16-mixed'\) and HpcfsdpStrategy\(mixed_precision=...\): give one"
    ):
        trainer_of(shared_path, sharded(mixed_precision=mixed), precision="bf16-mixed")


class Adversaries(LightningModule):
    """Two networks, and an optimizer for each."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters({"width": 8, "names": ("generator", "critic")})
        self.generator = nn.Sequential(nn.Linear(3, 8), Block(8), nn.Linear(8, 5))
        self.critic = nn.Sequential(nn.Linear(5, 8), Block(8), nn.Linear(8, 1))
        self.losses = []

    def forward(self, noise):
        return self.generator(noise)

    def training_step(self, batch, index):
        real, noise = batch
        for optimizer, scheduler, loss_of in zip(
            self.optimizers(), self.lr_schedulers(), (self.generator_loss, self.critic_loss), strict=True
        ):
            self.toggle_optimizer(optimizer)
            loss = loss_of(real, noise)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))

    def generator_loss(self, real, noise):
        return (self.critic(self(noise)) - 1).square().mean()

    def critic_loss(self, real, noise):
        return self.critic(self(noise).detach()).square().mean() + (self.critic(real) - 1).square().mean()

    def configure_optimizers(self):
        one = torch.optim.Adam(self.generator.parameters(), lr=1e-2, eps=1e-4)
        other = torch.optim.SGD(self.critic.parameters(), lr=1e-1, momentum=0.9)
        schedulers = [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5) for optimizer in (one, other)]
        return [one, other], schedulers


class OneOptimizer(Adversaries):
    """Clips two sharded networks by one norm."""

    def training_step(self, batch, index):
        optimizer, loss = self.optimizers(), self.generator_loss(*batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4)


def pairs(ranks):
    rows = TensorDataset(*torch.randn(24, 8, generator=torch.Generator().manual_seed(3)).split([5, 3], dim=1))
    sampler = DistributedSampler(rows, num_replicas=1, rank=0) if ranks == 1 else None
    return DataLoader(rows, batch_size=12 // ranks, sampler=sampler)


def compete(folder, strategy, ranks, kind=Adversaries, resume=None, **options):
    torch.manual_seed(0)
    module = kind()
    trainer = trainer_of(folder, strategy, **options)
    trainer.fit(module, pairs(ranks), ckpt_path=resume)
    return module.losses, trainer


@pytest.mark.parametrize("kind", [Adversaries, OneOptimizer])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_manual_optimization(shared_path, tmp_path, kind, original):
    expected, alone = compete(tmp_path, "auto", 1, kind, **ALONE)
    losses, trainer = compete(shared_path, sharded(use_orig_params=original), SIZE, kind)
    close(losses, expected)
    close(dict(trainer.model.state_dict()), dict(alone.model.state_dict()))
    assert isinstance(trainer.lightning_module.generator, FSDP)


def test_several_optimizers_go_on(shared_path, tmp_path):
    expected, alone = compete(tmp_path, "auto", 1, **ALONE)
    saver = ModelCheckpoint(shared_path, save_last=True)
    kept = {"enable_checkpointing": True}
    first, _ = compete(shared_path, sharded(), SIZE, max_epochs=1, callbacks=[saver], **kept)
    then, trainer = compete(shared_path, sharded(), SIZE, resume=saver.last_model_path, callbacks=[saver], **kept)
    close(first + then, expected)
    close(dict(trainer.model.state_dict()), dict(alone.model.state_dict()))
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    assert [scheduler.milestones.total() for scheduler in schedulers] == [2, 2]


class OwnParameter(Adversaries):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Listed(OneOptimizer):
    """Keeps its networks in a list, which has no forward."""

    def __init__(self):
        super().__init__()
        self.networks = nn.ModuleList([self.generator, self.critic])
        del self.generator, self.critic

    def generator_loss(self, real, noise):
        generator, critic = self.networks
        return (critic(generator(noise)) - 1).square().mean()


def test_manual_optimization_of_a_list(shared_path, tmp_path):
    expected, _ = compete(tmp_path, "auto", 1, Listed, **ALONE)
    losses, trainer = compete(shared_path, sharded(), SIZE, Listed)
    close(losses, expected)
    assert all(isinstance(network, FSDP) for network in trainer.lightning_module.networks)


def test_manual_optimization_of_an_own_parameter(shared_path):
    with pytest.raises(EngineError, match="has the parameter 'scale' itself"):
        trainer_of(shared_path, HpcfsdpStrategy()).fit(OwnParameter(), pairs(SIZE))
