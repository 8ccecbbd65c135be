"""Several nodes: each holds gathered values once, and keeps them from forward to backward if the program says so.

Nodes are imagined: the ranks of one machine have a topology of several.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import hpcfsdp.fsdp2 as ours
from hpcfsdp.comm import traffic
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.launch.topology import Topology
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi.row_cases import Block, Net, batches, make, same, train, whole
from tests.unit.params.gathering import values_bytes

pytestmark = pytest.mark.ranks(4, more=(2, 3))

TIGHT = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(scope="module")
def mesh_of(world):
    """``mesh_of(topology)``: a mesh over all ranks, on these nodes."""
    made = {}

    def make_mesh(topology):
        if topology not in made:
            group = dist.new_group(backend="hpcmpi")
            group.communicator = MpiCommunicator(world.comm.Dup(), topology)
            made[topology] = group, DeviceMesh.from_group(group, "cpu")
        return made[topology][1]

    yield make_mesh
    for group, _ in made.values():
        group.communicator.close()


@pytest.fixture(params=["equal", "unequal", "single ranks"])
def nodes(request, world, mesh_of):
    size = world.size
    topology = {
        "equal": Topology.uneven([size // 2] * 2) if size % 2 == 0 else Topology.from_labels([0, 1, 0]),
        "unequal": Topology.uneven([size - 1, 1]),
        "single ranks": Topology.regular(size, 1),
    }[request.param]
    return mesh_of(topology)


def choices(size):
    return [True, "node", 2] if size == 4 else [True, "node", 1]


PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


@program
def steps(rank, fsdp, mesh, choice):
    return train(make(fsdp, mesh, reshard_after_forward=choice), rank)


@program
def mixed_precision(rank, fsdp, mesh, choice):
    policy = ours.MixedPrecisionPolicy(torch.float32, torch.float64)
    return train(make(fsdp, mesh, reshard_after_forward=choice, mp_policy=policy), rank)


@program
def accumulation(rank, fsdp, mesh, choice):
    model = make(fsdp, mesh, reshard_after_forward=choice)

    @contextlib.contextmanager
    def around(number):
        model.set_requires_gradient_sync(number == 1)
        yield

    return train(model, rank, micro=2, around=around)


@program
def recomputation(rank, fsdp, mesh, choice):
    def prepare(model):
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)

    return train(make(fsdp, mesh, reshard_after_forward=choice, prepare=prepare), rank)


@program
def other_dimensions(rank, fsdp, mesh, choice):
    def placement(param):
        return Shard(1) if param.dim() > 1 and param.shape[1] % mesh.size() == 0 else None

    return train(make(fsdp, mesh, width=12, reshard_after_forward=choice, shard_placement_fn=placement), rank)


@program
def between_forward_and_backward(rank, fsdp, mesh, choice):
    """State is read; the program makes one unit whole, or reshards one, or evaluates."""
    model, found = make(fsdp, mesh, reshard_after_forward=choice), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, ids in enumerate(batches(rank, 6)):
        loss = model(ids).square().mean()
        if number == 1:
            found += [whole(value).clone() for value in model.state_dict().values()]
        if number == 2:
            handle = model.blocks[0].unshard(async_op=True)
            handle.wait()
            found.append(model.blocks[0].up.weight.detach().clone())
        if number == 3:
            model.blocks[1].reshard()
        if number == 4:
            with torch.no_grad():
                found.append(model(ids).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        model.set_reshard_after_forward(number % 2 == 0, recurse=False)
    return found


@program
def two_forwards(rank, fsdp, mesh, choice):
    model, found = make(fsdp, mesh, reshard_after_forward=choice), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids in batches(rank, 3):
        (model(ids).square().mean() + model(ids.flip(0)).mean()).backward()
        found += [whole(param.grad).clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@program
def an_unused_block(rank, fsdp, mesh, choice):
    def prepare(model):
        forward = model.blocks[1].forward
        model.blocks[1].forward = lambda x: x + forward(x).detach()

    return train(make(fsdp, mesh, reshard_after_forward=choice, prepare=prepare), rank, clip=1e9)


_torchs = {}  # what the programs find with torch's, the same wherever values stay


def compare(name, rank, torchs, mesh, choices):
    """A program with each choice, and with torch's. Its own numbers of ranks need rows that they divide."""
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if name == "mixed_precision" else TIGHT
    for choice in choices:

        def run(fsdp, mesh, choice=choice):
            if fsdp is ours:
                return PROGRAMS[name](rank, fsdp, mesh, choice)
            if name not in _torchs:
                _torchs[name] = PROGRAMS[name](rank, fsdp, mesh, True)
            return _torchs[name]

        same(run, torchs, mesh, **tolerance)


@pytest.mark.filterwarnings("ignore:no parameter of the unit")
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_torch_wherever_they_stay(world, row_meshes, nodes, name):
    compare(name, world.rank, row_meshes["torch"], nodes, choices(world.size))


@pytest.mark.parametrize("name", ["steps", "mixed_precision", "between_forward_and_backward", "other_dimensions"])
def test_ranks_that_share_no_memory_keep_parts(world, row_meshes, name):
    """As on accelerators."""
    compare(name, world.rank, row_meshes["torch"], row_meshes["gloo"], choices(world.size))


def flat(mesh, choice, width=7, **options):
    torch.manual_seed(0)
    return FullyShardedDataParallel(
        Net(width=width).double(),
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        reshard_after_forward=choice,
        **options,
    )


def losses_of(model, rank, count=4, around=lambda _: contextlib.nullcontext()):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number, ids in enumerate(batches(rank, count)):
        with around(number):
            loss = model(ids).square().mean()
            loss.backward()
        found.append(loss.detach())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(found)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_the_class_computes_the_same_wherever_values_stay(world, comm, nodes, original):
    def around(model):
        return lambda number: model.no_sync() if number % 2 == 0 else contextlib.nullcontext()

    torch.manual_seed(0)
    plain = Net().double()
    optimizer, expected = torch.optim.AdamW(plain.parameters(), lr=1e-2), []
    data = [list(batches(rank, 4)) for rank in range(world.size)]
    for number in range(4):
        found = [plain(data[rank][number]).square().mean() for rank in range(world.size)]
        (sum(found) / world.size).backward()
        expected.append(found[world.rank].detach())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for choice in choices(world.size):
        model = flat(nodes, choice, use_orig_params=original)
        torch.testing.assert_close(losses_of(model, world.rank, around=around(model)), torch.stack(expected), **TIGHT)


@pytest.mark.parametrize("front", ["class", "fully_shard"])
def test_what_crosses_between_nodes_and_what_a_node_holds(world, comm, nodes, front):
    """Each node gets the values of others in a forward, again in a backward that does not find them, and sends sums."""
    topology, sent, held = nodes.get_group().communicator.topology, {}, {}
    numels = [sum(param.numel() for param in part.parameters()) for part in (Net(width=24), Net(width=24).blocks)]
    for choice in (True, "node"):
        model = flat(nodes, choice, width=24) if front == "class" else make(ours, nodes, width=24)
        blocks = model.module.blocks if front == "class" else model.blocks
        for block in blocks if front == "fully_shard" else ():
            block.set_reshard_after_forward(choice)
        unit = blocks[0]._unit if front == "class" else blocks[0]._unit_here
        for ids in batches(world.rank, 2):
            before = traffic.count.sent_to_nodes
            loss = model(ids).square().mean()
            held[choice] = sum(map(values_bytes, unit.sharded_params))
            loss.backward()
        sent[choice] = sum(comm.all_gather_object(traffic.count.sent_to_nodes - before))
        assert sum(map(values_bytes, unit.sharded_params)) == 0
    assert held[True] == 0 < held["node"]
    one = 8 * (topology.num_nodes - 1)  # bytes that cross where each node gets an element once
    padding = 1.02 if front == "class" else 1.12  # of rows of small matrices
    assert 2 * numels[0] <= sent["node"] / one <= 2 * padding * numels[0]
    assert 2 * numels[0] + numels[1] <= sent[True] / one <= padding * (2 * numels[0] + numels[1])


def test_tensor_parallel_layers_stay_on_their_node(world):
    """Two nodes: tensor-parallel ranks share one, and the same blocks are sharded over both."""
    if world.size != 4:
        pytest.skip("two nodes of two ranks")

    def line(ranks, topology):
        groups = [dist.new_group(list(each), backend="hpcmpi") for each in ranks]
        mine = next(index for index, each in enumerate(ranks) if world.rank in each)
        groups[mine].communicator = MpiCommunicator(world.comm.Split(mine, world.rank), topology)
        return groups[mine]

    lines = line([(0, 2), (1, 3)], Topology.regular(2, 1)), line([(0, 1), (2, 3)], Topology.regular(1, 2))
    names = ("shard", "tensor")
    mesh = DeviceMesh.from_group(list(lines), "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=names)

    def run(mesh, choice):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        ours.fully_shard(model[0], mesh=mesh["shard"], reshard_after_forward=choice)
        model = ours.fully_shard(model, mesh=mesh["shard"])
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            before = traffic.count.sent_to_nodes
            x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step + world.rank // 2))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found), traffic.count.sent_to_nodes - before

    expected, _ = run(world.mesh(shard=2, tensor=2), True)
    (freed, sent), (kept, fewer) = run(mesh, True), run(mesh, "node")
    torch.testing.assert_close(freed, expected, **TIGHT)
    torch.testing.assert_close(kept, expected, **TIGHT)
    assert fewer < sent


@pytest.mark.parametrize("front", ["class", "fully_shard"])
def test_copies_keep_the_choice(world, mesh_of, front):
    nodes = mesh_of(Topology.uneven([world.size - 1, 1]))
    model = flat(nodes, "node") if front == "class" else make(ours, nodes, reshard_after_forward="node")
    copied = copy.deepcopy(model)
    torch.testing.assert_close(losses_of(copied, world.rank), losses_of(model, world.rank), **TIGHT)
    blocks = copied.module.blocks if front == "class" else copied.blocks
    assert {flat.keepers for flat in (getattr(blocks[0], "_unit", None) or blocks[0]._unit_here).sharded_params} == {
        "node"
    }


def test_bad_choices_are_named(world, comm, nodes):
    for choice in ("nodes", 0, -1, 2.0, world.size + 1):
        message = rf"reshard_after_forward.*{choice}"
        with pytest.raises(ValueError, match=message):
            ours.fully_shard(nn.Linear(8, 8), mesh=nodes, reshard_after_forward=choice)
        with pytest.raises(ValueError, match=message):
            flat(nodes, choice)
        with pytest.raises(ValueError, match=message):
            make(ours, nodes).set_reshard_after_forward(choice)
        with pytest.raises(ValueError, match=message):
            flat(nodes, True).set_reshard_after_forward(choice)
