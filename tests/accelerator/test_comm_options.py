"""How ranks communicate, as a program chooses it, by both fronts."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hpcfsdp.fsdp2 as rows
from hpcfsdp import _compat
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.errors import DisagreementError, HpcfsdpError
from hpcfsdp.fsdp import CommOptions, FullyShardedDataParallel, MixedPrecision
from hpcfsdp.units import unit_mesh
from tests.accelerator import simulated
from tests.accelerator.programs import SIM

pytestmark = pytest.mark.ranks(2)
FRONTS = pytest.mark.parametrize("front", ["class", "fully_shard"])
BF16 = torch.bfloat16


def sharded(front, group, options=None, *, narrow=False):
    """A layer, and its parameters."""
    torch.manual_seed(0)
    net = nn.Linear(8, 8).to(SIM)
    if front == "class":
        mixed = MixedPrecision(BF16, BF16) if narrow else None
        model = FullyShardedDataParallel(net, process_group=group, mixed_precision=mixed, comm_options=options)
        return model, model._unit.sharded_params[0]
    policy = rows.MixedPrecisionPolicy(BF16, BF16) if narrow else rows.MixedPrecisionPolicy()
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "sim")
    model = rows.fully_shard(net, mesh=mesh, mp_policy=policy, comm_options=options)
    return model, model._unit_here.sharded_params[0]


def trained(model):
    """A backward."""
    model(torch.ones(2, 8, device=SIM)).float().square().sum().backward()
    torch.accelerator.synchronize()
    return [param.grad for param in model.parameters()]


@FRONTS
def test_gathers_and_reductions_share_a_communicator_where_several_hang(group, front, monkeypatch):
    def share(options=None):
        _, params = sharded(front, group, options)
        return params.reduce_comm == params.comm

    assert not share()
    assert share(CommOptions(separate_reductions=False))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.warns(UserWarning, match="CUDA_DEVICE_MAX_CONNECTIONS=1: "):
        assert share()
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert share() and not share(CommOptions(separate_reductions=True))
    group.called.clear()
    trained(sharded(front, group)[0])
    assert [call.split("(")[0].split(" ")[0] for call in group.called][-2:] == ["all_gather", "reduce_scatter"]


@FRONTS
def test_the_backend_adds_up(group, front):
    def calls(**options):
        group.called.clear()
        options = CommOptions(separate_reductions=False, **options)
        trained(sharded(front, group, options, narrow=True)[0])
        return [call for call in group.called if "bfloat16" in call and call.startswith("reduce_scatter")], group.called

    assert calls()[0] == []
    found, called = calls(sums_by="backend")
    assert len(found) == 1 and found[0].startswith("reduce_scatter(average)")
    assert not [call for call in called if call.startswith("all_to_all")]


@FRONTS
def test_groups_are_made_with_their_options(group, front, monkeypatch):
    made = []
    new_group_of = _compat.new_group_of
    monkeypatch.setattr(_compat, "backend_name", lambda group, device: "nccl")
    monkeypatch.setattr(_compat, "group_options", made.append)
    monkeypatch.setattr(
        _compat, "new_group_of", lambda ranks, backend, options=None: new_group_of(ranks, simulated.BACKEND)
    )
    unit_mesh.GroupCache.current()._made.clear()
    for _ in range(2):
        _, params = sharded(front, group, CommOptions(high_priority=True, max_ctas=4))
        assert params.comm != params.reduce_comm != TorchGroupCommunicator(group, SIM) != params.comm
    assert made == [{"high_priority": True, "max_ctas": 4}] * 2, "for gathers and reductions, of all units"


@FRONTS
@pytest.mark.parametrize("lacking", [{"max_ctas": 4}, {"memory": "symmetric"}, {"memory": "registered"}], ids=str)
def test_a_backend_without_an_option_is_named_on_all_ranks(world, group, front, lacking):
    given = CommOptions(**lacking) if world.rank else None  # the others learn it from rank 1
    ((name, value),) = lacking.items()
    with pytest.raises((ValueError, HpcfsdpError), match=f"simccl.*does not have {name}={value!r}"):
        sharded(front, group, given)


@FRONTS
def test_options_are_equal_on_all_ranks(world, group, front):
    with pytest.raises(DisagreementError, match=r"rank 0 passes .*sums_by='hpcfsdp'.* rank 1 passes .*'backend'"):
        sharded(front, group, CommOptions(sums_by="backend" if world.rank else "hpcfsdp"))


@FRONTS
def test_symmetric_memory_is_announced_before_each_gather(group, front, monkeypatch):
    made = []

    @contextlib.contextmanager
    def use(pool, device):
        before = simulated.allocations()
        yield
        made.append((pool.name, simulated.allocations() - before))

    gather = TorchGroupCommunicator._all_gather_into_tensor

    def gathered(comm, label, output, *rest):
        made.append(("gather", output.numel()))
        return gather(comm, label, output, *rest)

    monkeypatch.setattr(torch.get_device_module(SIM), "use_mem_pool", use, raising=False)
    monkeypatch.setattr(_compat, "has_symmetric_memory", lambda group, device: True)
    monkeypatch.setattr(_compat, "symmetric_pool", lambda group, device: SimpleNamespace(name="symmetric"))
    monkeypatch.setattr(_compat, "rendezvous", lambda tensor, group: made.append(("rendezvous", tensor.numel())))
    monkeypatch.setattr(TorchGroupCommunicator, "_all_gather_into_tensor", gathered)
    model, params = sharded(front, group, CommOptions(memory="symmetric"))
    made.clear()
    trained(model)
    numel = params.layout.padded_numel
    assert made[:3] == [("symmetric", 1), ("rendezvous", numel), ("gather", numel)]
    assert len([call for call in made if call[0] == "symmetric"]) == len([c for c in made if c == ("gather", numel)])
