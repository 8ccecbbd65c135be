"""The plan that a manager keeps between saves: whatever changes in between, the next file has what there is then."""

import copy

import pytest
import torch
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.saving import content
from hpcfsdp.checkpoint.saving.kept_plan import KeptPlan
from hpcfsdp.errors import DisagreementError
from tests.mpi.models import ORIGINAL, adamw, make_net, shard, train_sharded
from tests.mpi.test_checkpoint_manager import contents

pytestmark = pytest.mark.ranks(2, 1, 3)


class Counting(KeptPlan):
    """Notes for each save whether the plan was recalled."""

    def __init__(self):
        super().__init__()
        self.recalled = []

    def recall(self, *arguments):
        found = super().recall(*arguments)
        self.recalled.append(found is not None)
        return found


class Saves:
    """Saves one model again and again, by a manager and without one, and compares the files."""

    def __init__(self, comm, folder, **options):
        self.comm, self.folder, self.step = comm, folder, 0
        self.names = options.get("names")
        self.manager = checkpoint.CheckpointManager(folder / "kept", asynchronous=True, **options)
        self.kept = self.manager._kept = Counting()

    def __call__(self, model, optimizer=None, **more):
        """Whether the plan was recalled on this rank."""
        self.step += 1
        path = self.manager.save(self.step, model=model, optimizer=optimizer, **more)
        whole = {"model": model, "optimizer": optimizer, "names": self.names, "step": self.step, **more}
        expected = checkpoint.save(self.folder / "plain.h5", **whole)
        self.manager.wait()
        assert contents(path) == contents(expected)
        return self.kept.recalled[-1]


@pytest.fixture
def saves(comm, shared_path):
    return Saves(comm, shared_path)


def trained(comm, **options):
    model = shard(make_net(), **options)
    optimizer = adamw(model)
    train_sharded(model, optimizer, range(2), comm)
    return model, optimizer


@ORIGINAL
def test_training_goes_on_with_the_same_plan(comm, saves, monkeypatch, original):
    model, optimizer = trained(comm, use_orig_params=original)
    assert not saves(model, optimizer)
    made = []
    real = content.plan_save
    monkeypatch.setattr(content, "plan_save", lambda *args: made.append(1) or real(*args))
    for step in range(2, 5):
        train_sharded(model, optimizer, [step], comm)
        optimizer.param_groups[0]["lr"] *= 0.5  # as a scheduler does
        assert saves(model, optimizer, extra={"step": step})
    assert len(made) == 3  # of the saves that it is compared with


def load_optimizer(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # into other memory
    return model, optimizer


def clear_state(model, optimizer):
    optimizer.state.clear()
    return model, optimizer


def drop_one_state(model, optimizer):
    del optimizer.state[next(iter(optimizer.state))]["exp_avg"]
    return model, optimizer


def half_state(model, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].half()
    return model, optimizer


def number_state(model, optimizer):
    for state in optimizer.state.values():
        state["step"] = int(state["step"])
    return model, optimizer


def two_groups(model, optimizer):
    first, *others = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [first]
    optimizer.add_param_group({"params": others, "lr": 0.125})
    return model, optimizer


def other_order(model, optimizer):
    optimizer.param_groups[0]["params"].reverse()
    return model, optimizer


def no_optimizer(model, optimizer):
    return model, None


def new_buffer(model, optimizer):
    model.module.register_buffer("more", torch.arange(5.0))
    return model, optimizer


def other_buffer(model, optimizer):
    model.module.scale = torch.tensor([2.5, 3.5])
    return model, optimizer


def buffer_in_other_memory(model, optimizer):
    model.module.scale = model.module.scale + 1  # of the same shape
    return model, optimizer


def buffer_with_gaps(model, optimizer):
    model.module.scale = torch.arange(4.0)[1::2]
    return model, optimizer


def one_element_of_a_row(model, optimizer):
    model.module.scale = torch.arange(4.0)[1::2][:1]  # contiguous, with a stride of 2
    return model, optimizer


def kept_no_longer(model, optimizer):
    model.module._non_persistent_buffers_set.add("scale")
    return model, optimizer


def kept_from_now_on(model, optimizer):
    model.module._non_persistent_buffers_set.discard("scratch")
    return model, optimizer


def renamed(model, optimizer):
    blocks = model.module.blocks
    blocks._modules["renamed"] = blocks._modules.pop("1")
    return model, optimizer


def swapped(model, optimizer):
    blocks = model.module.blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]
    return model, optimizer


def removed(model, optimizer):
    del model.module.blocks[1]
    return model, None


def wrapped_again(model, optimizer):
    model = shard(make_net(seed=3))
    return model, adamw(model)


def around(model, optimizer):
    outer = nn.Module()
    outer.inner = model
    outer.extra = nn.Linear(2, 2)
    return outer, None


def other_requires_grad(model, optimizer):
    model.requires_grad_(False)
    return model, optimizer


def assigned_data(model, optimizer):
    for param in model.parameters():
        param.data = param.data + 1
    return model, optimizer


def not_sharded(model, optimizer):
    return make_net(), None


CHANGES = [
    load_optimizer,
    clear_state,
    drop_one_state,
    half_state,
    number_state,
    two_groups,
    other_order,
    no_optimizer,
    new_buffer,
    other_buffer,
    buffer_in_other_memory,
    buffer_with_gaps,
    one_element_of_a_row,
    kept_no_longer,
    kept_from_now_on,
    renamed,
    swapped,
    removed,
    wrapped_again,
    around,
    other_requires_grad,
    assigned_data,
    not_sharded,
]
SAME_PLAN = {
    load_optimizer,
    one_element_of_a_row,
    buffer_in_other_memory,
    other_requires_grad,
    assigned_data,
    wrapped_again,
}
"""Changes after which the names, shapes and ranks may be the same as before."""


@ORIGINAL
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_saves_is_in_the_second_file(comm, saves, original, change):
    model, optimizer = trained(comm, use_orig_params=original)
    saves(model, optimizer)
    assert saves(model, optimizer)
    model, optimizer = change(model, optimizer)
    recalled = saves(model, optimizer)
    if change not in SAME_PLAN:
        assert not recalled
    with torch.no_grad():
        for param in model.parameters():
            param += 1
    saves(model, optimizer)


def test_memory_that_was_shared_at_the_first_save_is_not_taken_for_one_later(saves):
    model = nn.Module()
    model.register_buffer("one", torch.arange(4.0))
    model.register_buffer("two", model.one.view(4))  # another tensor in the same memory
    saves(model)
    saves(model)
    model.two = torch.arange(4.0) + 7
    saves(model)
    assert saves(model)


def test_buffers_that_become_one_and_two_again(saves):
    model = nn.Module()
    model.register_buffer("one", torch.arange(4.0))
    model.register_buffer("two", torch.arange(4.0) + 1)
    saves(model)
    assert saves(model)
    model.two = model.one
    assert not saves(model)
    model.two = torch.arange(4.0) + 2
    assert not saves(model)


def test_chosen_names_and_their_state(comm, shared_path):
    saves = Saves(comm, shared_path, names=["norm.*", "blocks.1.*", "embed.weight"])
    model, _ = trained(comm, use_orig_params=True)
    chosen = [p for name, p in model.named_parameters() if name.split(".")[1] in ("norm", "embed")]
    optimizer = torch.optim.Adam([{"params": chosen[:1]}, {"params": chosen[1:], "lr": 0.5}])
    for param in chosen:
        param.grad = torch.ones_like(param)
    optimizer.step()
    saves(model, optimizer)
    assert saves(model, optimizer)
    saves.manager._names = saves.names = ["norm.*", "embed.weight"]
    assert not saves(model, optimizer)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.weight = 0, nn.Parameter(torch.ones(2))

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_extra_states_of_modules_are_those_of_the_save(saves):
    model = nn.Sequential(Counted(), nn.Linear(2, 2))
    saves(model)
    model[0].calls = 5
    assert saves(model)
    assert checkpoint.open_index(saves.folder / "plain.h5").module_states  # compared by loading
    other = nn.Sequential(Counted(), nn.Linear(2, 2))
    checkpoint.load(saves.manager.latest(), model=other)
    assert other[0].calls == 5


def test_ranks_recall_together_or_not_at_all(comm, saves, monkeypatch):
    model, optimizer = trained(comm)
    saves(model, optimizer)
    if comm.rank == comm.size - 1:
        saves.kept._known = None  # a rank whose plan could not be kept
    saves(model, optimizer)
    assert saves(model, optimizer)


def test_state_that_differs_between_ranks_is_refused_after_saves_that_went_well(comm, saves):
    model, optimizer = trained(comm)
    saves(model, optimizer)
    if comm.rank == comm.size - 1:
        clear_state(model, optimizer)
    if comm.size > 1:
        with pytest.raises(DisagreementError):
            saves.manager.save(9, model=model, optimizer=optimizer)
        optimizer.state.clear()
    saves(model, optimizer)


def test_a_model_that_is_gone_is_not_kept(comm, saves):
    model, optimizer = trained(comm)
    saves(model, optimizer)
    found = []
    facts = [saves.kept._known.facts]
    while facts:
        for fact in facts.pop():
            facts += [fact] if isinstance(fact, (tuple, list)) and not isinstance(fact, torch.Size) else []
            found += [fact] if isinstance(fact, (torch.Tensor, nn.Module)) else []
    assert not found
