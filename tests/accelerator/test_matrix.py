"""Settings of the engine together, on the simulated device: as on the CPU, whatever the device leaves for later."""

import itertools
import random

import pytest
import torch

from tests.accelerator.programs import (
    EXACT,
    MIXED,
    POLICIES,
    SIM,
    SOME_POLICIES,
    leave_for_later,
    on_the_cpu,
    shard,
    train,
)
from tests.mpi import parity
from tests.mpi.parity import WIDTH, Recipe, build, close, loss_of, reference

pytestmark = [pytest.mark.ranks(2, 1, 4), pytest.mark.usefixtures("hardware")]

SETTINGS = {
    "model": [
        parity.Nested,
        parity.Frozen,
        parity.FrozenUnit,
        parity.TwiceAndIdle,
        parity.Branches,
        parity.Uneven,
        parity.TiedInUnit,
        parity.WithoutGraph,
        parity.RecomputedOutside,
        parity.RecomputedOutsideReentrant,
        parity.RecomputedInside,
        parity.RecomputedInsideReentrant,
    ],
    "mixed": list(MIXED),
    "strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
    "accumulate": ["one backward", "in sync", "no_sync"],
    "clip": [None, 2.0, float("inf")],
    "original": [False, True],
    "offload": [False, True],
    "policy": POLICIES,
}


def in_pairs(settings):
    """Cases in which each two values of different settings meet: few, and the same in every process."""
    names, draw = list(settings), random.Random(0)
    missing = {
        frozenset({(one, a), (other, b)})
        for one, other in itertools.combinations(names, 2)
        for a in settings[one]
        for b in settings[other]
    }
    while missing:
        tried = [{name: draw.choice(values) for name, values in settings.items()} for _ in range(100)]
        found = [{frozenset(pair) for pair in itertools.combinations(case.items(), 2)} & missing for case in tried]
        best = max(range(len(tried)), key=lambda number: len(found[number]))
        missing -= found[best]
        if found[best]:
            yield tuple(tried[best].values())


def name_of(value):
    return {None: "not clipped", False: "no", True: "yes"}.get(value, getattr(value, "__name__", str(value)))


@pytest.mark.parametrize(tuple(SETTINGS), list(in_pairs(SETTINGS)), ids=name_of)
def test_each_two_settings(world, group, streams, model, mixed, strategy, accumulate, clip, original, offload, policy):
    recipe = Recipe(
        "sgd",
        steps=2,
        parts=1 if accumulate == "one backward" else 2,
        no_sync=accumulate == "no_sync",
        clip=None if clip is None else (0.1, clip),
        dtype=torch.float64 if mixed == "full" else torch.float32,
        # Original parameters that no rank has used have no gradient, as in the plain module.
        zero_unused=not (original and hasattr(model, "partly_used")),
    )
    options = {"strategy": strategy, "original": original, "offload": offload, "mixed": mixed}
    sharded = shard(build(model, recipe.dtype).to(SIM), group, **options)
    leave_for_later(streams, policy)
    found = train(sharded, recipe, SIM)
    if mixed == "full":
        close(found, reference(model, world.size, recipe), **EXACT)
    else:
        close(found, on_the_cpu(model, recipe, **options), rtol=0, atol=0)


@pytest.mark.parametrize("policy", SOME_POLICIES)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_held_gradients_may_be_discarded(world, group, streams, original, offload, set_to_none, policy):
    recipe = Recipe("sgd", steps=2, set_to_none=set_to_none)
    sharded = shard(build(parity.Nested).to(SIM), group, original=original, offload=offload)
    optimizer = recipe.make_optimizer(sharded.parameters())
    leave_for_later(streams, policy)
    with sharded.no_sync():
        loss_of(sharded, torch.ones(2, WIDTH, dtype=recipe.dtype, device=SIM)).backward()
    optimizer.zero_grad(set_to_none)
    close(train(sharded, recipe, SIM, optimizer), reference(parity.Nested, world.size, recipe), **EXACT)
