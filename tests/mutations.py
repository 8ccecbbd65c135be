"""Faults that ``make test`` has to notice: ``python tests/mutations.py [NAME...]`` puts each into a copy of the tree.

Each fault replaces one piece of source by a wrong one. It is caught if the tests that are named with it fail, and they
pass without it. ``tests/unit/test_mutations.py`` checks that each piece is still there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("docs", "hpcfsdp", "jobs", "tests", "README.md", "ruff.toml", "setup.cfg")


class Fault(NamedTuple):
    """A wrong piece of source.

    Attributes:
        name: what goes wrong.
        path: of the file, below hpcfsdp/.
        old: a piece that occurs in the file once.
        new: what stands there instead.
        tests: arguments for pytest: tests of ``make test``, one of which has to fail.
        ranks: under mpirun, on so many; 0 without it.
    """

    name: str
    path: str
    old: str
    new: str
    tests: str
    ranks: int = 0


FAULTS = (
    # Data.
    Fault(
        "what a loader has read ahead counts as trained on",
        "data/sampler.py",
        "max(0, self._asked - self._ahead)",
        "self._asked",
        "tests/unit/data/test_sampler.py",
    ),
    Fault(
        "a short block has samples of the next file",
        "data/order.py",
        "np.minimum(self.size, ends - first)",
        "np.full_like(first, self.size)",
        "tests/unit/data/test_sampler.py",
    ),
    Fault(
        "memory of a batch is used again while a tensor has it",
        "data/fields.py",
        "_references(self._known, place) == _OF_NOBODY",
        "_references(self._known, place) >= _OF_NOBODY",
        "tests/unit/data/test_hdf5.py",
    ),
    Fault(
        "a load that fails has moved the place in the data",
        "checkpoint/data_place.py",
        "sampler.load_state_dict(before)",
        "pass",
        "tests/mpi/test_data.py",
        2,
    ),
    # Subclasses, pipelines, derivatives, meshes of all dimensions.
    Fault(
        "what one rank has sent becomes another's rows",
        "params/extension_params.py",
        "copy_(by_rank[",
        "copy_(by_rank.flip(0)[",
        "tests/mpi/test_gather_hooks.py",
        2,
    ),
    Fault(
        "a forward frees what a graph of derivatives computes with",
        "engine/unit.py",
        "keeps = keeps or self.is_in_graph or self.is_partly_called",
        "keeps = keeps or self.is_partly_called",
        "tests/mpi/test_second_derivatives.py",
        2,
    ),
    Fault(
        "a stage's gradients are never reduced",
        "engine/root.py",
        "if any(unit.owes_grads and not unit.keeps_back for unit in self.units):",
        "if False:",
        "tests/mpi/test_pipelines.py",
        4,
    ),
    Fault(
        "partial sums are added up before the engine adds them",
        "units/spmd.py",
        "there if dim in placed.data else here",
        "here",
        "tests/mpi/test_spmd.py",
        4,
    ),
    Fault(
        "state of the optimizer keeps the name of the file",
        "checkpoint/loading/match.py",
        "return self.in_model(parameter) + slash + key if slash else self.in_model(name)",
        "return name if slash else self.in_model(name)",
        "tests/unit/checkpoint/loading/test_rename.py",
    ),
    Fault(
        "each checkpoint counts fully in an average",
        "checkpoint/convert/average.py",
        "total.add_(value.to(wide), alpha=share)",
        "total.add_(value.to(wide))",
        "tests/unit/checkpoint/convert/test_average.py",
    ),
    # Parameters and their layouts.
    Fault(
        "a run begins elsewhere in memory",
        "params/layout.py",
        "0 if apart else first - begin))",
        "0))",
        "tests/unit/params/test_layout.py",
    ),
    Fault(
        "gaps of one element are lost",
        "params/layout.py",
        "if slot.offset > end:",
        "if slot.offset > end + 1:",
        "tests/unit/params",
    ),
    Fault(
        "a row has one element",
        "params/granularity.py",
        "return max(1, math.prod(shape[1:]))",
        "return 1",
        "tests/unit/params/test_granularity.py",
    ),
    Fault(
        "a held gradient is the caller's memory",
        "params/gradient.py",
        "accumulate, copy=True)",
        "accumulate)",
        "tests/mpi/test_held_grads.py",
        2,
    ),
    # The engine.
    Fault(
        "a gather may read shards that are being written",
        "engine/context.py",
        "streams.wait(Stream.GATHER, self.shards_written, Wait.SHARDS_WRITTEN)",
        "pass",
        "tests/unit/engine/test_streams.py",
    ),
    Fault(
        "a reduction may begin before the last one of the same gradient ends",
        "engine/context.py",
        "streams.wait(Stream.REDUCE, self._last.get(grad), Wait.GRADS_TAKEN)",
        "pass",
        "tests/unit/engine/test_streams.py",
    ),
    Fault(
        "orders of modules are not compared",
        "engine/order.py",
        "self._confirms = confirm and comm.size > 1",
        "self._confirms = False",
        "tests/unit/engine/test_order.py",
    ),
    Fault(
        "a gradient is counted twice",
        "engine/backward.py",
        "if node in self._counted:",
        "if False:",
        "tests/unit/engine/test_backward.py tests/unit/engine/test_unit.py",
    ),
    Fault(
        "a unit is resharded before its inputs have gradients",
        "engine/backward.py",
        "else call.inputs_pending > 0:",
        "else False:",
        "tests/mpi/test_engine.py",
        2,
    ),
    Fault(
        "a rank ends a unit later than those with gradients for its inputs",
        "engine/root.py",
        "each.finish_when_complete(is_followed=True)",
        "pass",
        "tests/mpi/test_deadlocks.py",
        2,
    ),
    Fault(
        "a rank gathers ahead what others reduce first",
        "engine/root.py",
        "if unit.training_state is TrainingState.BACKWARD and not unit.inside:",
        "if False:",
        "tests/mpi/test_deadlocks.py",
        2,
    ),
    Fault(
        "the next gradient waits for the reduction over replicas",
        "engine/context.py",
        "            self._last[grad] = streams.launch(",
        "            buffer.event = self._last[grad] = streams.launch(",
        "tests/unit/engine/test_streams.py",
    ),
    # Communication.
    Fault(
        "averages of integers are rounded down",
        "comm/reduce.py",
        'else "trunc"',
        'else "floor"',
        "tests/unit/comm/test_reduce.py",
    ),
    Fault(
        "averages of sparse tensors are sums",
        "comm/mpi/exchange.py",
        "divide_(total.values(), reduction.divisor)",
        "pass",
        "tests/mpi/test_backend_tensors.py",
        3,
    ),
    Fault(
        "ranks with other labels meet on one memory",
        "comm/mpi/node_memory.py",
        "if mine != theirs:",
        "if False:",
        "tests/mpi/test_node_memory.py",
        2,
    ),
    Fault(
        "values that differ between ranks are accepted",
        "comm/agree.py",
        "if other != values[0]:",
        "if False:",
        "tests/unit/comm/test_agree.py",
    ),
    Fault(
        "one rank of a node exchanges for all of them",
        "launch/topology.py",
        "self.local_rank(rank) % len(self.nodes[node])",
        "0",
        "tests/unit/launch/test_topology.py",
    ),
    # Units and fronts.
    Fault(
        "replicas count twice in the norm of gradients",
        "units/clip.py",
        'unit.mesh.size("replicate") * copies',
        "copies",
        "tests/mpi/test_hybrid.py tests/mpi/test_matrix.py",
        4,
    ),
    Fault(
        "gradients are scaled up to the norm", "units/clip.py", ".clamp(max=1.0)", "", "tests/unit/units/test_clip.py"
    ),
    Fault(
        "tied parameters keep the last values",
        "units/materialize.py",
        "now.copy_(first)",
        "pass",
        "tests/unit/units/test_materialize.py",
    ),
    Fault(
        "replicas are told whole parameters of the first alone",
        "units/summon.py",
        "flat.replicas.broadcast(received, 0)",
        "pass",
        "tests/mpi/test_unshard.py",
        4,
    ),
    Fault(
        "fully_shard gathers again although it was told not to",
        "units/keepers.py",
        "return given != 1 if",
        "return True if",
        "tests/unit/units/test_keepers.py",
    ),
    Fault(
        "what a node was to keep is gathered again between nodes",
        "params/storage.py",
        'self._is_kept = self._is_filled and keepers == "node"',
        "self._is_kept = False",
        "tests/mpi/test_nodes.py",
        4,
    ),
    Fault(
        "the parts that ranks keep are those of others",
        "params/storage.py",
        "self._comm, self._part = comm, segment(gathered, comm).clone()",
        "self._comm, self._part = comm, segment(gathered, comm).flip(0)",
        "tests/mpi/test_nodes.py",
        4,
    ),
    # Placements.
    Fault(
        "two boxes joined are the size of one",
        "reshard/boxes.py",
        "size + right.sizes[dim]",
        "right.sizes[dim]",
        "tests/unit/reshard/test_boxes.py",
    ),
    Fault(
        "a run of two blocks begins at the wrong place",
        "reshard/boxes.py",
        "numel, offset + here)",
        "numel, offset)",
        "tests/unit/reshard",
    ),
    # State dicts and optimizers.
    Fault(
        "a state dict shares memory with the model",
        "state/save.py",
        "view.to(form.device(flat.device), copy=True)",
        "view.to(form.device(flat.device))",
        "tests/mpi/test_state_dict.py",
        2,
    ),
    Fault(
        "all tensor-parallel ranks get the whole",
        "state/transfer.py",
        "if blocks.places[rank] == (0, 0) else ()",
        "",
        "tests/mpi/test_tensor_parallel_state.py",
        4,
    ),
    Fault(
        "whole tensors of a changed parameter stay as they were",
        "optim/owned.py",
        "(seen != _fingerprint(self.shard(index))).any()",
        "torch.tensor(False)",
        "tests/mpi/test_whole_tensors.py",
        2,
    ),
    # Checkpoints.
    Fault(
        "bytes that no footer counts are in a file",
        "checkpoint/format/footer.py",
        "if file_bytes != nbytes or length > nbytes:",
        "if length > nbytes:",
        "tests/unit/checkpoint/format/test_footer.py",
    ),
    Fault(
        "a wrong checksum of elements is accepted",
        "checkpoint/format/reader.py",
        "if found != row.checksum:",
        "if False:",
        "tests/unit/checkpoint/format/test_reader.py",
    ),
    Fault(
        "replicas all write the first rank's work",
        "checkpoint/saving/plan.py",
        'np.argsort(loads[writers], axis=1, kind="stable")',
        'np.argsort(loads[writers] * 0, axis=1, kind="stable")',
        "tests/unit/checkpoint/saving/test_plan.py",
    ),
    Fault(
        "a file is not forced to the disk",
        "checkpoint/format/disk.py",
        '_call("fsync", fd)',
        "pass",
        "tests/unit/checkpoint/saving/test_temporary.py",
    ),
    Fault(
        "keep_last keeps all but one",
        "checkpoint/retention.py",
        "ordered[: -(keep_last or 1)]",
        "ordered[:1]",
        "tests/unit/checkpoint/test_retention.py",
    ),
    Fault(
        "the last good checkpoint is removed",
        "checkpoint/retention.py",
        "if path != good) if good",
        ") if good",
        "tests/unit/checkpoint/test_retention.py",
    ),
    Fault(
        "a version in memory overwrites the one before it",
        "checkpoint/memory/windows.py",
        "return self.slots[holder, rank][version % 2]",
        "return self.slots[holder, rank][0]",
        "tests/mpi/test_checkpoint_memory.py",
        4,
    ),
    Fault(
        "a version in memory counts before all ranks have it",
        "checkpoint/memory/loading.py",
        "if len(ranks) == facts[key].num_ranks]",
        "if ranks]",
        "tests/unit/checkpoint/memory",
    ),
    Fault(
        "a DCP folder names any class of torch",
        "checkpoint/convert/pickles.py",
        'if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):',
        'if module == "torch":',
        "tests/unit/checkpoint/convert/test_importing.py",
    ),
    Fault(
        "a difference at the end of a tensor has the wrong place",
        "checkpoint/inspect/diff.py",
        "begin += one.size",
        "begin += 0",
        "tests/unit/checkpoint/inspect/test_diff.py",
    ),
    # Jobs.
    Fault(
        "a requeued job finds its folder locked by itself",
        "launch/lock.py",
        "self.restart != observer.restart",
        "False",
        "tests/unit/launch/test_lock.py",
    ),
    Fault(
        "ranks in different calls wait for ever",
        "hang/waits.py",
        "return they_called not in (NOTHING_YET, mine.label) or",
        "return False and",
        "tests/unit/hang/test_waits.py",
    ),
    Fault(
        "an array job has the number of its first task",
        "env.py",
        'if index not in ("", "0") else ""',
        'if False else ""',
        "tests/unit/test_env.py tests/unit/launch",
    ),
    Fault(
        "files of other users are read",
        "text/safe_files.py",
        "if owner not in (user, 0):",
        "if False:",
        "tests/unit/text/test_safe_files.py tests/unit/test_trust.py",
    ),
    Fault(
        "the end of a job is not seen in time",
        "preempt.py",
        "2 * self._longest_s + _SPARE_S",
        "0",
        "tests/mpi/test_preemption.py",
        3,
    ),
    # What a user looks at.
    Fault(
        "the slowest setup is recommended",
        "plan/choice.py",
        "each.time.seconds if each.fits",
        "-each.time.seconds if each.fits",
        "tests/unit/plan/test_choice.py",
    ),
    Fault(
        "the loss of a record is that of one rank",
        "observe/step_figures.py",
        "loss / weight if weight else",
        "sums.loss / sums.weight if weight else",
        "tests/mpi/test_observe.py",
        3,
    ),
    Fault(
        "the learning rate is never the lowest",
        "examples/gpt/optimizers.py",
        "max(1, steps - 1 - config.warmup_steps)",
        "max(1, steps)",
        "tests/unit/examples/gpt/test_optimizers.py",
    ),
    Fault(
        "a run over two files reads one twice",
        "examples/gpt/data.py",
        "span.begin + within",
        "span.begin",
        "tests/unit/examples/gpt/test_data.py",
    ),
)


def passes(tree: Path, fault: Fault) -> bool:
    """Return whether the tests of a fault pass in a tree."""
    python = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *fault.tests.split()]
    if fault.ranks:
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        python = [mpirun, "--map-by", ":OVERSUBSCRIBE", "-n", str(fault.ranks), *python, "--with-mpi"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    done = subprocess.run(python, cwd=tree, env=environ, capture_output=True, text=True, timeout=900, check=False)
    if " passed" not in done.stdout and " failed" not in done.stdout + done.stderr:
        raise RuntimeError(
            f"{fault.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 0


def main(names: list[str]) -> int:
    """Put in the faults with these names, or all; the exit code is 1 if one was not caught."""
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    missed = []
    with tempfile.TemporaryDirectory(prefix="hpcfsdp-mutations-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, tree / name)
        sound: dict[tuple[str, int], bool] = {}
        for fault in chosen:
            key = fault.tests, fault.ranks
            if key not in sound:
                sound[key] = passes(tree, fault)
            path = tree / "hpcfsdp" / fault.path
            source = path.read_text()
            path.write_text(source.replace(fault.old, fault.new))
            caught = sound[key] and not passes(tree, fault)
            path.write_text(source)
            print(f"{'caught' if caught else 'MISSED' if sound[key] else 'FAILS WITHOUT IT'}: {fault.name}", flush=True)
            missed += [] if caught else [fault.name]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
