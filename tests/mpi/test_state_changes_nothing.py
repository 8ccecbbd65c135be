"""Saving and loading, at any moment and in every way, changes no later loss by a bit."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as stock
from torch import nn, optim
from torch.distributed.fsdp import StateDictType

import hpcfsdp
import hpcfsdp.state_dict as ours
from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import HDF5Reader, HDF5Writer
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.optim import Muon, WholeTensors
from hpcfsdp.state_dict import StateDictOptions
from hpcfsdp.wrap import ModuleWrapPolicy

pytestmark = pytest.mark.ranks(2)

FULL = {"full_state_dict": True}
FROM_RANK0 = {**FULL, "broadcast_from_rank0": True}
FLAT = {"flatten_optimizer_state_dict": True}
WRAPS = ["flat", "original", "rows"]
DECAY = {"lr": 0.1, "weight_decay": 0.1}
OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "dampening": lambda p: optim.SGD(p, momentum=0.9, dampening=0.3, **DECAY),
    "momentum": lambda p: optim.SGD(p, momentum=0.9, **DECAY),
    "Adam": lambda p: optim.Adam(p, **DECAY),
    "no eps": lambda p: optim.Adam(p, eps=0.0, amsgrad=True, foreach=False),
    "fused": lambda p: optim.AdamW(p, fused=True, **DECAY),
    "Adamax": lambda p: optim.Adamax(p, **DECAY),
    "NAdam": lambda p: optim.NAdam(p, **DECAY),
    "RAdam": lambda p: optim.RAdam(p, **DECAY),
    "Adadelta": lambda p: optim.Adadelta(p, **DECAY),
    "Adagrad": lambda p: optim.Adagrad(p, **DECAY),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True, **DECAY),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: optim.ASGD(p, **DECAY),
    "whole": lambda p, model: WholeTensors(model, p, optim.Adam, **DECAY),
    "Muon": lambda p, model: WholeTensors(model, p, Muon, **DECAY),
}
TORCH_CANNOT = {("rows", "Rprop"), ("flat", "whole"), ("flat", "Muon")}
"""DTensors lack some operations; whole tensors are none of a flat parameter."""
PAIRS = [(wrap, name) for wrap, name in itertools.product(WRAPS, OPTIMIZERS) if (wrap, name) not in TORCH_CANNOT]


class Net(nn.Module):
    def __init__(self, *, is_complex=False):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.phase = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64)) if is_complex else None

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)) + (0 if self.phase is None else (x.to(self.phase) @ self.phase).real))
        return self.last(nn.functional.dropout(x, 0.5, self.training))


def make(wrap, name, seed=0, **options):
    torch.manual_seed(seed)
    model = Net(**options)
    if wrap == "rows":
        hpcfsdp.fully_shard(model.last)
        hpcfsdp.fully_shard(model)
    else:
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=wrap == "original")
    needs_model = name in ("whole", "Muon")
    optimizer = OPTIMIZERS[name](model.parameters(), *([model] if needs_model else []))
    return model, optimizer, optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)


@contextlib.contextmanager
def without_sync(model):
    if isinstance(model, FSDP):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def losses(world, wrap, name, at=lambda moment, *made: None, **options):
    """Of two steps, and of an evaluation after each; `at` is called at each moment, and may return others to train."""
    made = make(wrap, name, **options)
    torch.manual_seed(10 + world.rank)
    found = []

    def moment(what):
        nonlocal made
        made = at(what, *made) or made

    moment("start")
    for step in range(2):
        with without_sync(made[0]):
            made[0](torch.randn(4, 4)).square().mean().backward()
            moment(f"accumulated {step}")
        loss = made[0](torch.randn(4, 4)).square().mean()
        moment(f"forward {step}")
        loss.backward()
        moment(f"backward {step}")
        made[1].step()
        moment(f"step {step}")
        made[1].zero_grad()
        made[2].step()
        moment(f"end {step}")
        made[0].eval()
        with torch.no_grad():
            found += [loss.item(), made[0](torch.randn(4, 4)).sum().item()]
        moment(f"evaluation {step}")
        made[0].train()
    return found


@pytest.mark.parametrize(("wrap", "name"), PAIRS)
def test_state_dicts_of_an_optimizer_without_state(world, wrap, name):
    counts = []

    def ask(moment, model, optimizer, _schedule):
        if moment in ("start", "backward 0"):
            optimizer.register_step_post_hook(lambda *_: counts.append(moment))
            before = [group.copy() for group in optimizer.param_groups]
            for options in ({}, FULL):
                ours.get_state_dict(model, optimizer, options=StateDictOptions(**options))
            assert (optimizer.param_groups, counts) == (before, [])
            assert name == "Adagrad" or not any(optimizer.state.values())

    assert losses(world, wrap, name, ask) == losses(world, wrap, name)


@pytest.mark.parametrize(("wrap", "name"), [(w, n) for w, n in PAIRS if n in ("Adam", "SGD", "whole")])
def test_saving_at_any_moment(world, wrap, name, shared_path):
    def save(_moment, model, optimizer, schedule):
        for options in ({}, FULL, {**FULL, "cpu_offload": True}, FLAT):
            ours.get_state_dict(model, optimizer, options=StateDictOptions(**options))
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT) if wrap != "rows" else ():
            with FSDP.state_dict_type(model, kind):
                model.state_dict()
                FSDP.optim_state_dict(model, optimizer)
        extra = {"schedule": schedule.state_dict()}
        checkpoint.save(shared_path / "a.h5", model=model, optimizer=optimizer, extra=extra)

    assert losses(world, wrap, name, save) == losses(world, wrap, name)


def by_file(path, make_again, model, optimizer, schedule):
    checkpoint.save(path, model=model, optimizer=optimizer, extra={"schedule": schedule.state_dict()})
    model, optimizer, schedule = make_again()
    schedule.load_state_dict(checkpoint.load(path, model=model, optimizer=optimizer).extra["schedule"])
    return model, optimizer, schedule


def by_dcp(path, make_again, model, optimizer, schedule):
    rank = torch.distributed.get_rank()
    weights, state = ours.get_state_dict(model, optimizer)
    mine = {"schedule": schedule.state_dict(), f"rng.{rank}": torch.get_rng_state()}
    dcp.save({"model": weights, "optim": state, **mine}, storage_writer=HDF5Writer(path))
    model, optimizer, schedule = make_again()
    weights, state = ours.get_state_dict(model, optimizer)
    found = {"schedule": schedule.state_dict(), f"rng.{rank}": torch.get_rng_state()}
    found |= {"model": weights, "optim": state}
    dcp.load(found, storage_reader=HDF5Reader(path))
    ours.set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    schedule.load_state_dict(found["schedule"])
    torch.set_rng_state(found[f"rng.{rank}"])
    return model, optimizer, schedule


def by_state_dict(options):
    def resume(_path, make_again, model, optimizer, schedule):
        get = StateDictOptions(**{key: value for key, value in options.items() if key != "broadcast_from_rank0"})
        weights, state = ours.get_state_dict(model, optimizer, options=get)
        if "full_state_dict" in options:
            weights, state = copy.deepcopy((weights, state))
        if "broadcast_from_rank0" in options and torch.distributed.get_rank():
            weights, state = {}, {}
        generator, schedule_state = torch.get_rng_state(), copy.deepcopy(schedule.state_dict())
        model, optimizer, schedule = make_again()
        given = {"model_state_dict": weights, "optim_state_dict": state}
        ours.set_state_dict(model, optimizer, **given, options=StateDictOptions(**options))
        schedule.load_state_dict(schedule_state)
        torch.set_rng_state(generator)
        return model, optimizer, schedule

    return resume


WAYS = {
    "file": by_file,
    "dcp": by_dcp,
    "sharded": by_state_dict({}),
    "full": by_state_dict(FULL),
    "from rank 0": by_state_dict(FROM_RANK0),
    "flat from rank 0": by_state_dict({**FROM_RANK0, **FLAT}),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(("name", "is_complex"), [("Adam", True), ("SGD", False)])
def test_resuming_at_any_moment_without_gradients(world, wrap, name, is_complex, shared_path):
    expected = losses(world, wrap, name, is_complex=is_complex)
    for way, (label, resume) in itertools.product(("start", "end 0", "evaluation 1"), WAYS.items()):

        def at(moment, model, *others, way=way, resume=resume):
            if moment != way:
                return None
            training = model.training
            path = shared_path / "a.h5"
            made = resume(path, lambda: make(wrap, name, seed=7, is_complex=is_complex), model, *others)
            made[0].train(training)
            return made

        assert losses(world, wrap, name, at, is_complex=is_complex) == expected, (way, label)


def test_torchs_own_functions_leave_whole_tensors_as_they_are(world):
    names = {name for name, _ in Net().named_parameters()}

    def ask(moment, model, optimizer, _schedule):
        if moment in ("start", "end 0"):  # a rank owns less than all of these
            assert set(stock.get_optimizer_state_dict(model, optimizer)["state"]) == names

    assert losses(world, "rows", "whole", ask) == losses(world, "rows", "whole")


class Cache(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def grow(self):
        for buffer in self.buffers():
            buffer.resize_(buffer.numel() + 1).zero_()


@pytest.mark.parametrize("wrap", ["flat", "original", "from rank 0", "rows"])
def test_buffers_grow_after_everything(world, wrap, shared_path):
    module = Cache()
    options = {"use_orig_params": wrap == "original", "sync_module_states": wrap == "from rank 0"}
    model = hpcfsdp.fully_shard(module) if wrap == "rows" else FSDP(module, **options)
    optimizer = optim.Adam(model.parameters())
    module.grow()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path, given = shared_path / "a.h5", {"model": model, "optimizer": optimizer}
    checkpoint.save(path, **given, extra={"seen": module.seen}, metrics={"loss": (torch.arange(2), module.scratch[:2])})
    module.grow()
    checkpoint.save(path, **given, writer="subfiles")
    checkpoint.load(path, **given)
    module.grow()
    with checkpoint.CheckpointManager(shared_path / "run", asynchronous=True) as manager:
        for number in range(2):
            manager.save(number, **given)
            manager.wait()
            module.grow()
        manager.save(2, **given)
        manager.load_latest(**given)
    module.grow()
    state = {"model": ours.get_model_state_dict(model)}
    dcp.save(state, storage_writer=HDF5Writer(shared_path / "b.h5"))
    dcp.load(state, storage_reader=HDF5Reader(shared_path / "b.h5"))
    module.grow()
    assert module.seen.numel() == module.scratch.numel() == 9
