"""Setups to choose from, and the one that is chosen."""

from dataclasses import replace

import pytest

from hpcfsdp import plan
from hpcfsdp.errors import UsageError
from hpcfsdp.plan.links import GIB

FAST = plan.Links(plan.link_of("360,3"), plan.link_of("44,6"))
SLOW = plan.Links(plan.link_of("360,3"), plan.link_of("1,60"))
SHAPE = plan.shape_of(2e8, 8)


def request(links=FAST, ranks=32, memory=80 * GIB, sequence=512, **options):
    source = plan.from_numbers(SHAPE, batch=1, sequence=sequence)
    return plan.Request(source, ranks, plan.Machine(8, links, 400e12, 3e12), memory, **options)


def test_slow_links_between_nodes_are_used_less():
    """Gathered twice over nodes, parameters are sent more often than gradients of copies on each node."""
    found = plan.propose(request(SLOW, kept_over=0))
    everywhere = next(each for each in found.all if each.setup.strategy == "FULL_SHARD" and not each.checkpointed)
    assert everywhere.time.seconds > 1.2 * found.best.time.seconds
    assert found.best.time.traffic.between_bytes < 0.8 * everywhere.time.traffic.between_bytes
    hybrid = plan.propose(request(SLOW, strategies=("HYBRID_SHARD",), kept_over=0))
    assert hybrid.best.setup.shards <= 8
    assert hybrid.best.time.gathers.between_bytes == 0
    over_nodes = next(each for each in hybrid.all if each.setup.shards == 16)
    assert over_nodes.time.seconds > 1.1 * hybrid.best.time.seconds


@pytest.mark.parametrize("front", ["class", "fully_shard"])
def test_values_stay_on_nodes_where_links_between_them_are_slow(front):
    """Their backward gathers nothing between nodes; that of other setups gathers all but the root's parameters."""
    found = plan.propose(request(SLOW, strategies=("FULL_SHARD", "SHARD_GRAD_OP"), common=plan.Setup(front=front)))
    assert found.best.setup.label == "FULL_SHARD, node"
    ways = {each.setup.label: each for each in found.all if not each.checkpointed}
    freed, node, whole = (ways[name] for name in ("FULL_SHARD", "FULL_SHARD, node", "SHARD_GRAD_OP"))
    sent = node.time.traffic.between_bytes / freed.time.traffic.between_bytes
    assert sent == pytest.approx(2 * SHAPE.numel / (3 * SHAPE.numel - found.step.units[-1].numel), rel=0.01)
    assert node.time.seconds < 0.8 * freed.time.seconds
    assert freed.footprint.peak.nbytes < node.footprint.peak.nbytes < whole.footprint.peak.nbytes
    text = "\n".join(found.program)
    compile(text, "program", "exec")
    assert 'reshard_after_forward="node"' in text
    assert "values stay on each node" in found.reason
    few = plan.propose(request(SLOW, strategies=("FULL_SHARD",), kept_over=2, common=plan.Setup(front=front)))
    assert {each.setup.kept_over for each in few.all} == {2}
    assert "reshard_after_forward=2" in "\n".join(few.program)
    assert few.best.footprint.peak.nbytes > node.footprint.peak.nbytes


def test_neighbours_on_cpus_share_what_stays():
    """There it is the same memory as with SHARD_GRAD_OP; a rank alone on its node has no use for the choice."""
    machine = plan.Machine(8, SLOW, 100e9, 8e9, on_cpu=True)
    found = plan.propose(replace(request(checkpointed=False), machine=machine))
    assert found.best.setup.label == "FULL_SHARD, node"
    alone = plan.propose(replace(request(checkpointed=False), machine=replace(machine, ranks_per_node=1)))
    assert not any(each.setup.kept_over for each in alone.all)


def test_one_copy_is_taken_where_it_is_as_fast():
    quick = plan.Links(plan.link_of("900,0"), plan.link_of("900,0"))
    found = plan.propose(request(quick, sequence=4096))
    assert (found.best.setup.strategy, found.best.setup.replicas) == ("FULL_SHARD", 1)


def test_little_memory_needs_checkpointed_activations():
    roomy = plan.propose(request(sequence=4096))
    assert not roomy.best.checkpointed
    peak = min(each.footprint.peak.nbytes for each in roomy.all if not each.checkpointed)
    tight = plan.propose(request(sequence=4096, memory=peak))
    assert tight.best.checkpointed and tight.best.fits
    assert tight.best.footprint.peak.nbytes <= 0.9 * peak


def test_what_is_missing_where_nothing_fits():
    smallest = min(each.footprint.peak.nbytes for each in plan.propose(request(ranks=8)).all)
    memory = smallest * 9 // 10
    found = plan.propose(request(memory=memory, ranks=8, headroom=0.0))
    assert found.missing_bytes == found.best.footprint.peak.nbytes - memory == smallest - memory
    needed = next(int(text.split()[1]) for text in found.remarks if text.startswith("about "))
    assert needed > 8 and needed % 8 == 0
    assert plan.propose(request(memory=memory, ranks=needed, headroom=0.0)).best.fits
    assert any("--offload" in text for text in found.remarks)


def test_more_ranks_do_not_help_where_activations_do_not_fit():
    found = plan.propose(request(memory=GIB // 8, sequence=4096, checkpointed=False))
    assert "more ranks alone do not help: units and activations of one rank are too large" in found.remarks
    assert any("--sequence" in text for text in found.remarks)


def test_small_units_are_named():
    slow = plan.Links(plan.link_of("360,300"), plan.link_of("44,300"))
    found = plan.propose(request(slow, strategies=("FULL_SHARD",)))
    (text,) = [text for text in found.remarks if "too small for 32 ranks" in text]
    assert "units of DecoderBlock" in text and "make one unit of" in text


def test_a_large_root_is_named():
    source = plan.from_numbers(plan.shape_of(1e8, 4, width=256, vocabulary=150000), batch=1, sequence=64)
    found = plan.propose(replace(request(strategies=("FULL_SHARD",), memory=GIB), source=source))
    assert any("make its embedding and its head units of their own" in text for text in found.remarks)


def test_units_are_not_too_large_where_memory_is_left():
    assert not any("wrap smaller modules" in text for text in plan.propose(request()).remarks)


def test_activations_are_not_checkpointed_where_that_saves_only_memory_that_is_left():
    """On a machine that computes and communicates in no time all setups take that of the optimizer."""
    free = plan.Links(plan.link_of("1e9,0"), plan.link_of("1e9,0"))
    asked = request(strategies=("FULL_SHARD",), sequence=4096, kept_over=0)
    asked = replace(asked, machine=plan.Machine(8, free, 1e24, 3e12))
    found = plan.propose(asked)
    plain, checkpointed = sorted(found.all, key=lambda each: each.checkpointed)
    assert checkpointed.footprint.peak.nbytes < plain.footprint.peak.nbytes
    assert found.best is plain


def test_a_model_of_one_unit_is_named():
    import torch

    def make():
        return torch.nn.Linear(64, 64), torch.zeros(4, 64)

    source = plan.from_function(make, name="linear")
    assert any("the model is one unit" in text for text in plan.propose(replace(request(), source=source)).remarks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 12}, "is not a multiple of --ranks-per-node 8"),
        ({"shards": 5}, "--shard 5 does not divide the 32 ranks"),
        ({"strategies": ("NO_SHARD",), "shards": 8}, "is not possible on 32 ranks"),
        ({"headroom": 1.0}, "--headroom"),
    ],
)
def test_impossible_requests(options, message):
    with pytest.raises(UsageError, match=message):
        plan.propose(request(**options))


@pytest.mark.parametrize("front", ["class", "fully_shard"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_lines_of_a_program_are_python(front, checkpointed):
    for strategy, shards in (("FULL_SHARD", None), ("_HYBRID_SHARD_ZERO2", 4)):
        common = plan.Setup(front=front, offload=True)
        found = plan.propose(request(strategies=(strategy,), shards=shards, common=common, checkpointed=checkpointed))
        program = "\n".join(found.program)
        compile(program, "program", "exec")
        assert ("apply_activation_checkpointing(" in program) is checkpointed
        assert "host memory is not counted" in found.notes[-1]


def test_the_file_holds_each_value_once():
    found = plan.propose(request(interval_s=600.0))
    assert found.saving.nbytes == 3 * 4 * SHAPE.numel
    assert found.saving.seconds == pytest.approx(found.saving.nbytes / (4 * 2e9))
    assert found.saving.per_day == pytest.approx(86400 / (600 + found.saving.seconds))
