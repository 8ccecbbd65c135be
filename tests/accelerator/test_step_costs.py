"""What a step costs next to torch's FSDP2, on the simulated device: the table of docs/explanation/hardware.md."""

import re
from pathlib import Path

import pytest

from tests.accelerator.step_costs import ENGINES, SCENARIOS, measured

pytestmark = [pytest.mark.ranks(2), pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")]

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "hardware.md"
ABOVE = 1.08
"""`fully_shard` copies parameters out in the background, which FSDP2 lets the computation wait for: the gathered
shards and the parameters of the next unit are there at a time."""


@pytest.fixture(scope="session")
def table():
    """The rows of the page: by scenario and engine the launches, collectives, waits of the host and KiB at the peak."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in SCENARIOS:
            for engine, cell in zip(ENGINES, cells[1:], strict=True):
                found[cells[0], engine] = tuple(map(int, re.findall(r"\d+", cell)))
    return found


@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=pytest.mark.ranks(4 if name == "replicas" else 2)) for name in SCENARIOS]
)
def test_no_step_costs_more_than_one_of_fsdp2(world, group, table, scenario):
    costs = {engine: measured(engine, world.size, **SCENARIOS[scenario])[0] for engine in ENGINES}
    stock = costs.pop("FSDP2")
    for engine, cost in costs.items():
        assert cost.launches < stock.launches, engine
        assert cost.waits <= stock.waits, engine
        assert cost.collectives <= stock.collectives, engine
        assert cost.peak <= (ABOVE if engine == "fully_shard" else 1) * stock.peak, engine
    for engine, cost in {**costs, "FSDP2": stock}.items():
        found = cost.launches, cost.collectives, cost.waits, round(cost.peak / 1024)
        assert table[scenario, engine] == found, engine
