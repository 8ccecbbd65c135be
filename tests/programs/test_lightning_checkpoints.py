"""Checkpoint files of Lightning's Trainer with the strategy that shards, and jobs that are stopped and go on."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint as LightningModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment, MPIEnvironment
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.cli.main import main
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, UsageError
from hpcfsdp.integrations.lightning import ModelCheckpoint, Requeue
from tests.programs.lightning_programs import *  # noqa: F403
from tests.programs.lightning_programs import Classifier, close, data, sharded, trainer_of

SIZE, RANK = MPIEnvironment().world_size(), MPIEnvironment().global_rank()


class Named(Classifier):
    def __init__(self, width=8, names=("a", "b")):
        super().__init__()
        self.save_hyperparameters()


def fit(folder, *savers, module=None, resume=None, **options):
    torch.manual_seed(0)
    module = module or Named()
    trainer = trainer_of(folder, sharded(), callbacks=list(savers), **{"enable_checkpointing": True, **options})
    trainer.fit(module, data(SIZE, train=True), data(SIZE), ckpt_path=resume)
    return trainer


@pytest.fixture
def saved(shared_path):
    saver = ModelCheckpoint(shared_path, monitor="val_loss", save_top_k=2, save_last=True)
    return fit(shared_path, saver, max_epochs=4), saver


def test_a_file_holds_all(shared_path, saved, capsys):
    trainer, saver = saved
    assert sorted(path.name for path in shared_path.iterdir()) == ["epoch=2-step=6.h5", "epoch=3-step=8.h5", "last.h5"]
    index = checkpoint.open_index(saver.last_model_path)
    assert (index.info.step, index.info.world_size) == (8, SIZE)
    assert index.info.extra["hyper_parameters"] == {"width": 8, "names": ["a", "b"]}
    assert index.info.extra["pytorch-lightning_version"]
    assert "optim/state/model.1.linear.weight/exp_avg" in index.tensors
    for words in (["ls"], ["show"], ["verify"]):
        assert main([*words, saver.last_model_path]) == 0
    assert "model.1.linear.weight" in capsys.readouterr().out
    plain = Named()
    checkpoint.load(saver.last_model_path, model=plain)
    close(dict(plain.state_dict()), dict(trainer.model.state_dict()))


def test_best_and_last(shared_path, saved):
    trainer, saver = saved
    for which, score in (("best", float(saver.best_model_score)), ("last", float(saver.current_score))):
        (found,) = trainer.test(Named(), data(SIZE), ckpt_path=which, verbose=False)
        assert found["val_loss"] == pytest.approx(score, rel=1e-5)
    again = ModelCheckpoint(shared_path, monitor="val_loss", save_top_k=2, save_last=True)
    trainer = fit(shared_path, again, max_epochs=5, resume="last")
    assert trainer.global_step == 10
    assert isinstance(again.best_model_score, torch.Tensor)
    assert len(again.best_k_models) == 2


def test_names_of_lightning_hold_hdf5_too(shared_path, capsys):
    saver = LightningModelCheckpoint(shared_path, filename="it")
    trainer = fit(shared_path, saver, max_epochs=1)
    assert main(["show", str(shared_path / "it.ckpt")]) == 0
    assert "hyper_parameters" in capsys.readouterr().out
    trainer.validate(Named(), data(SIZE), ckpt_path="best", verbose=False)


def test_weights_only(shared_path):
    saver = ModelCheckpoint(shared_path, save_weights_only=True)
    trainer = fit(shared_path, saver, max_epochs=1)
    assert checkpoint.open_index(saver.best_model_path).param_groups is None
    trainer.test(Named(), data(SIZE), ckpt_path="best", verbose=False)
    with pytest.raises(CheckpointMismatchError, match=r"has no optimizer, as after save_weights_only=True.*start anew"):
        fit(shared_path, resume=saver.best_model_path)
    assert Requeue(shared_path / "none").resume_path() is None


class Milestones(Named):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)]

    def on_save_checkpoint(self, found):
        found["mine"] = {"betas": (0.9, 0.99), "bytes": b"x", 3: torch.arange(2)}

    def on_load_checkpoint(self, found):
        self.found = found["mine"]


def test_types_of_values_survive(shared_path):
    saver = ModelCheckpoint(shared_path, save_last=True)
    fit(shared_path, saver, module=Milestones(), max_epochs=2)
    module = Milestones()
    trainer = fit(shared_path, saver, module=module, max_epochs=4, resume=saver.last_model_path)
    assert module.found["betas"] == (0.9, 0.99) and module.found["bytes"] == b"x"
    assert torch.equal(module.found[3], torch.arange(2))
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.milestones == Counter([1, 3]) and scheduler.get_last_lr() == [0.1 * 0.5**2]


class Adds(Named):
    def on_save_checkpoint(self, found):
        found["state_dict"]["mine"] = torch.ones(1)


def test_values_that_a_file_cannot_hold(shared_path):
    saver = ModelCheckpoint(shared_path)
    with pytest.raises(
        CheckpointError, match=r"'hyper_parameters'\['names'\] is a .*; self.save_hyperparameters\(ignore"
    ):
        fit(shared_path, saver, module=Named(names=Path("x")))
    with pytest.raises(CheckpointError, match="use an entry of another name"):
        fit(shared_path, saver, module=Adds())
    with pytest.raises(UsageError, match=r"storage_options=.* is not supported"):
        fit(shared_path, max_epochs=1).save_checkpoint(shared_path / "x.h5", storage_options={"a": 1})


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks")  # the other Trainer had one
def test_a_file_of_torch_save(shared_path, tmp_path):
    module = Named()
    saver = LightningModelCheckpoint(tmp_path, monitor="val_loss")
    trainer = trainer_of(
        tmp_path,
        "auto",
        devices=1,
        plugins=[LightningEnvironment()],
        max_epochs=1,
        callbacks=[saver],
        enable_checkpointing=True,
    )
    trainer.fit(module, data(1), data(1))
    (expected,) = trainer.test(module, data(1), verbose=False)
    trainer.save_checkpoint(tmp_path / "it.ckpt")  # rank 0's folder is the shared one
    for resume in (lambda path: fit(shared_path, resume=path), lambda path: _test(shared_path, path)):
        MPIEnvironment()._comm_world.Barrier()
        with pytest.raises(CheckpointCorruptError, match=r"convert it with hpcfsdp import .*it.ckpt .*it.h5"):
            resume(shared_path / "it.ckpt")
    if RANK == 0:
        assert main(["import", str(shared_path / "it.ckpt"), str(shared_path / "it.h5")]) == 0
    (found,) = _test(shared_path, shared_path / "it.h5")
    if RANK == 0:  # whose file it is
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    with pytest.raises(CheckpointMismatchError, match="has no optimizer"):
        fit(shared_path, resume=shared_path / "it.h5")


def _test(folder, path):
    return trainer_of(folder, sharded()).test(Named(), data(SIZE), ckpt_path=path, verbose=False)


class Batches:
    """Batches of this rank that go on where they were: as data loaders with a state."""

    def __init__(self, rank, ranks, count=5):
        self.rank, self.ranks, self.count, self.next = rank, ranks, count, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        self.next %= self.count  # the Trainer does not ask for more than it has been promised
        while self.next < self.count:
            self.next += 1
            rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(self.next))
            yield rows.chunk(self.ranks)[self.rank]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), []

    def training_step(self, batch, index):
        loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.losses.append((self.global_step, float(self.trainer.strategy.reduce(loss.detach()))))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4)


class Kill(Callback):
    """Sends a signal to the last rank. Steps take as long as it takes that ranks ask each other after each of them."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer, module, batch, index):
        time.sleep(0.1)
        if RANK == SIZE - 1 and trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def handlers():
    """Signals end the process again after the test."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def regress(folder, strategy, ranks, *callbacks, resume=None, **options):
    torch.manual_seed(0)
    module = Regression()
    trainer = trainer_of(folder, strategy, callbacks=list(callbacks), **{"max_epochs": 3, **options})
    trainer.fit(module, Batches(RANK if ranks > 1 else 0, ranks), ckpt_path=resume)
    return module.losses, trainer.model


@pytest.mark.parametrize("number, step", [(signal.SIGTERM, 7), (signal.SIGUSR2, 8), (signal.SIGUSR1, 9)])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_signal_to_one_rank_loses_nothing(shared_path, tmp_path, handlers, number, step, accumulated):
    given = {"accumulate_grad_batches": accumulated}
    step //= accumulated
    expected, plain = regress(tmp_path, "auto", 1, devices=1, plugins=[LightningEnvironment()], **given)
    requeue = Requeue(shared_path)
    assert requeue.resume_path() is None
    with pytest.raises(SystemExit) as left:
        regress(shared_path, sharded(), SIZE, Kill(step, number), requeue, **given)
    assert left.value.code == 75
    again = Requeue(shared_path)
    path = again.resume_path()
    assert Path(path).name == "requeue.h5"
    stopped = checkpoint.open_index(path).info.step
    assert stopped in (step + 1, step + 2)
    losses, model = regress(shared_path, sharded(), SIZE, again, resume=path, **given)
    assert losses[0][0] == stopped
    close([loss for _, loss in losses], [loss for at, loss in expected if at >= stopped])
    close(dict(model.state_dict()), dict(plain.state_dict()))


def test_the_file_with_the_most_steps_counts(shared_path, handlers, caplog):
    fit(shared_path, ModelCheckpoint(shared_path, save_top_k=-1, monitor="val_loss"), max_epochs=2)
    if RANK == 0:
        (shared_path / "broken.h5").write_bytes(b"x" * 100)
        (shared_path / "notes.txt").write_text("x")
    assert Path(Requeue(shared_path).resume_path()).name == "epoch=1-step=4.h5"
    assert ("broken.h5" in caplog.text) == (RANK == 0)
