import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import hpcfsdp
from hpcfsdp import wrap
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import DisagreementError, EngineError
from hpcfsdp.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from tests.unit.params.gathering import unshard, values_bytes


def shard(module, comm=None, **arguments):
    return FullyShardedDataParallel(module, process_group=comm or FakeCommunicator(), **arguments)


class Mixed(nn.Module):
    """Tied, frozen, reused and recomputed layers, two dtypes, a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.wide = nn.Linear(4, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.first(self.embed(ids))
        x = recompute(self.second, x, use_reentrant=False).tanh()
        x = self.frozen(self.first(x))
        return self.head(self.wide(x.double()).float() * self.scale)


POLICIES = {
    "one_unit": None,
    "linears": wrap.ModuleWrapPolicy({nn.Linear}),
    "some": lambda module, recurse, nonwrapped_numel: recurse or getattr(module, "out_features", 0) == 4,
}


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("name", ["one_unit", "some"])
def test_training_equals_that_of_the_plain_module(name, strategy, use_orig_params):
    torch.manual_seed(0)
    plain = Mixed()
    model = shard(
        copy.deepcopy(plain),
        auto_wrap_policy=POLICIES[name],
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
    )
    nets = [plain, model]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    for step in range(3):
        losses, norms = [], []
        for net, optimizer in zip(nets, optimizers, strict=True):
            for part in range(2):
                ids = torch.tensor([[step, part, 2], [3, 4, 5]])
                loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
                loss.backward()
            if net is plain:
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
            else:
                norms.append(net.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(norm.float() for norm in norms))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids))
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        assert wrapper._unit.is_idle
        assert all(values_bytes(flat) == 0 for flat in wrapper._unit.sharded_params)


@pytest.mark.parametrize("shares_memory", [False, True], ids=["messages", "shared"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("arguments", [{}, {"forward_prefetch": True}, {"use_orig_params": True}], ids=str)
def test_two_ranks_train_like_one_on_all_data(run_ranks, strategy, shares_memory, arguments):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    data = torch.randn(4, 3)

    def body(comm):
        net = shard(
            copy.deepcopy(plain),
            comm,
            auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=ShardingStrategy[strategy],
            **arguments,
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(data[comm.rank * 2 : comm.rank * 2 + 2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return net(data).detach()

    results = run_ranks(2, body, shares_memory=shares_memory)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        plain(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in results:
        torch.testing.assert_close(result, plain(data).detach())


def test_the_wrapper_is_found_in_the_package():
    assert hpcfsdp.FullyShardedDataParallel is FullyShardedDataParallel


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("sharding_strategy", 1, TypeError, "sharding_strategy must be a ShardingStrategy, not 1"),
        (
            "sharding_strategy",
            ShardingStrategy.HYBRID_SHARD,
            ValueError,
            "HYBRID_SHARD takes a pair (shard, replicate)",
        ),
        ("cpu_offload", True, TypeError, "cpu_offload must be a CPUOffload or None, not True"),
        ("mixed_precision", "bf16", TypeError, "mixed_precision must be a MixedPrecision or None, not 'bf16'"),
        ("backward_prefetch", "pre", TypeError, "backward_prefetch must be a BackwardPrefetch or None, not 'pre'"),
        ("device_mesh", "mesh", ValueError, "process_group and device_mesh were both given"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_and_the_module_left_alone(name, value, error, message):
    module = nn.Linear(2, 2)
    with pytest.raises(error) as caught:
        shard(module, **{name: value})
    assert str(caught.value).startswith(message)
    assert list(dict(module.named_parameters())) == ["weight", "bias"]
    assert not module.weight.isnan().any()


def test_ignored_modules_and_parameters_stay_as_they_are():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model = shard(module, ignored_states=[module[0], module[1]], auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}))
    assert isinstance(module[2], FullyShardedDataParallel)
    names = [name.removeprefix("_fsdp_wrapped_module.") for name, _ in model.named_parameters()]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "2._fsdp_wrapped_module._flat_param"]
    assert not module[0].weight.isnan().any()
    model = shard(nn.Sequential(nn.PReLU(), nn.Linear(2, 2)), ignored_modules=[])
    assert len(model._unit.sharded_params[0].leaves) == 3


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_parameters_and_gradients_have_the_dtypes_that_mixed_precision_asks_for(strategy, use_orig_params):
    seen = []

    class Seeing(nn.Linear):
        def forward(self, x):
            seen.append((x.dtype, self.weight.dtype, self.scale.dtype))
            return super().forward(x)

    module = Seeing(2, 2)
    module.register_buffer("scale", torch.ones(1))
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.float16, keep_low_precision_grads=True)
    model = shard(
        module,
        mixed_precision=precision,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
    )
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    assert seen == [(torch.bfloat16, torch.bfloat16, torch.float16)]
    assert loss.dtype == torch.bfloat16
    assert {(param.dtype, param.grad.dtype) for param in model.parameters()} == {(torch.float32, torch.float32)}


def test_the_outermost_wrapper_moves_its_arguments_to_the_device_that_it_computes_on(monkeypatch):
    seen = []

    class Seeing(nn.Linear):
        def forward(self, x, more):
            seen.append((x.device.type, more["mask"].device.type, more["name"]))
            return self.weight.sum()

    model = shard(nn.Sequential(Seeing(2, 2)))
    model.module.forward = lambda x, more: model.module[0](x, more=more)
    batch = {"mask": torch.ones(2), "name": "a"}
    model(torch.ones(1, 2), batch)
    monkeypatch.setattr(model._unit.root, "device", torch.device("meta"))
    model(torch.ones(1, 2), batch)
    assert seen == [("cpu", "cpu", "a"), ("meta", "meta", "a")]
    assert batch["mask"].device.type == "cpu"


def test_original_parameters_are_those_of_the_module_with_their_names():
    module = Mixed()
    names = [name for name, _ in module.named_parameters()]
    originals = dict(module.named_parameters())
    model = shard(module, use_orig_params=True)
    found = dict(model.named_parameters())
    assert [name.removeprefix("_fsdp_wrapped_module.") for name in found] == names
    assert all(param is originals[name.removeprefix("_fsdp_wrapped_module.")] for name, param in found.items())
    assert {param.dim() for param in found.values()} == {1}
    assert sum(param.numel() for param in found.values()) == sum(param.numel() for param in Mixed().parameters())


def test_shards_are_offloaded_to_where_they_are_on_a_cpu():
    model = shard(nn.Linear(2, 2), cpu_offload=CPUOffload(offload_params=True))
    model(torch.ones(1, 2)).sum().backward()
    flat = model._unit.sharded_params[0]
    assert {flat.parameter.device, flat.parameter.grad.device} == {torch.device("cpu")}


def test_values_that_mean_the_default_are_accepted():
    model = shard(
        nn.Linear(2, 2),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        cpu_offload=CPUOffload(offload_params=False),
        mixed_precision=MixedPrecision(),
        ignored_modules=[],
        forward_prefetch=False,
        use_orig_params=False,
        backward_prefetch=None,
        device_id=torch.device("cpu"),
        limit_all_gathers=False,
    )
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_wrapping_twice_is_refused():
    with pytest.raises(ValueError) as caught:
        shard(shard(nn.Linear(2, 2)))
    assert str(caught.value) == "the module is already a FullyShardedDataParallel: wrap a module once"


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_module_without_parameters_passes_through(use_orig_params):
    model = shard(nn.ReLU(), use_orig_params=use_orig_params)
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    model(x).sum().backward()
    assert x.grad.tolist() == [0, 1]
    assert model.clip_grad_norm_(1.0) == 0
    assert model.state_dict() == {}
    model.load_state_dict({})
    with model.summon_full_params(model):
        assert list(model.parameters()) == []


def test_a_module_that_ignores_itself_is_trained_as_it_is():
    linear = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="among the ignored modules itself: none of it is sharded"):
        model = shard(linear, ignored_modules=[linear])
    model(torch.ones(1, 2)).sum().backward()
    assert list(model.state_dict()) == ["weight", "bias"]
    assert linear.weight.grad.tolist() == [[1, 1], [1, 1]]
    assert model.clip_grad_norm_(1.0).item() == pytest.approx(6**0.5)


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda modules: nn.ModuleDict({"a": modules[0]})])
def test_a_container_without_a_forward_is_a_warning(kind):
    with pytest.warns(UserWarning, match="has no forward in which its parameters could be gathered"):
        shard(kind([nn.Linear(2, 2)]))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_parameter_of_an_inner_unit_stays_sharded_if_the_outer_one_is_to_ignore_it(use_orig_params):
    inner = shard(nn.Linear(2, 2), use_orig_params=use_orig_params)
    taken = list(inner.parameters())
    with pytest.warns(UserWarning, match="already sharded by a unit inside, and stay sharded"):
        model = shard(nn.Sequential(nn.Linear(2, 2), inner), ignored_states=taken, use_orig_params=use_orig_params)
    assert [len(unit._unit.sharded_params) for unit in model.fsdp_modules(model)] == [1, 1]
    model(torch.ones(1, 2)).sum().backward()


def test_a_root_may_own_no_parameters():
    model = shard(nn.Sequential(shard(nn.Linear(2, 2)), nn.ReLU()))
    assert model._unit.sharded_params == ()
    model(torch.ones(1, 2)).sum().backward()
    assert model[0]._unit.sharded_params[0].parameter.grad is not None


@pytest.mark.parametrize("value", [3, None, nn.Linear, torch.zeros(2)])
def test_what_is_no_module_is_refused_by_type(value):
    with pytest.raises(TypeError) as caught:
        shard(value)
    assert str(caught.value) == f"FullyShardedDataParallel wraps a torch.nn.Module, not {type(value).__name__}"


def test_what_is_on_the_meta_device_is_initialised_unit_by_unit():
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torch.manual_seed(3)
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = shard(module, auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}))
    torch.testing.assert_close(model(torch.ones(1, 2)), expected(torch.ones(1, 2)))


def test_param_init_fn_gives_values_instead():
    def initialise(module):
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 3.0)

    model = shard(nn.Linear(2, 2, device="meta"), param_init_fn=initialise)
    assert model(torch.ones(1, 2)).tolist() == [[9, 9]]


def test_a_parameter_tied_to_a_unit_that_is_wrapped_already_is_named():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    module[0] = shard(module[0])
    with pytest.raises(ValueError) as caught:
        shard(module)
    assert str(caught.value) == (
        "parameter '1.weight' is tied to 'weight', which belongs to a unit that is already wrapped: wrap the smallest "
        "module that holds both instead"
    )


def test_a_policy_that_tears_tied_parameters_apart_is_refused():
    with pytest.raises(ValueError, match=r"^parameters 'embed\.weight' and 'head\.weight' are tied but the policy"):
        shard(Mixed(), auto_wrap_policy=POLICIES["linears"])


def test_a_policy_for_a_module_that_was_wrapped_by_hand_is_refused():
    module = nn.Sequential(shard(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(ValueError) as caught:
        shard(module, auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}))
    assert str(caught.value) == (
        "auto_wrap_policy was given for a Sequential that already contains FullyShardedDataParallel modules: wrap "
        "either by hand or by policy"
    )


def test_arguments_of_a_policy_reach_the_units_they_are_for():
    own = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True}
    policy = wrap.CustomPolicy(lambda module: own if isinstance(module, nn.Linear) else isinstance(module, nn.PReLU))
    model = shard(nn.Sequential(nn.Linear(2, 2), nn.PReLU()), auto_wrap_policy=policy)
    strategies = [wrapper._unit.mesh.strategy for wrapper in FullyShardedDataParallel.fsdp_modules(model)]
    assert [strategy.name for strategy in strategies] == ["FULL_SHARD", "NO_SHARD", "FULL_SHARD"]
    names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
    assert names == ["0.weight", "0.bias", "1._flat_param"]


def test_a_module_registered_twice_becomes_one_unit():
    shared = nn.Linear(2, 2)
    model = shard(nn.Sequential(shared, nn.Sequential(shared)), auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}))
    assert model[0] is model[1][0]
    assert len(FullyShardedDataParallel.fsdp_modules(model)) == 2
    model(torch.ones(1, 2)).sum().backward()


def test_parameters_at_rest_read_nan_in_their_shape_and_dtype():
    module = nn.Linear(3, 2, dtype=torch.float64)
    model = shard(module)
    for _ in range(2):
        assert (module.weight.shape, module.weight.dtype) == ((2, 3), torch.float64)
        assert module.weight.isnan().all()
        assert module.bias.isnan().all()
        model(torch.ones(1, 3, dtype=torch.float64))


def test_parameters_at_rest_refuse_to_be_written():
    module = nn.Linear(3, 2)
    shard(module)
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        module.weight.add_(1)
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        module.weight.copy_(torch.ones(2, 3))
    with torch.no_grad():
        assert module.weight.isnan().all()


def test_the_optimizer_gets_one_shard_for_each_dtype_and_kind_of_parameter():
    model = shard(Mixed())
    found = {(p.dtype, p.requires_grad, p.dim()) for p in model.parameters()}
    assert found == {(torch.float32, True, 1), (torch.float64, True, 1), (torch.float32, False, 1)}
    assert [name for name, _ in model.named_parameters()] == [
        f"_fsdp_wrapped_module._flat_param{suffix}" for suffix in ("", "_1", "_2")
    ]


def test_buffers_stay_whole():
    model = shard(nn.BatchNorm1d(3))
    model(torch.randn(4, 3))
    assert model.running_mean.shape == (3,)
    assert int(model.num_batches_tracked) == 1


def test_a_model_can_be_printed_and_switched_to_evaluation():
    model = shard(nn.Sequential(nn.Linear(3, 2)), auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}))
    assert "FullyShardedDataParallel(" in str(model)
    assert "Linear(in_features=3, out_features=2, bias=True)" in str(model)
    assert not model.eval()[0].module.training


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_state_dict_is_that_of_the_plain_module_with_a_prefix_and_an_own_dictionary(use_orig_params):
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = {f"net.{key}": value.clone() for key, value in plain.state_dict().items()}
    model = shard(plain, use_orig_params=use_orig_params)
    names = [name for name, _ in model.named_parameters()]
    own = {"before": 1}
    for state in (model.state_dict(prefix="net."), model.state_dict(destination=own, prefix="net.")):
        assert [key for key in state if key != "before"] == list(expected)
        assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert model.state_dict(own, "net.", True) is own
    assert [name for name, _ in model.named_parameters()] == names
    kept = model.state_dict(keep_vars=True)
    assert kept["1.running_mean"] is model.module[1].running_mean
    assert model.state_dict()["1.running_mean"].data_ptr() == kept["1.running_mean"].data_ptr()


@pytest.mark.parametrize(
    ("use", "dtype"),
    [
        (lambda model: model.to(torch.float64), "torch.float64"),
        (lambda model: model.half(), "torch.float16"),
        (lambda model: nn.Sequential(model).double(), "torch.float64"),
    ],
)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_sharded_model_is_not_cast(use, dtype, use_orig_params):
    model = shard(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), use_orig_params=use_orig_params)
    with pytest.raises(EngineError) as caught:
        use(model)
    assert str(caught.value) == (
        f"a sharded model cannot be moved or cast as a whole (from cpu, torch.float32 to cpu, {dtype}): move or cast "
        "the module before wrapping it, or pass device_id"
    )
    assert model[1].running_mean.dtype == torch.float32
    model(torch.ones(3, 2)).sum().backward()


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_moving_to_where_it_is_changes_nothing(use_orig_params):
    model = shard(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    before = {name: (param, param.data_ptr()) for name, param in model.named_parameters()}
    assert model.to("cpu") is model
    assert model.cpu() is model
    nn.Sequential(model).to(torch.device("cpu"), torch.float32)
    after = {name: (param, param.data_ptr()) for name, param in model.named_parameters()}
    assert all(after[name][0] is param and after[name][1] == place for name, (param, place) in before.items())
    model(torch.ones(3, 2)).sum().backward()


def test_attributes_items_and_length_are_those_of_the_module():
    class Named(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.hidden_size = 7

        def greet(self):
            return "hello"

    model = shard(Named(nn.Linear(2, 2), nn.ReLU()))
    assert (model.hidden_size, model.greet(), len(model)) == (7, "hello", 2)
    assert model[1] is model.module[1]
    assert list(model) == list(model.module)
    assert model.module is model._fsdp_wrapped_module
    with pytest.raises(AttributeError, match=r"^'Named' object has no attribute 'nothing'"):
        _ = model.nothing


def test_fsdp_modules_lists_outer_ones_first_and_roots_alone_if_asked():
    first = shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}))
    second = shard(nn.Linear(2, 2))
    model = nn.ModuleList([first, second])
    assert FullyShardedDataParallel.fsdp_modules(model) == [first, first[0], first[1], second]
    assert FullyShardedDataParallel.fsdp_modules(model, root_only=True) == [first, second]
    assert FullyShardedDataParallel.fsdp_modules(nn.Linear(1, 1)) == []


def test_without_a_process_group_init_is_named():
    with pytest.raises(RuntimeError, match=r"^there is no process group yet: call hpcfsdp\.init\(\) first"):
        FullyShardedDataParallel(nn.Linear(2, 2))


def test_a_process_group_of_another_type_is_refused_by_type():
    with pytest.raises(TypeError) as caught:
        FullyShardedDataParallel(nn.Linear(2, 2), "world")
    assert str(caught.value) == (
        "process_group must be a torch.distributed ProcessGroup or an hpcfsdp Communicator, not str"
    )


def test_clipping_an_inner_unit_is_refused():
    model = shard(nn.Sequential(nn.Linear(2, 2)), auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(EngineError) as caught:
        model[0].clip_grad_norm_(1.0)
    assert str(caught.value) == (
        "clip_grad_norm_ was called on the inner unit 0: call it on the root (outermost) FullyShardedDataParallel"
    )


def test_clipping_inside_of_a_forward_is_refused_with_the_units_name():
    class Clipping(nn.Linear):
        def forward(self, x):
            model.clip_grad_norm_(1.0)

    model = shard(Clipping(2, 2))
    with pytest.raises(EngineError, match=r"^clip_grad_norm_ was called while Clipping is in forward: call it before"):
        model(torch.ones(1, 2))


def test_units_are_named_by_their_place_in_the_model_once_it_was_called():
    policy = wrap.ModuleWrapPolicy({nn.Linear})
    model = shard(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)), auto_wrap_policy=policy)
    model(torch.ones(1, 2))
    units = [wrapper._unit.name for wrapper in FullyShardedDataParallel.fsdp_modules(model)]
    assert units == ["Sequential", "0.0", "1"]


def test_fewer_elements_than_ranks_are_refused(run_ranks):
    def body(comm):
        shard(nn.PReLU(2), comm)(torch.ones(1, 2))

    for error in run_ranks(3, body):
        assert type(error) is EngineError
        assert str(error) == (
            "the model has 2 parameter element(s) for 3 ranks: some ranks would hold none of it; start fewer ranks or "
            "use a larger model"
        )


def test_every_rank_takes_rank_0s_parameters_and_buffers_if_asked(run_ranks):
    def body(comm):
        module = nn.BatchNorm1d(3)
        nn.init.constant_(module.weight, comm.rank + 5.0)
        module.running_mean.fill_(comm.rank + 7.0)
        model = shard(module, comm, sync_module_states=True)
        for flat in model._unit.sharded_params:
            unshard(flat)
        return module.weight.tolist(), module.running_mean.tolist()

    assert run_ranks(2, body) == [([5, 5, 5], [7, 7, 7])] * 2


def test_ranks_that_train_different_parameters_are_refused(run_ranks):
    def body(comm):
        shard(nn.Linear(2, 2).requires_grad_(comm.rank == 0), comm)

    results = run_ranks(2, body)
    assert [type(error) for error in results] == [DisagreementError] * 2
    assert "requires_grad" in str(results[0])


def test_a_communicator_of_ones_own_leaves_the_module_on_its_device():
    assert shard(nn.Linear(2, 2))._unit.sharded_params[0].parameter.device == torch.device("cpu")


def test_public_attributes_are_those_of_torchs_class():
    given = {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
        "cpu_offload": CPUOffload(offload_params=True),
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        "forward_prefetch": True,
        "limit_all_gathers": False,
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    }
    model = shard(nn.Sequential(shard(nn.Linear(2, 2)), nn.Linear(2, 2)), FakeCommunicator(1, 3), **given)
    assert {name: getattr(model, name) for name in given} == given
    assert (model.rank, model.world_size, model.compute_device) == (1, 3, torch.device("cpu"))
    assert model.params == [model._flat_param]
    inner = model[0]
    assert inner.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert (inner.mixed_precision, inner.cpu_offload) == (MixedPrecision(), CPUOffload())
    with pytest.raises(AttributeError):
        model.rank = 2


def test_the_training_state_is_that_of_the_unit():
    seen = []

    class Seeing(nn.Linear):
        def forward(self, x):
            seen.append(model.training_state.name)
            return super().forward(x)

    model = shard(Seeing(2, 2))
    model(torch.ones(1, 2))
    with model.summon_full_params(model):
        seen.append(model.training_state.name)
    seen.append(model.training_state.name)
    assert seen == ["FORWARD_BACKWARD", "SUMMON_FULL_PARAMS", "IDLE"]


def test_attributes_of_the_wrapper_come_before_those_of_the_module():
    linear = nn.Linear(2, 2)
    linear.rank, linear.colour = 7, "red"
    model = shard(linear)
    assert (model.rank, model.module.rank, model.colour) == (0, 7, "red")


def test_attributes_of_the_module_are_set_where_its_forward_reads_them():
    class Scaled(nn.Linear):
        factor = 1.0

        def forward(self, x):
            return super().forward(x) * self.factor

    model = shard(nn.Sequential(Scaled(2, 2)), auto_wrap_policy=wrap.ModuleWrapPolicy({Scaled}))
    x = torch.ones(1, 2)
    before = model(x)
    model[0].factor, model[0].own = 2.0, "the wrapper's"
    assert torch.equal(model(x), 2 * before)
    assert model[0].module.factor == 2.0
    assert not hasattr(model[0].module, "own")


def test_without_torch_distributed_there_is_no_process_group():
    with pytest.raises(RuntimeError, match="no process group yet"):
        shard(nn.Linear(2, 2)).process_group  # noqa: B018


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("full", ["", "1"])
def test_mixed_precision_is_left_out_in_eval_mode_if_that_is_asked_for(monkeypatch, run_ranks, use_orig_params, full):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", full)

    def net():
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for number, param in enumerate(module.parameters()):
            nn.init.constant_(param, 1 + 2.0 ** -(10 + number))
        module[0].register_buffer("scale", torch.tensor([3.0]))
        return module

    def body(comm):
        dtypes = []
        x, plain = torch.full((1, 2), 1 + 2.0**-12), net()
        precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
        model = shard(
            net(),
            comm,
            mixed_precision=precision,
            use_orig_params=use_orig_params,
            auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}),
        )
        for mode in (True, False, True, False):
            model.train(mode)
            y = model(x)
            y.float().sum().backward()
            dtypes.append((y.dtype, model[0].scale.dtype))
            if not mode and full:
                assert torch.equal(y, plain(x))
        plain(x).sum().backward()
        expected = torch.cat([param.grad.flatten() for param in plain.parameters()])
        with model.summon_full_params(model, with_grads=True):
            grads = torch.cat([param.grad.flatten() for param in model.parameters()])
        torch.testing.assert_close(grads, 4 * expected, rtol=1e-2, atol=0)
        return dtypes

    low, high = (torch.bfloat16,) * 2, (torch.float32 if full else torch.bfloat16,) * 2
    for shares_memory in (False, True):
        assert run_ranks(2, body, shares_memory) == [[low, high, low, high]] * 2
    assert body(FakeCommunicator()) == [low, high, low, high]


def test_modules_have_the_mark_by_which_libraries_know_those_of_fsdp():
    """Of all modules but ignored ones, as torch's: transformers asks for it, and so does the compiler."""
    model = Mixed()
    wrapped = shard(model, auto_wrap_policy=POLICIES["some"], ignored_modules=[model.wide])
    marked = {name for name, module in wrapped.named_modules() if getattr(module, "_is_fsdp_managed_module", False)}
    assert {name for name, _ in wrapped.named_modules()} - marked == {"_fsdp_wrapped_module.wide"}


def test_a_wrapper_is_true_as_any_module():
    assert shard(nn.Linear(2, 2)) or False
    assert shard(nn.Sequential(nn.Linear(2, 2)))
