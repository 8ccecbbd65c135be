"""Graphs of a device: units refuse to be captured."""

import re

import pytest
import torch

import hpcfsdp
from hpcfsdp.errors import EngineError
from tests.accelerator import simulated
from tests.accelerator.programs import SIM, mesh_of, shard
from tests.accelerator.test_waits import Chain, batch
from tests.mpi.parity import build

pytestmark = pytest.mark.ranks(1, 2)


def test_no_unit_is_captured(world, group):
    model = shard(build(Chain).to(SIM), group)
    x = batch()
    loss = model(x).sum()
    for call, what in [
        (lambda: model(x), "the forward of 'Chain'"),
        (loss.backward, "the backward of 'Chain'"),
    ]:
        with simulated.capturing(), pytest.raises(EngineError, match=re.escape(f"{what}: a stream of sim:0 is captur")):
            call()
    loss.backward()  # it goes on
    model(x).sum().backward()


def test_no_parameters_are_gathered_into_a_graph(world):
    model = build(Chain).to(SIM)
    hpcfsdp.fully_shard(model, mesh=mesh_of((world.size,), ("shard",)))
    x = batch()
    model(x)
    with simulated.capturing(), pytest.raises(EngineError, match=r"unshard of 'Chain': a stream of sim:0 is capturing"):
        model.unshard()
    with simulated.capturing(), pytest.raises(EngineError, match=r"the forward of 'Chain'"), torch.no_grad():
        model(x)
