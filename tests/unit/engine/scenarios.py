"""What programs do with a sharded model, each as a function of a ``Program``: all the ways to come by a wait."""

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.utils.checkpoint import checkpoint

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.engine.streams import Stream
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.unit.engine.recording import RecordingStreams

WIDTH = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Part(Layer):
    """A layer with an unused parameter."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


class Net(nn.Module):
    """Layers that are units, between two that belong to the root."""

    def __init__(self, depth=4):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList([Layer() for _ in range(depth)])

    def forward(self, x, layers=None):
        x = self.first(x)
        for index in range(len(self.layers)) if layers is None else layers:
            x = self.layers[index](x)
        return self.last(x)


class Rootless(nn.Sequential):
    """Units inside of a root that has no parameters."""

    def __init__(self, depth=4):
        super().__init__(*[Layer() for _ in range(depth)])


class Late:
    """Work that is done in ``wait``, no earlier."""

    def __init__(self, do):
        self._do = do

    def wait(self, timeout_s=None):
        do, self._do = self._do, None
        if do is not None:
            do()

    def is_completed(self):
        return self._do is None


class LateCommunicator(FakeCommunicator):
    """Collectives that are as late as they may be: inputs are read, and outputs written, in ``wait``."""

    def all_gather_into_tensor(self, output, shard, *, async_op=False):
        return _late(super().all_gather_into_tensor, async_op, output, shard)

    def reduce_scatter_tensor(self, output, full, op, *, async_op=False, **options):
        return _late(super().reduce_scatter_tensor, async_op, output, full, op, **options)

    def all_reduce(self, tensor, op, *, async_op=False, **options):
        return _late(super().all_reduce, async_op, tensor, op, **options)


def _late(operation, async_op, *args, **options):
    if not async_op:
        return operation(*args, **options)

    def do():
        # It would write to memory that is not there, and not always die of it.
        assert all(arg.untyped_storage().nbytes() for arg in args if isinstance(arg, torch.Tensor)), "memory was freed"
        operation(*args, **options)

    return Late(do)


class Program:
    """Runs models over imagined ranks, on queues that a test gives."""

    def __init__(self, streams, *, watch=None, comm=FakeCommunicator, patch=None):
        self.streams, self.watch, self._comm, self._patch = streams, watch, comm, patch
        self.models = []
        self._offloaded = False
        torch.manual_seed(0)

    def shard(self, module, size=2, group=None, **arguments):
        """The module with its layers sharded, and its engine."""
        policy = ModuleWrapPolicy({Layer, Part})
        model = FullyShardedDataParallel(module, group or self._comm(0, size), auto_wrap_policy=policy, **arguments)
        self._offloaded = arguments.get("cpu_offload") is not None
        sharded_params = sharded_params_of(model)
        if self._offloaded:
            self._pretend_offload(sharded_params)
        assert model.check_is_root()
        for flat in sharded_params:
            if self.watch is not None:
                self.watch.name(flat.full, (id(flat), "values"))
                self.watch.name(flat.parameter, (id(flat), "shard"), on_host=self._offloaded)
        self.models.append(model)
        return model

    def hybrid(self, module, **arguments):
        strategy = arguments.pop("sharding_strategy", ShardingStrategy.HYBRID_SHARD)
        group = (self._comm(0, 2), self._comm(0, 2))
        return self.shard(module, group=group, sharding_strategy=strategy, **arguments)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step(self, model, optimizer):
        """An optimizer step, which runs where the shards are."""
        sharded_params = [flat for flat in sharded_params_of(model) if has_grad(flat)]
        queue = Stream.HOST if self._offloaded else Stream.COMPUTE
        if isinstance(self.streams, RecordingStreams):
            self.streams.touch(
                queue,
                reads=[(id(flat), "shard grad") for flat in sharded_params],
                writes=[(id(flat), "shard") for flat in sharded_params],
            )
        optimizer.step()

    def train(self, model, steps=3, call=None, between=None, optimizer=None):
        optimizer = optimizer or self.optimizer(model)
        for turn in range(steps):
            x = batch(turn)
            outputs = call(model, x, turn) if call is not None else model(x)
            outputs.square().mean().backward()
            if between is not None:
                between(model, turn)
            self.step(model, optimizer)
            optimizer.zero_grad()
        return model

    def _pretend_offload(self, sharded_params):
        """On a CPU the shards are where the module computes; let them be called elsewhere."""
        for flat in sharded_params:
            flat.device = torch.device("cpu", 0)  # not equal to "cpu"
        if self.watch is not None:
            landed = self.watch.on_host
            self._patch.setattr("hpcfsdp.params.gradient._copied_to", lambda home, grad: landed(grad.clone()))


@torch.no_grad()
def halve(model):
    """A change of parameters by the program itself."""
    for parameter in model.parameters():
        parameter.mul_(0.5)


def sharded_params_of(model):
    return [flat for wrapper in FullyShardedDataParallel.fsdp_modules(model) for flat in wrapper._unit.sharded_params]


def has_grad(flat):
    return flat.parameter.grad is not None or any(leaf.grad is not None for leaf in flat.leaves)


def batch(turn):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(turn))


OFFLOAD = CPUOffload(offload_params=True)
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
SCENARIOS = []


def scenario(function):
    SCENARIOS.append(function)
    return function


@scenario
def nested_units(program):
    program.train(program.shard(Net()))


@scenario
def four_ranks_without_prefetch(program):
    program.train(program.shard(Net(), size=4, backward_prefetch=None))


@scenario
def one_unit(program):
    program.train(program.shard(nn.Linear(WIDTH, 2)))


@scenario
def one_rank(program):
    program.train(program.shard(Net(), size=1))


@scenario
def forward_prefetch_and_backward_prefetch_before(program):
    program.train(program.shard(Net(), forward_prefetch=True, backward_prefetch=PRE))


@scenario
def forward_prefetch_and_backward_prefetch_after(program):
    program.train(program.shard(Net(), forward_prefetch=True, backward_prefetch=POST))


@scenario
def values_kept_for_backward(program):
    program.train(program.shard(Net(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, forward_prefetch=True))


@scenario
def nothing_sharded(program):
    program.train(program.shard(Net(), sharding_strategy=ShardingStrategy.NO_SHARD))


@scenario
def nothing_sharded_one_rank(program):
    program.train(program.shard(Net(), size=1, sharding_strategy=ShardingStrategy.NO_SHARD))


@scenario
def hybrid(program):
    program.train(program.hybrid(Net(), forward_prefetch=True))


@scenario
def hybrid_with_values_kept(program):
    program.train(program.hybrid(Net(), sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2))


def accumulate(program, model):
    optimizer = program.optimizer(model)
    for turn in range(6):
        held_back = turn % 3 != 2
        with model.no_sync() if held_back else contextlib.nullcontext():
            model(batch(turn)).square().mean().backward()
        if not held_back:
            program.step(model, optimizer)
            optimizer.zero_grad()


@scenario
def gradients_kept_back(program):
    accumulate(program, program.shard(Net()))


@scenario
def gradients_kept_back_and_offloaded(program):
    accumulate(program, program.shard(Net(), cpu_offload=OFFLOAD))


@scenario
def gradients_kept_back_hybrid(program):
    accumulate(program, program.hybrid(Net(), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)))


@scenario
def gradients_kept_back_in_another_dtype(program):
    accumulate(program, program.shard(Net(), mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16)))


@scenario
def mixed_precision(program):
    program.train(program.shard(Net(), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)))


@scenario
def low_precision_gradients(program):
    mixed = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    program.train(program.shard(Net(), mixed_precision=mixed))


@scenario
def original_parameters(program):
    program.train(program.shard(Net(), use_orig_params=True))


@scenario
def original_parameters_offloaded(program):
    program.train(program.shard(Net(), use_orig_params=True, cpu_offload=OFFLOAD))


class Checkpointed(Net):
    reentrant = False

    def forward(self, x, layers=None):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)


class CheckpointedInside(nn.Module):
    """One unit with parts that are recomputed one after the other."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Net(2), Net(2)])
        self.narrow = nn.Linear(2, WIDTH)

    def forward(self, x):
        for part in self.parts:
            x = self.narrow(checkpoint(part, x, use_reentrant=False))
        return x


@scenario
def recomputed(program):
    program.train(program.shard(Checkpointed(), forward_prefetch=True))


@scenario
def recomputed_reentrant(program):
    module = Checkpointed()
    module.reentrant = True
    program.train(program.shard(module))


@scenario
def recomputed_around_units(program):
    program.train(program.shard(CheckpointedInside()))


@scenario
def offloaded(program):
    program.train(program.shard(Net(), cpu_offload=OFFLOAD, forward_prefetch=True))


@scenario
def offloaded_and_clipped(program):
    program.train(program.shard(Net(), cpu_offload=OFFLOAD), between=lambda model, _: model.clip_grad_norm_(0.1))


@scenario
def offloaded_with_frozen_units_to_go_through(program):
    # The last thing that the backward gathers are units without gradients: no reduction comes after that, and no step
    # of the optimizer, but programs write shards for other reasons, too.
    module = Rootless()
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)

    def call(model, x, _turn):
        return model(x.requires_grad_())

    model = program.shard(module, cpu_offload=OFFLOAD, backward_prefetch=None)
    program.train(model, call=call, between=lambda model, _: halve(model))


@scenario
def offloaded_and_accumulated_by_the_program(program):
    model = program.shard(Net(), cpu_offload=OFFLOAD)
    optimizer = program.optimizer(model)
    for turn in range(4):
        model(batch(turn)).square().mean().backward()
        if turn % 2:
            program.step(model, optimizer)
            optimizer.zero_grad()


@scenario
def offloaded_and_changed_after_an_evaluation(program):
    model = program.shard(Net(), cpu_offload=OFFLOAD)
    for turn in range(2):
        with torch.no_grad():
            model(batch(turn))
            halve(model)


@scenario
def clipped(program):
    program.train(program.shard(Net()), between=lambda model, _: model.clip_grad_norm_(0.1))


@scenario
def evaluated_between(program):
    def evaluate(model, turn):
        with torch.no_grad():
            model(batch(10 + turn))

    for prefetch in (False, True):
        program.train(program.shard(Net(), forward_prefetch=prefetch), between=evaluate)


@scenario
def changed_after_an_evaluation(program):
    model = program.shard(Net(), forward_prefetch=True)
    for turn in range(3):
        with torch.no_grad():
            model(batch(turn))
            halve(model)


@scenario
def a_unit_called_twice(program):
    program.train(program.shard(Net()), call=lambda model, x, _: model(x, layers=[0, 1, 0, 2]))


@scenario
def units_that_are_not_called(program):
    program.train(program.shard(Net(), forward_prefetch=True), call=lambda model, x, _: model(x, layers=[0, 2]))


@scenario
def a_unit_expected_and_not_called(program):
    # What comes next is gathered ahead; here it does not come.
    def call(model, x, turn):
        return model(x, layers=[0, 1] if turn % 2 else [0, 1, 2])

    for module in (Net(), Rootless()):
        if isinstance(module, Rootless):
            model = program.shard(module, forward_prefetch=True)
            optimizer = program.optimizer(model)
            program.train(model, steps=2, optimizer=optimizer)
            model[0](batch(0)).square().mean().backward()
            program.step(model, optimizer)
        else:
            program.train(program.shard(module, forward_prefetch=True), steps=4, call=call)


@scenario
def a_unit_expected_and_not_called_in_an_evaluation(program):
    model = program.shard(Net(), forward_prefetch=True)
    for turn in range(4):
        with torch.no_grad():
            model(batch(turn), layers=[0, 1] if turn % 2 else [0, 1, 2])
            halve(model)


@scenario
def a_forward_without_a_backward(program):
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = program.shard(Net(), sharding_strategy=strategy)
        program.train(model, between=lambda model, turn: model(batch(20 + turn)))


class Partly(nn.Module):
    """Inputs without gradients do not show the end of a unit's backward: it ends with that of the model."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(4)])

    def forward(self, x):
        return sum(part(x) for part in self.parts)


@scenario
def unused_parameters(program):
    program.train(program.shard(Partly()))


@scenario
def accumulated_by_the_program(program):
    for arguments in ({}, {"use_orig_params": True}, {"mixed_precision": MixedPrecision(torch.bfloat16)}):
        model = program.shard(Net(), **arguments)
        optimizer = program.optimizer(model)
        for turn in range(4):
            model(batch(turn)).square().mean().backward()
            if turn % 2:
                program.step(model, optimizer)
                optimizer.zero_grad(set_to_none=False)


@scenario
def several_backwards_of_one_forward(program):
    model = program.shard(Net())
    optimizer = program.optimizer(model)
    for turn in range(3):
        loss = model(batch(turn)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        program.step(model, optimizer)
        optimizer.zero_grad()


@scenario
def a_backward_broken_off(program):
    model = program.shard(Net())
    optimizer = program.optimizer(model)
    program.train(model, steps=1, optimizer=optimizer)
    handle = model.layers[0].register_full_backward_pre_hook(_break)
    with contextlib.suppress(Broken):
        model(batch(0)).square().mean().backward()
    handle.remove()
    optimizer.zero_grad()
    program.train(model, steps=2, optimizer=optimizer)


@scenario
def a_forward_broken_off(program):
    model = program.shard(Net(), forward_prefetch=True)
    optimizer = program.optimizer(model)
    program.train(model, steps=2, optimizer=optimizer)
    handle = model.layers[1].register_forward_pre_hook(_break)
    with contextlib.suppress(Broken):
        model(batch(0))
    handle.remove()
    halve(model)
    program.train(model, steps=2, optimizer=optimizer)


class Broken(Exception):
    pass


def _break(*_):
    raise Broken


@scenario
def reduced_by_a_hook_of_the_program(program):
    model = program.shard(Net())
    model.register_comm_hook(None, lambda _state, full, shard: shard.copy_(full.chunk(2)[0]))
    program.train(model)


@scenario
def whole_parameters_between(program):
    def change(model, _turn):
        with FullyShardedDataParallel.summon_full_params(model):
            halve(model)

    program.train(program.shard(Net(), forward_prefetch=True), between=change)
