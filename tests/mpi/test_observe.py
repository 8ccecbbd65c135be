"""Figures of several ranks: means, who waits for whom, and one trace of all."""

import json
import time

import pytest
import torch
from torch import nn

import hpcfsdp
from hpcfsdp import checkpoint, observe, timeline
from hpcfsdp.errors import UsageError
from hpcfsdp.observe import facts
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.unit.observe.traces import lines_on_all_ranks, trace_of

pytestmark = pytest.mark.ranks(2, 3, 1)

LATE_S = 0.08


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)


class Chain(nn.Sequential):
    def __init__(self):
        super().__init__(*(Layer() for _ in range(3)))


def as_class(world):
    return hpcfsdp.FullyShardedDataParallel(Chain(), auto_wrap_policy=ModuleWrapPolicy({Layer}))


def in_place(world):
    model = Chain()
    for layer in model:
        hpcfsdp.fully_shard(layer)
    return hpcfsdp.fully_shard(model)


def plain(world):
    return Chain()


SHARDED = pytest.mark.parametrize("build", [as_class, in_place])


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    left, timeline.recorder = timeline.recorder, None
    assert left is None


def train(run, model, optimizer, steps, world, *, late=None):
    for _ in range(steps):
        x = torch.ones(2, 8)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == late:
            time.sleep(LATE_S)
        run.step(loss=float(world.rank), tokens=1 + world.rank)


def observed(path, model, **options):
    optimizer = torch.optim.AdamW(model.parameters())
    return observe.Run(path, model=model, optimizer=optimizer, peak_flops=1e9, **options), optimizer


@pytest.mark.parametrize("build", [as_class, in_place, plain])
def test_the_loss_is_the_mean_over_tokens_and_figures_are_of_all_ranks(world, shared_path, build):
    run, optimizer = observed(shared_path, build(world))
    with run:
        train(run, build(world), optimizer, 3, world)
    ranks = range(world.size)
    tokens = sum(1 + rank for rank in ranks)
    for record in lines_on_all_ranks(shared_path / "metrics.jsonl", world):
        assert record["loss"] == pytest.approx(sum(rank * (1 + rank) for rank in ranks) / tokens)
        assert record["tokens"] == tokens
        assert record["tokens_per_s"] == pytest.approx(tokens / record["seconds"], rel=0.01)
        rate = record["tokens_per_s"] * 6 * 3 * 72
        assert record["flop_utilisation"] == pytest.approx(rate / (1e9 * world.size), rel=0.01)
        assert 0 <= record["comm_share"] <= record["comm_share_max"] <= 1
        assert 0 < record["busy_s_mean"] <= record["busy_s_max"] + 2e-6
        assert record["memory"]["peak_rank"] in ranks
        assert record["memory"]["peak_bytes"] >= record["memory"]["now_bytes"] > 0
    start = lines_on_all_ranks(shared_path / "events.jsonl", world)[0]
    assert (start["world_size"], start["num_nodes"], start["parameters"]) == (world.size, world.num_nodes, 3 * 72)


@pytest.mark.ranks(2, 3)
@SHARDED
def test_the_rank_that_is_late_is_found_and_the_others_wait_for_it(world, shared_path, build):
    late, model = world.size - 1, build(world)
    run, optimizer = observed(shared_path, model)
    with run:
        train(run, model, optimizer, 3, world)
        train(run, model, optimizer, 4, world, late=late)
    records = lines_on_all_ranks(shared_path / "metrics.jsonl", world)[-2:]
    others = (world.size - 1) / world.size
    for record in records:
        assert record["straggler"]["rank"] == late
        assert record["straggler"]["host"]
        # Of LATE_S in which the others wait, the mean over ranks has what is not of the late one.
        assert record["straggler"]["behind_s"] == pytest.approx(LATE_S * others, rel=0.5)
        assert record["busy_s_max"] >= LATE_S
        assert record["comm_share_max"] > 0.6
        assert record["comm_share"] > 0.6 * others


@pytest.mark.ranks(2)
def test_memory_by_kind_is_that_of_a_shard(world, shared_path):
    model = as_class(world)
    run, optimizer = observed(shared_path, model)
    with run:
        train(run, model, optimizer, 2, world)
    memory = lines_on_all_ranks(shared_path / "metrics.jsonl", world)[-1]["memory"]
    shard = 4 * 3 * 72 // world.size
    assert memory["parameters_bytes"] == memory["gradients_bytes"] == pytest.approx(shard, rel=0.1)
    assert memory["optimizer_bytes"] == pytest.approx(2 * shard, rel=0.1)
    assert memory["gathered_bytes"] == 0, "the ranks of a node share the memory of their shards"


@SHARDED
def test_a_trace_has_the_units_and_queues_of_all_ranks(world, shared_path, build):
    model = build(world)
    run, optimizer = observed(shared_path, model, trace=True)
    with run:
        train(run, model, optimizer, 6, world)
    found, processes = trace_of(shared_path, world)
    assert sorted(processes) == list(range(world.size))
    for rank in range(world.size):
        assert processes[rank].startswith(f"rank {rank} (")
        mine = {(track.split(" (")[0], name): spans for (pid, track, name), spans in found.items() if pid == rank}
        steps = {name: spans for (track, name), spans in mine.items() if track == "steps"}
        assert sorted(steps) == ["step 3", "step 4", "step 5"]
        units = {name for track, name in mine if track == "units"}
        assert len([name for name in units if name.startswith("forward ")]) >= 3
        assert len([name for name in units if name.startswith("backward ")]) >= 3
        assert len(mine["units", "optimizer step"]) == 3
        if world.size > 1:
            assert {track for track, _ in mine} >= {"reduce", "waits"}
        begin = min(spans[0][0] for spans in steps.values())
        end = max(spans[0][1] for spans in steps.values())
        for (track, name), spans in mine.items():
            assert all(begin <= at <= until <= end for at, until in spans), (track, name)


@pytest.mark.ranks(2)
def test_a_trace_across_nodes_has_the_gathers_and_the_reasons_of_waits(world, shared_path, make_comm):
    topology = world.host.topology
    hosts = make_comm(topology.split(2) if topology.num_nodes == 1 else topology)
    model = hpcfsdp.FullyShardedDataParallel(
        Chain(), process_group=hosts, auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=torch.device("cpu")
    )
    run, optimizer = observed(shared_path, model, trace=range(2, 4))
    with run:
        train(run, model, optimizer, 4, world)
    found, _ = trace_of(shared_path, world)
    tracks = {(pid, track.split(" (")[0]) for pid, track, _ in found}
    for rank in range(world.size):
        assert {(rank, "gather"), (rank, "reduce"), (rank, "waits")} <= tracks
        reasons = {name for pid, track, name in found if pid == rank and track.startswith("waits")}
        assert "VALUES_GATHERED" in reasons and reasons & {"GRADS_REDUCED", "GRADS_TAKEN"}


@pytest.mark.ranks(2)
def test_clocks_of_several_kernels_are_compared_at_barriers(world, shared_path, monkeypatch):
    ahead_ns, real = int(3600e9) * world.rank, time.perf_counter_ns
    monkeypatch.setattr("hpcfsdp.observe.perfetto._name_of_clock", lambda: b"")
    monkeypatch.setattr(time, "perf_counter_ns", lambda: real() + ahead_ns)
    model = as_class(world)
    run, optimizer = observed(shared_path, model, trace=range(1, 3))
    with run:
        train(run, model, optimizer, 2, world, late=0)
    found, _ = trace_of(shared_path, world)
    ends = [found[rank, "steps", "step 2"][0][1] for rank in range(2)]
    assert abs(ends[0] - ends[1]) < 2 * LATE_S * 1e6, "and not an hour"


def test_the_series_of_all_steps_are_in_checkpoints_also_after_a_resume(world, shared_path):
    model = as_class(world)
    for first, resumed_from in ((0, None), (2, shared_path / "2.h5")):
        run, optimizer = observed(shared_path, model, resume_step=first, resumed_from=resumed_from)
        with run:
            train(run, model, optimizer, 2, world)
            path = shared_path / f"{first + 2}.h5"
            with run.saving(path):
                checkpoint.save(path, model=model, optimizer=optimizer, step=first + 2, metrics=run.series())
    metrics = checkpoint.open_index(path).metrics
    assert metrics["tokens_per_s"][0].tolist() == [1, 2, 3, 4]
    assert set(metrics) >= {"loss", "lr", "tokens_per_s", "comm_share", "memory_peak_bytes"}


def test_an_error_of_one_rank_is_raised_by_all(world, shared_path):
    with pytest.raises(UsageError, match="every must be a number of steps"):
        observe.Run(shared_path, model=plain(world), every=0 if world.rank == world.size - 1 else 1)


@pytest.mark.ranks(2, 3)
def test_an_error_of_any_rank_is_noted(world, shared_path):
    last = world.size - 1
    run = observe.Run(shared_path, peak_flops=1.0)
    world.comm.Barrier()  # rank 0 has written the start
    if world.rank == last:
        with pytest.raises(ValueError, match="broken"), run:
            raise ValueError("broken")
    world.comm.Barrier()
    events = [json.loads(line) for line in (shared_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["start", "end"]
    assert (events[1]["outcome"], events[1]["message"]) == ("error", f"rank {last}: ValueError: broken")
    world.comm.Barrier()
    if world.rank != last:  # and it is noted once
        run._let_go("error", "the others")
    world.comm.Barrier()
    events = (shared_path / "events.jsonl").read_text().splitlines()
    assert len(events) == 3  # with that of rank 0, which writes its own


def test_messages_have_one_size_however_many_ranks(world, shared_path, monkeypatch):
    run, _ = observed(shared_path, plain(world))
    sizes, comm = [], run._comm
    all_reduce = comm.all_reduce

    def noted(tensor, *args, **options):
        sizes.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **options)

    monkeypatch.setattr(comm, "all_reduce", noted)
    with run:
        for _ in range(2):
            run.step(loss=1.0, tokens=3)
    assert sizes == [48, 32] * 2


def test_ranks_that_know_no_peak_count_as_the_mean_of_the_others(world, shared_path, monkeypatch):
    def peak(given):
        with observe.Run(shared_path, model=Chain(), peak_flops=given) as run:
            run.event("none")
        if world.rank == 0:
            return json.loads((shared_path / "events.jsonl").read_text().splitlines()[-3])["peak_flops"]

    monkeypatch.setattr(facts, "_measured", {})
    monkeypatch.setattr(facts, "measured_peak", lambda device, dtype: 5e9)
    assert peak(None) == (5e9 if world.rank == 0 else None)
    facts._measured.clear() if world.rank else None
    monkeypatch.delattr(facts, "measured_peak")  # what is known is not measured again
    assert peak(None) == (5e9 if world.rank == 0 else None)
    assert peak(1e9 if world.rank == 0 else None) == (1e9 if world.rank == 0 else None)
