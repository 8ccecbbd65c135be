"""Lightning Fabric with the strategy that shards, next to a loop in one process."""

import itertools

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcfsdp import checkpoint
from hpcfsdp.errors import CheckpointCorruptError, CheckpointMismatchError, LaunchError, UsageError
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.integrations.lightning import HpcfsdpFabricStrategy, HpcfsdpStrategy
from tests.programs.lightning_programs import Block

ROWS, BATCH, STEPS = 24, 8, 3
POLICY = {"auto_wrap_policy": {Block}}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), Block(8), Block(8), nn.Linear(8, 3))


def rows():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator))


def stepped(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)


def alone(max_norm=0.3, clip_val=None, accumulated=1, steps=STEPS):
    model = net()
    optimizer, norms = stepped(model), []
    batches = itertools.islice(iter(DataLoader(rows(), BATCH)), steps * accumulated)
    for number, (x, y) in enumerate(batches):
        (nn.functional.mse_loss(model(x), y) / accumulated).backward()
        if (number + 1) % accumulated:
            continue
        if clip_val is None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        else:
            nn.utils.clip_grad_value_(model.parameters(), clip_val)
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def started(strategy="hpcfsdp", **options):
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, **options)
    fabric.launch()
    return fabric


def strided(fabric):
    """So that ranks together have the rows of a batch of one process."""
    return fabric.setup_dataloaders(DataLoader(rows(), BATCH // fabric.world_size))


def together(fabric, model, optimizer, batches, max_norm=0.3, clip_val=None, accumulated=1):
    norms = []
    for number, (x, y) in enumerate(batches):
        goes_on = bool((number + 1) % accumulated)
        with fabric.no_backward_sync(model, enabled=goes_on):
            fabric.backward(nn.functional.mse_loss(model(x), y) / accumulated)
        if goes_on:
            continue
        if clip_val is None:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=max_norm))
        else:
            fabric.clip_gradients(model, optimizer, clip_val=clip_val)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def whole(model):
    return dict(model._forward_module.state_dict())


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("manner", [{}, {"clip_val": 0.01}, {"accumulated": 3}], ids=["norm", "value", "accumulation"])
@pytest.mark.parametrize("strategy", ["hpcfsdp", HpcfsdpFabricStrategy], ids=["name", "object"])
def test_trains_as_one_process(world, strategy, manner):
    fabric = started(strategy if isinstance(strategy, str) else strategy(**POLICY))
    assert (fabric.world_size, fabric.global_rank) == (world.size, world.rank)
    plain = net()
    model, optimizer = fabric.setup(plain, stepped(plain))
    assert isinstance(model._forward_module, FSDP)
    assert len(FSDP.fsdp_modules(model._forward_module)) == (1 if strategy == "hpcfsdp" else 3)
    norms, state = alone(**manner, steps=1 if "accumulated" in manner else STEPS)
    close(together(fabric, model, optimizer, strided(fabric), **manner), norms)
    close(whole(model), dict(state))


def test_saves_and_loads(world, shared_path):
    """Everything in a state, by a loop that is interrupted after two of three steps."""
    fabric, path = started(HpcfsdpFabricStrategy(**POLICY)), shared_path / "state.h5"

    def prepared():
        plain = net()
        model, optimizer = fabric.setup(plain, stepped(plain))
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.1)
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0, "curve": [(1, 2.0)]}

    state = prepared()
    together(fabric, state["model"], state["optimizer"], itertools.islice(strided(fabric), 2))
    state["schedule"].step()
    state |= {"step": 2, "curve": [(1, 2.0), (2, torch.tensor(1.5))]}
    fabric.save(path, state)
    assert checkpoint.open_index(path).info.step == 2
    again = prepared()
    given = {key: again[key] for key in ("model", "optimizer", "schedule", "step")}
    assert fabric.load(path, given) == {"curve": [(1, 2.0), (2, torch.tensor(1.5))]}
    assert given["step"] == 2
    assert again["schedule"].state_dict() == state["schedule"].state_dict()
    together(fabric, again["model"], again["optimizer"], itertools.islice(strided(fabric), 2, None))
    close(whole(again["model"]), dict(alone()[1]))
    fabric.load_raw(path, again["model"])
    close(whole(again["model"]), whole(state["model"]))
    with pytest.raises(CheckpointMismatchError, match="has no 'epoch': give strict=False"):
        fabric.load(path, {"model": again["model"], "epoch": 0})
    fabric.load(path, {"model": again["model"], "epoch": 0}, strict=False)


def test_two_models_in_one_state(world, shared_path):
    fabric, path = started(), shared_path / "gan.h5"
    pairs = {name: fabric.setup(plain, stepped(plain)) for name in ("maker", "judge") for plain in [net()]}
    for model, optimizer in pairs.values():
        together(fabric, model, optimizer, itertools.islice(strided(fabric), 1))
    state = {name: model for name, (model, _) in pairs.items()} | {f"{n}_steps": pairs[n][1] for n in pairs}
    fabric.save(path, state)
    before = [whole(model) for model, _ in pairs.values()]
    together(fabric, *pairs["judge"], strided(fabric))
    fabric.load(path, state)
    close([whole(model) for model, _ in pairs.values()], before)


def test_precision_and_models_built_without_memory(world):
    fabric = started(precision="bf16-mixed")
    with fabric.init_module(empty_init=True):
        plain = nn.Linear(5, 3)
    assert plain.weight.is_meta
    model = fabric.setup_module(plain)
    optimizer = fabric.setup_optimizers(stepped(model))

    def closure():
        loss = model(torch.ones(2, 5)).sum()
        fabric.backward(loss)
        return loss

    before = whole(model)["weight"].clone()
    assert optimizer.step(closure).isfinite()
    assert not torch.equal(whole(model)["weight"], before)
    assert model._forward_module.mixed_precision.param_dtype is torch.bfloat16
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_what_cannot_be_had_is_an_error(world, shared_path):
    with pytest.raises(LaunchError, match="num_nodes=7"):
        L.Fabric(accelerator="cpu", strategy="hpcfsdp", num_nodes=7)
    with pytest.raises(UsageError, match="did you mean 'auto_wrap_policy'"):
        HpcfsdpFabricStrategy(auto_wrap_polizy={Block})
    both = started(HpcfsdpFabricStrategy(mixed_precision=object()), precision="bf16-mixed")
    with pytest.raises(UsageError, match="give one of them"):
        both.setup(net())
    fabric = started()
    model = fabric.setup(net())
    with pytest.raises(UsageError, match="a state with a model"):
        fabric.save(shared_path / "none.h5", {"step": 1})
    with pytest.raises(UsageError, match=r"hpcfsdp\.checkpoint\.save\(names="):
        fabric.save(shared_path / "some.h5", {"model": model}, filter={"model": lambda name, value: True})
    if world.rank == 0:
        torch.save({}, shared_path / "other.pt")
    world.comm.Barrier()
    with pytest.raises(CheckpointCorruptError, match="hpcfsdp import"):
        fabric.load(shared_path / "other.pt", {"model": model})
    fabric.backward(model(torch.full((2, 5), torch.inf)).sum())
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        fabric.clip_gradients(model, stepped(model), max_norm=1.0)


def test_the_trainer_knows_the_name_too(world):
    assert isinstance(L.Trainer(accelerator="cpu", strategy="hpcfsdp", logger=False).strategy, HpcfsdpStrategy)
