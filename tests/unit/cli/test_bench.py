from types import SimpleNamespace

import pytest

from hpcfsdp.bench import step
from hpcfsdp.bench.harness import Table
from hpcfsdp.cli import bench
from hpcfsdp.errors import UsageError
from tests.bench import optim_state


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 3), (3, 3), (16, 16)])
def test_tensor_must_divide_ranks_and_heads(ranks, tensor):
    with pytest.raises(UsageError, match=rf"--tensor {tensor} has to divide the {ranks} rank\(s\) and the 8 heads"):
        step.measure(SimpleNamespace(size=ranks), layers=1, width=16, repeats=1, tensor=tensor)


def test_optim_state_needs_two_ranks():
    with pytest.raises(UsageError, match="optim-state compares sharded state: start it with mpirun -n 2"):
        optim_state.measure(SimpleNamespace(size=1), layers=1, width=16, repeats=1)


def test_tables_are_printed_one_after_the_other_with_notes_between(capsys):
    second = Table(("c", "d"), [("3", "4")], None)
    bench._print(Table(("a", "b"), [("1", "2")], None, ["a note"], second), SimpleNamespace(json=False), {})
    tables = ("| a | b |", "| --- | --- |", "| 1 | 2 |"), ("| c | d |", "| --- | --- |", "| 3 | 4 |")
    assert capsys.readouterr().out.splitlines() == [*tables[0], "", "a note", "", *tables[1]]
