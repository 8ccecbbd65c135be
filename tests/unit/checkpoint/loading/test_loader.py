import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.disks import Watched, using


class Counting(torch.optim.Optimizer):
    """An optimizer whose state is Python numbers."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["decay"] = state.get("decay", 1.0) * 0.7
                state["warm"] = state["count"] > 2
                param -= group["lr"] * state["decay"] * param.grad


OPTIMIZERS = {
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr, betas=(0.8, 0.95)),
    "AMSGrad": lambda params, lr: torch.optim.Adam(params, lr, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "SGD": torch.optim.SGD,
    "momentum": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, nesterov=True),
    "RMSprop": lambda params, lr: torch.optim.RMSprop(params, lr, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "own": Counting,
}


@pytest.fixture(params=OPTIMIZERS)
def make_optimizer(request):
    return OPTIMIZERS[request.param]


def snapshot(model, optimizer=None):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict() if optimizer else None))


def test_model_and_optimizer_go_on_bit_by_bit(tmp_path, make_model, train_steps, same, make_optimizer):
    model, other = make_model(0), make_model(1)
    optimizer, other_optimizer = make_optimizer(model.parameters(), 0.01), make_optimizer(other.parameters(), 0.5)
    train_steps(model, optimizer, 3)
    train_steps(other, other_optimizer, 1)
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer, step=3)
    info = checkpoint.load(tmp_path / "a.h5", model=other, optimizer=other_optimizer)
    assert info.step == 3
    assert same(snapshot(other, other_optimizer), snapshot(model, optimizer))
    assert other_optimizer.param_groups[0]["lr"] == 0.01
    assert train_steps(model, optimizer, 3) == train_steps(other, other_optimizer, 3)
    assert same(snapshot(other, other_optimizer), snapshot(model, optimizer))


def test_an_optimizer_before_its_first_step_forgets_what_it_had(tmp_path, make_model, train_steps):
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    train_steps(model, optimizer, 1)
    checkpoint.load(tmp_path / "a.h5", model=model, optimizer=optimizer)
    assert optimizer.state_dict()["state"] == {}


def test_parameters_stay_the_objects_that_the_optimizer_steps(tmp_path, make_model, train_steps):
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    checkpoint.load(tmp_path / "a.h5", model=model, optimizer=optimizer)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight
    assert all(param.requires_grad for param in params)


def test_hyper_parameters_of_all_groups_come_back_in_kind(tmp_path):
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "note": "decayed", "lr": 0.25}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.125, betas=(0.5, 0.75))
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    other = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=1.0)
    checkpoint.load(tmp_path / "a.h5", model=model, optimizer=other)
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert other.param_groups[0]["betas"] == (0.5, 0.75)
    assert (other.param_groups[0]["note"], other.param_groups[0]["lr"]) == ("decayed", 0.25)


def test_an_optimizer_is_left_alone_when_it_is_not_given(tmp_path, make_model, train_steps, same):
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train_steps(model, optimizer, 1)
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    train_steps(model, optimizer, 1)
    before = snapshot(model, optimizer)[1]
    checkpoint.load(tmp_path / "a.h5", model=model)
    assert same(snapshot(model, optimizer)[1], before)


def test_channels_last_memory_stays(tmp_path):
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    other = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    checkpoint.save(tmp_path / "a.h5", model=model)
    checkpoint.load(tmp_path / "a.h5", model=other)
    assert torch.equal(other.weight, model.weight)
    assert other.weight.is_contiguous(memory_format=torch.channels_last)


def test_extra_and_config_come_back_with_arrays_as_arrays(tmp_path):
    model = nn.Linear(2, 2)
    extra = {
        "list": [1, 2.5, None, True, "ä\0"],
        "nested": {"array": np.arange(6, dtype=np.int16).reshape(2, 3), "tensor": torch.tensor([1.5, 2.5])},
        "float": 0.1 + 0.2,
        "nan": float("nan"),
    }
    checkpoint.save(tmp_path / "a.h5", model=model, extra=extra, config={"train": {"lr": 1e-3}})
    info = checkpoint.load(tmp_path / "a.h5", model=model)
    assert info.extra["list"] == extra["list"]
    array, tensor = info.extra["nested"]["array"], info.extra["nested"]["tensor"]
    assert (array.dtype, array.tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])
    assert (type(tensor), tensor.dtype, tensor.tolist()) == (np.ndarray, np.float32, [1.5, 2.5])
    assert info.extra["float"] == 0.1 + 0.2
    assert np.isnan(info.extra["nan"])
    assert info.config == {"train": {"lr": 1e-3}}


@pytest.mark.parametrize(
    "value",
    [
        np.array(1.5),
        torch.tensor(3),
        np.array(True),
        np.array(1 - 2j, np.complex64),
        np.array(1.5, ">f8"),
        np.array(7, ">i4"),
        np.array(1.5, np.longdouble),
    ],
    ids=lambda value: str(value.dtype),
)
def test_an_array_without_dimensions_comes_back_as_an_array(tmp_path, value):
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "a.h5", model=model, extra={"a": value})
    found = checkpoint.load(tmp_path / "a.h5", model=model).extra["a"]
    assert type(found) is np.ndarray
    assert (found.shape, found.dtype, found.item()) == ((), np.asarray(value).dtype, value.item())


def test_nothing_given_is_nothing_found(tmp_path):
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "a.h5", model=model)
    info = checkpoint.load(tmp_path / "a.h5", model=model)
    assert (info.extra, info.config, info.step) == ({}, None, 0)


def draw():
    return torch.rand(2).tolist(), np.random.rand(), np.random.randn(), random.random(), random.gauss(0, 1)


def test_random_numbers_go_on_where_they_were(tmp_path):
    model = nn.Linear(2, 2)
    draw()
    checkpoint.save(tmp_path / "a.h5", model=model)
    expected = [draw(), draw()]
    checkpoint.load(tmp_path / "a.h5", model=model)
    assert [draw(), draw()] == expected


def test_missing_unexpected_and_differing_tensors_are_listed_and_nothing_changes(tmp_path, same):
    path = tmp_path / "a.h5"
    saved = nn.ModuleDict({"same": nn.Linear(2, 2), "wide": nn.Linear(2, 3, bias=False), "old": nn.Linear(1, 1)})
    saved.register_buffer("kind", torch.zeros(2, dtype=torch.float64))
    checkpoint.save(path, model=saved, optimizer=torch.optim.AdamW(saved.parameters(), lr=0.5))
    model = nn.ModuleDict({"same": nn.Linear(2, 2), "wide": nn.Linear(3, 2, bias=False), "new": nn.Linear(1, 1)})
    model.register_buffer("kind", torch.zeros(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.load(path, model=model, optimizer=optimizer)
    first, *lines = str(caught.value).split("\n")
    renaming = "did you mean rename={'old.*': 'new.*'} (names in the file: names in the model)?"
    assert first == f"{path}: the checkpoint belongs to another model; {renaming}"
    assert sorted(lines) == [
        "  differing: kind is [2] float64 in the file, [2] float32 in the model",
        "  differing: wide.weight is [3, 2] float32 in the file, [2, 3] float32 in the model",
        "  missing in the file: new.bias [1]",
        "  missing in the file: new.weight [1, 1]",
        "  unexpected in the file: old.bias [1]",
        "  unexpected in the file: old.weight [1, 1]",
    ]
    assert same(snapshot(model, optimizer), before)


def test_a_long_list_of_differences_is_cut(tmp_path):
    checkpoint.save(tmp_path / "a.h5", model=nn.Linear(1, 1))
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(25)))
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.load(tmp_path / "a.h5", model=model)
    lines = str(caught.value).split("\n")
    assert len(lines) == 42
    assert lines[1] == "  missing in the file: 0.weight [1, 1]"
    assert lines[-1] == "  ... and 12 more"


class Pair(nn.Module):
    """Two layers whose weights are one or two parameters."""

    def __init__(self, tied):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        if tied:
            self.b.weight = self.a.weight


def test_a_file_of_tied_weights_fills_a_model_without_tied_weights(tmp_path):
    saved, model = Pair(tied=True), Pair(tied=False)
    checkpoint.save(tmp_path / "a.h5", model=saved)
    checkpoint.load(tmp_path / "a.h5", model=model)
    assert torch.equal(model.a.weight, saved.a.weight)
    assert torch.equal(model.b.weight, saved.a.weight)


def test_a_file_of_two_weights_does_not_fit_a_model_that_ties_them(tmp_path):
    checkpoint.save(tmp_path / "a.h5", model=Pair(tied=False))
    with pytest.raises(CheckpointMismatchError, match=r"b\.weight"):
        checkpoint.load(tmp_path / "a.h5", model=Pair(tied=True))


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Linear})], ids=["one_unit", "unit_of_its_own"])
def test_a_module_registered_twice_fits_whether_sharded_or_not(tmp_path, policy):
    def make():
        model = nn.Module()
        model.a = nn.Linear(2, 2)
        model.b = model.a
        return model

    saved, model = make(), make()
    checkpoint.save(tmp_path / "a.h5", model=saved)
    model = FullyShardedDataParallel(model, process_group=FakeCommunicator(), auto_wrap_policy=policy)
    checkpoint.load(tmp_path / "a.h5", model=model)
    checkpoint.save(tmp_path / "b.h5", model=model)
    again = make()
    checkpoint.load(tmp_path / "b.h5", model=again)
    assert torch.equal(again.a.weight, saved.a.weight)


def test_a_file_without_an_optimizer_raises_with_a_remedy(tmp_path):
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "a.h5", model=model)
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.load(tmp_path / "a.h5", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert str(caught.value) == (f"{tmp_path}/a.h5: holds no optimizer; load it with optimizer=None to start a new one")


def test_an_optimizer_of_other_parameters_is_refused_and_nothing_changes(tmp_path, same):
    path = tmp_path / "a.h5"
    model = nn.Linear(2, 2)
    checkpoint.save(path, model=model, optimizer=torch.optim.SGD([model.weight], lr=0.1))
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD([model.bias], lr=0.5)
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.load(path, model=model, optimizer=optimizer)
    assert str(caught.value).startswith(
        f"{path}: parameter group 0 of the optimizer has 1 parameter(s), and no group of"
    )
    assert "in the optimizer only: bias; in the checkpoint only: weight" in str(caught.value)
    assert same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("verb", [checkpoint.save, checkpoint.load])
def test_an_optimizer_built_from_another_model_is_refused(tmp_path, verb):
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=good)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(CheckpointError) as caught:
        verb(tmp_path / "a.h5", model=model, optimizer=stranger)
    assert str(caught.value).endswith(
        "parameter 0 of the optimizer, of shape (3, 2), does not belong to the model: build the optimizer from "
        "model.parameters() after wrapping the model"
    )


@pytest.mark.parametrize("damaged", ["model/brief", "optim/state/hidden.bias/exp_avg_sq"])
def test_a_damaged_block_is_named_and_nothing_changes(tmp_path, make_model, train_steps, same, damaged):
    path, model = tmp_path / "a.h5", make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train_steps(model, optimizer, 2)
    checkpoint.save(path, model=model, optimizer=optimizer)
    index = checkpoint.open_index(path)
    row = index.extents[index.first_rows[damaged][0]]
    data = bytearray(path.read_bytes())
    data[int(row["byte_offset"]) + 1] ^= 8
    path.write_bytes(data)
    train_steps(model, optimizer, 1)
    before, generator = snapshot(model, optimizer), torch.get_rng_state()
    with pytest.raises(CheckpointCorruptError) as caught:
        checkpoint.load(path, model=model, optimizer=optimizer, fresh=False)
    assert str(caught.value) == (
        f"{path}: damaged: elements 0 to {row['numel']} of {damaged} (written by rank 0, bytes from "
        f"{row['byte_offset']}) do not have their checksum"
    )
    assert same(snapshot(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_loading_needs_no_permission_to_write_and_leaves_the_file_as_it_is(tmp_path, make_model):
    path = checkpoint.save(tmp_path / "a.h5", model=make_model(0))
    path.chmod(0o444)
    before = path.read_bytes()
    checkpoint.load(path, model=make_model(1))
    assert path.read_bytes() == before


def sharded(model, comm):
    policy = {nn.Linear}.__contains__
    return FullyShardedDataParallel(
        model,
        process_group=comm,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or policy(type(module)),
    )


class Plain(nn.Module):
    """A root with parameters of its own around two layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5))

    def forward(self, ids):
        return self.layers(self.embed(ids))


def seeded(kind, seed):
    torch.manual_seed(seed)
    return kind()


def assert_files_are_exchanged(folder, train_steps, same, kind, make_optimizer):
    """Plain -> sharded -> plain keeps every bit, and sharded and plain go on alike."""
    plain = seeded(kind, 0)
    plain_optimizer = make_optimizer(plain.parameters(), 0.01)
    train_steps(plain, plain_optimizer, 2)
    checkpoint.save(folder / "plain.h5", model=plain, optimizer=plain_optimizer)
    model = sharded(seeded(kind, 1), FakeCommunicator())
    optimizer = make_optimizer(model.parameters(), 0.5)
    checkpoint.load(folder / "plain.h5", model=model, optimizer=optimizer)
    checkpoint.save(folder / "sharded.h5", model=model, optimizer=optimizer)
    other = seeded(kind, 2)
    other_optimizer = make_optimizer(other.parameters(), 0.5)
    checkpoint.load(folder / "sharded.h5", model=other, optimizer=other_optimizer)
    assert same(other.state_dict(), plain.state_dict())
    assert same(other_optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"])
    assert other_optimizer.param_groups[0]["lr"] == 0.01
    losses = [train_steps(model, optimizer, 3), train_steps(plain, plain_optimizer, 3)]
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("make_optimizer", [OPTIMIZERS["AdamW"], OPTIMIZERS["momentum"], OPTIMIZERS["own"]])
def test_a_sharded_model_and_a_plain_one_read_each_others_files(tmp_path, train_steps, same, make_optimizer):
    assert_files_are_exchanged(tmp_path, train_steps, same, Plain, make_optimizer)


class Scaled(nn.Module):
    """A layer beside a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.embed = nn.Embedding(5, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids):
        return self.layer(self.embed(ids)) * self.scale


class OnlyScale(nn.Module):
    """A parameter without dimensions and nothing else."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids):
        return nn.functional.one_hot(ids, 5).float() * self.scale


@pytest.mark.parametrize("kind", [Scaled, OnlyScale])
@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam", "momentum"])
def test_a_sharded_parameter_without_dimensions_is_restored_with_its_optimizer(
    tmp_path, train_steps, same, kind, optimizer
):
    assert_files_are_exchanged(tmp_path, train_steps, same, kind, OPTIMIZERS[optimizer])


def test_an_optimizer_key_with_a_slash_is_restored_or_refused(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["a/b"] = torch.ones(2, 2)
    try:
        checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    except CheckpointError as error:
        assert "a/b" in str(error)
        return
    checkpoint.load(tmp_path / "a.h5", model=model, optimizer=optimizer)
    assert optimizer.state[model.weight]["a/b"].tolist() == [[1, 1], [1, 1]]


def test_a_file_of_three_ranks_loads_on_one_and_on_two(tmp_path, train_steps, same, run_ranks):
    first, second, expected = seeded(Plain, 0), seeded(Plain, 5), seeded(Plain, 0)

    def write(comm):
        model = sharded(copy.deepcopy(first), comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train_steps(model, optimizer, 2)
        checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer, step=2)

    def read_and_write(comm):
        model = sharded(copy.deepcopy(second), comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        info = checkpoint.load(tmp_path / "a.h5", model=model, optimizer=optimizer)
        checkpoint.save(tmp_path / "b.h5", model=model, optimizer=optimizer, step=info.step)
        return info.world_size

    assert run_ranks(3, write) == [None] * 3
    assert run_ranks(2, read_and_write) == [3, 3]
    found = []
    for name in ("a.h5", "b.h5"):
        model = seeded(Plain, 9)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        assert checkpoint.load(tmp_path / name, model=model, optimizer=optimizer).step == 2
        found.append(snapshot(model, optimizer))
    assert same(found[0], found[1])
    train_steps(expected, torch.optim.AdamW(expected.parameters(), lr=0.01), 2)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[0][0][name], tensor)


def two_layers(fill=0.0):
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 1)})
    for tensor in model.parameters():
        nn.init.constant_(tensor, fill)
    return model


def test_by_default_each_byte_is_read_once_and_damage_leaves_nan(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=two_layers(1.0))
    reads = {}
    for fresh in (True, False):
        with using(Watched()) as watched:
            checkpoint.load(path, model=two_layers(), fresh=fresh)
        reads[fresh] = watched.calls.count("preadv")
    assert 0 < reads[True] < reads[False]
    row = checkpoint.open_index(path).rows_of("model/b.weight")[0]
    data = bytearray(path.read_bytes())
    data[int(row["byte_offset"])] ^= 1
    path.write_bytes(data)
    model = two_layers()
    with pytest.raises(
        CheckpointCorruptError, match=r"model/b\.weight .*checksum; the floating-point tensors .* NaN now"
    ):
        checkpoint.load(path, model=model)
    assert all(tensor.isnan().all() for tensor in model.state_dict().values())
    model = two_layers()
    with pytest.raises(CheckpointCorruptError, match=r"checksum$"):
        checkpoint.load(path, model=model, fresh=False)
    assert not any(tensor.any() for tensor in model.state_dict().values())
