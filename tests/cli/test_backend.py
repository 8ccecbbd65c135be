"""Scripts of stock torch with one more import, started as users start them."""

import textwrap

import pytest

from tests.cli.conftest import ROOT

HEAD = """
import os, sys
import torch
import torch.distributed as dist
import hpcfsdp.mpi

def total(group=None):
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value, group=group)
    return int(value)
"""


@pytest.fixture
def script(start, tmp_path):
    """Run these lines after the imports of a stock script."""

    def run(lines, head=HEAD, **options):
        path = tmp_path / "script.py"
        path.write_text(head + textwrap.dedent(lines))
        return start(path, **options).wait()

    return run


def words(job):
    assert job.code == 0, job.stderr
    return sorted(job.stdout.split())


def test_a_stock_script_over_gloo_finds_its_ranks_through_mpi(script):
    job = script(
        """
        dist.init_process_group("gloo", init_method="mpi://")
        assert dist.get_backend() == "gloo" and dist.get_world_size() == 3
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        assert [os.environ[name] for name in names] == [str(dist.get_rank()), "3", "77", "3"], os.environ
        assert os.environ["MASTER_ADDR"] == "127.0.0.1" and int(os.environ["MASTER_PORT"]) > 0
        print(total(), flush=True)  # and no more: the script does not destroy its groups
        """,
        ranks=3,
        environ={"LOCAL_RANK": "77"},  # set by the user, and kept
    )
    assert words(job) == ["6"] * 3
    assert "Traceback" not in job.stderr


@pytest.mark.slow
def test_process_groups_can_be_destroyed_and_made_again(script):
    job = script(
        """
        for backend in ("hpcmpi", "gloo", "hpcmpi", "hpcmpi"):
            dist.init_process_group(backend, init_method="mpi://")
            assert dist.get_backend() == backend and dist.get_world_size() == 3
            pair = dist.new_group([0, 2], backend="hpcmpi")
            if dist.get_rank() != 1:
                assert total(pair) == 4
            world = dist.group.WORLD
            dist.all_reduce(torch.ones(100_000), async_op=True)  # without a wait
            assert total() == 6
            dist.destroy_process_group()
            assert not dist.is_initialized()
            if backend == "hpcmpi":
                try:
                    world.allreduce([torch.ones(1)])
                except hpcfsdp.errors.CommunicationError as error:
                    assert "process group was destroyed" in str(error)
                else:
                    raise AssertionError("a destroyed group works")
        dist.init_process_group("hpcmpi", init_method="mpi://")
        print(total(), flush=True)  # and no more: the script does not destroy its groups
        """,
        head=HEAD + "import hpcfsdp.errors\n",
        ranks=3,
    )
    assert words(job) == ["6"] * 3
    assert "Traceback" not in job.stderr


def test_a_forked_process_is_refused_and_the_ranks_go_on(script):
    job = script(
        """
        dist.init_process_group("hpcmpi", init_method="mpi://")
        value = torch.ones(1)
        calls = (
            lambda: dist.all_reduce(value),
            lambda: dist.barrier(),
            lambda: dist.isend(value, 0),
            lambda: dist.irecv(value, 0),
            lambda: dist.group.WORLD.communicator.alloc(3, torch.float32),
        )
        child = os.fork()
        if not child:
            for call in calls:
                try:
                    call()
                except hpcfsdp.errors.CommunicationError as error:
                    print("refused" if "was forked" in str(error) and "spawn" in str(error) else error, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(total())
        dist.destroy_process_group()
        try:
            dist.all_reduce(value)
        except ValueError as error:
            assert "not been initialized" in str(error), error
        """,
        head=HEAD + "import hpcfsdp.errors\n",
        ranks=2,
    )
    assert words(job) == sorted(["3"] * 2 + ["refused"] * 10)


def test_init_uses_an_existing_process_group(script):
    job = script(
        """
        dist.init_process_group("hpcmpi", init_method="mpi://")
        world = hpcfsdp.init("cpu")
        assert world.process_group is dist.group.WORLD
        assert world.communicator is dist.group.WORLD.communicator
        value = torch.ones(4)
        world.communicator.all_reduce(value, "sum")
        assert value[0] == 2 and total(world.mesh().get_group()) == 3
        hpcfsdp.finalize()
        assert dist.is_initialized()  # finalize destroys only groups that init made
        dist.destroy_process_group()
        world = hpcfsdp.init("cpu")
        print(total())
        """,
        ranks=2,
    )
    assert words(job) == ["3", "3"]


def test_one_plain_process_is_a_world_of_one(script):
    job = script(
        """
        assert "mpi4py.MPI" not in sys.modules, "importing hpcfsdp.mpi has started MPI"
        dist.init_process_group("hpcmpi", init_method="mpi://", rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        model(torch.ones(2, 3)).sum().backward()
        print(dist.get_world_size(), total(), model.module.bias.grad.item())
        dist.destroy_process_group()
        """
    )
    assert words(job) == ["1", "1", "2.0"]


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_arguments_that_contradict_mpi_are_refused_on_every_rank(script, ranks):
    job = script(
        """
        from hpcfsdp.errors import LaunchError

        def refused(kind, *texts, backend="hpcmpi", **arguments):
            try:
                dist.init_process_group(backend, **arguments)
            except kind as error:
                assert all(text in str(error) for text in texts), error
            else:
                raise AssertionError(arguments)
            assert not dist.is_initialized()

        for url in ("mpi://somewhere", "mpi://:29500", "mpi:///a/file", "mpi://?timeout=3"):
            refused(LaunchError, url, "takes no host, path or other argument", init_method=url)
        refused(LaunchError, "rank=7", "this process is rank", init_method="mpi://", rank=7)
        refused(LaunchError, "world_size=9", "leave rank and world_size out", init_method="mpi://", world_size=9)
        store = dist.HashStore()
        refused(
            LaunchError, "this process as rank 2 of 5", "use init_method='mpi://'", store=store, rank=2, world_size=5
        )
        if not torch.cuda.is_available():
            refused((RuntimeError, ValueError), "NCCL", backend="nccl", init_method="mpi://")
        dist.init_process_group("hpcmpi", init_method="mpi://")
        print(dist.get_world_size())
        """,
        ranks=ranks,
    )
    assert words(job) == [str(max(ranks, 1))] * max(ranks, 1)


def test_an_uncaught_error_of_one_rank_ends_a_stock_job(script):
    job = script(
        """
        dist.init_process_group("hpcmpi", init_method="mpi://")
        if dist.get_rank() == 1:
            raise ZeroDivisionError("on purpose")
        dist.barrier()
        """,
        ranks=2,
    )
    assert job.code != 0
    assert job.stderr.count("ZeroDivisionError: on purpose") == 1
    assert "hpcfsdp: rank 1 of 2 on " in job.stderr


def test_detail_mode_compares_calls_and_trains_models(script):
    job = script(
        """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("hpcmpi", init_method="mpi://")
        for model in (
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2)),
            fully_shard(torch.nn.Linear(3, 2), mesh=init_device_mesh("cpu", (2,))),
        ):
            model(torch.ones(1, 3)).sum().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
        try:
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(3))
            else:
                dist.broadcast(torch.ones(3), 0)
        except hpcfsdp.errors.CommunicationError as error:
            mine, theirs = "all_reduce(sum) of 3 x torch.float32", "broadcast from 0 of 3 x torch.float32"
            if dist.get_rank() == 1:
                mine, theirs = theirs, mine
            assert f"rank {dist.get_rank()} calls {mine}" in str(error), error
            assert f"rank {1 - dist.get_rank()} calls {theirs}" in str(error), error
            print("named")
        dist.group.WORLD.abort()
        """,
        head=HEAD + "import hpcfsdp.errors\n",
        ranks=2,
        environ={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
    assert words(job) == ["named", "named"]


@pytest.mark.slow
def test_a_hybrid_mesh_follows_the_nodes(script):
    job = script(
        """
        from torch.distributed.fsdp import fully_shard

        world = hpcfsdp.init("cpu", split_nodes=2)
        assert (world.num_nodes, world.local_size, world.node_rank) == (2, 2, world.rank // 2)
        mesh = world.mesh(replicate="nodes", shard="node")
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]] and mesh.mesh_dim_names == ("replicate", "shard")
        inside, across = mesh.get_group("shard"), mesh.get_group("replicate")
        assert all(hpcfsdp.mpi.NAME == dist.get_backend(group) for group in (inside, across))
        assert inside.communicator.topology.num_nodes == 1 and across.communicator.topology.num_nodes == 2
        model = fully_shard(torch.nn.Linear(3, 4), mesh=mesh)
        model(torch.full((1, 3), world.rank + 1.0)).sum().backward()
        assert model.weight.grad.full_tensor().tolist() == [[2.5] * 3] * 4, model.weight.grad
        print(dist.get_world_size(inside), dist.get_world_size(across))
        hpcfsdp.finalize()
        """,
        ranks=4,
    )
    assert words(job) == ["2"] * 8


def test_rows_that_travel_between_nodes_train_as_with_torch(script):
    """``fully_shard`` on imagined nodes, which exchange messages: shards on all of them, and replicas across them."""
    job = script(
        """
        sys.path.append(ROOT)
        from tests.mpi.row_cases import make, same, train

        world = hpcfsdp.init("cpu", split_nodes=2)
        for dimensions in ({"shard": None}, {"replicate": "nodes", "shard": "node"}):
            found = same(lambda fsdp, mesh: train(make(fsdp, mesh), world.rank, micro=2), world.mesh(**dimensions))
            assert found["losses"][-1] < found["losses"][0], found["losses"]
            print("equal")
        hpcfsdp.finalize()
        """,
        head=f"{HEAD}\nROOT = {str(ROOT)!r}\n",
        ranks=4,
    )
    assert words(job) == ["equal"] * 8
