"""The examples in the documentation run as they stand."""

import ast
import configparser
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed.fsdp as stock_fsdp

from hpcfsdp.cli.main import VERBS
from tests.cli.conftest import ROOT


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def test_the_example_of_the_readme_learns_saves_and_loads(start, tmp_path):
    (code,) = blocks("README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    last = "hpcfsdp.finalize()\n"
    assert code.endswith(last)
    shown = f"seen = world.comm.gather(x.sum().item())\nif world.rank == 0:\n    print('saw', *seen)\n{last}"
    (tmp_path / "my_model.py").write_text(code.removesuffix(last) + shown)
    output = ""
    for _ in range(2):  # the second start resumes
        job = start("my_model.py", ranks=2).wait()
        assert job.code == 0, job.stderr
        output += job.stdout
    assert (tmp_path / "my_model.h5").exists()
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)}
    assert list(losses) == [10, 20, 30, 40]
    assert losses[10] < 1 and losses[20] < 0.7 and losses[40] < 0.4, output  # of 2 at the start
    batches = " ".join(re.findall(r"^saw (.*)$", output, re.MULTILINE)).split()
    assert len(batches) == len(set(batches)) == 4, "batches of other ranks, or of the first start, came again"


def example(tmp_path, name):
    """A copy of a program of docs/examples, in the folder where jobs start."""
    return shutil.copy(ROOT / "docs/examples" / name, tmp_path)


def lines_of_page(page, command):
    """The lines that a page shows after a command."""
    for block in blocks(page, "console"):
        first, *rest = block.splitlines()
        if first == f"$ {command}":
            return rest
    raise AssertionError(f"{page} has no block that begins with {command}")


def test_the_first_tutorial_learns_and_stops_on_a_signal(start, tmp_path):
    program = example(tmp_path, "own_model.py")
    job = start(program, ranks=2).wait()
    assert job.code == 0, job.stderr
    shown = lines_of_page("docs/tutorials/own-model.md", "mpirun -n 2 python my_model.py")
    assert [line.rsplit(" ", 1)[0] for line in job.stdout.splitlines()] == [line.rsplit(" ", 1)[0] for line in shown]
    losses = [float(line.split()[-1]) for line in job.stdout.splitlines()]
    assert losses[1] < losses[0] < 1, "of 2 at the start"
    ended = time.time()
    again = start(program, ranks=3, environ={"STEPS": "100000"})
    again.wait_for(lambda: os.stat(tmp_path / "my_model.h5").st_mtime > ended)
    again.process.send_signal(signal.SIGUSR2)  # which mpirun hands on
    again.wait()
    assert again.code == 75, again.stderr
    assert again.stdout.startswith("step 30 loss"), "it goes on where it was"


def assert_losses(lines, expected):
    """Lines that end with losses are equal, but for the last digit: it depends on the machine."""
    assert [line.rpartition(" ")[0] for line in lines] == [line.rpartition(" ")[0] for line in expected]
    losses = [[float(line.rpartition(" ")[2]) for line in each] for each in (lines, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)


OLD_SAMPLER = """
    from torch.utils.data import BatchSampler, DistributedSampler
    sampler = BatchSampler(DistributedSampler(dataset, seed=0), BATCH // 2, drop_last=True)
"""


@pytest.mark.slow
def test_the_tutorial_from_torchrun_to_slurm_keeps_the_losses(start, tmp_path):
    page = "docs/tutorials/slurm.md"
    shown = lines_of_page(page, "mpirun -n 2 python slurm_fsdp.py")
    before = start("-m", "torch.distributed.run", "--nproc-per-node", 2, example(tmp_path, "torchrun_fsdp.py")).wait()
    # No exit code: torch's gloo may abort the process after the last line.
    lines = [line for line in before.stdout.splitlines() if line.startswith("epoch")]
    assert_losses(lines, lines_of_page(page, "torchrun --nproc-per-node 2 torchrun_fsdp.py"))
    program = Path(example(tmp_path, "slurm_fsdp.py"))
    after = start(program, ranks=2).wait()
    assert after.code == 0, after.stderr
    assert_losses(after.stdout.splitlines(), shown)
    # With torchrun's sampler the losses are torchrun's.
    code = program.read_text().replace("sampler = ResumableSampler(dataset, global_batch=BATCH)", OLD_SAMPLER)
    code = code.replace(", data=sampler)", ")").replace('"data": sampler, ', "").replace("sampler.epoch", "0")
    program.write_text(
        code.replace(
            "for inputs, targets in loader:", "sampler.sampler.set_epoch(epoch)\n        for inputs, targets in loader:"
        )
    )
    shutil.rmtree(tmp_path / "runs")
    same = start(program, ranks=2).wait()
    assert same.code == 0, same.stderr
    assert_losses(same.stdout.splitlines(), lines)


def test_the_tutorial_from_torchrun_to_slurm_goes_on_within_an_epoch(start, tmp_path):
    """A signal to one rank stops it in the second epoch. Then it computes what it computes without."""
    program = Path(example(tmp_path, "slurm_fsdp.py"))
    code, line = program.read_text(), "            step += 1\n"
    assert code.count(line) == 1
    send = "            if step == 21 and world.rank == 1 and not found:\n"
    send += "                signal.raise_signal(signal.SIGUSR2)\n"
    program.write_text("import signal\n" + code.replace(line, line + send))
    job = start(program, ranks=2).wait()
    assert job.code == 75, job.stderr
    job = start(program, ranks=2).wait()
    assert job.code == 0, job.stderr
    assert_losses(
        job.stdout.splitlines(), lines_of_page("docs/tutorials/slurm.md", "mpirun -n 2 python slurm_fsdp.py")[1:]
    )


@pytest.mark.slow
def test_the_example_of_muon_learns(start, tmp_path):
    job = start(example(tmp_path, "muon.py"), ranks=2).wait()
    assert job.code == 0, job.stderr
    losses = [float(line.split()[-1]) for line in job.stdout.splitlines()]
    shown = lines_of_page("docs/how-to/whole-tensors.md", "mpirun -n 2 python muon.py")
    assert losses == pytest.approx([float(line.split()[-1]) for line in shown], rel=0.3)


def test_the_example_of_fields_learns_and_goes_on(start, tmp_path):
    program = Path(example(tmp_path, "fields.py"))
    whole = program.read_text()
    program.write_text(whole.replace("EPOCHS = 4, 200, 64, 12, 16, 4", "EPOCHS = 4, 200, 64, 12, 16, 1"))
    job = start(program, ranks=2).wait()
    assert job.code == 0, job.stderr
    program.write_text(whole.replace("EPOCHS = 4, 200, 64, 12, 16, 4", "EPOCHS = 4, 200, 64, 12, 16, 2"))
    again = start(program, ranks=1).wait()
    assert again.code == 0, again.stderr
    lines = job.stdout.splitlines() + again.stdout.splitlines()
    errors = [float(line.split()[-1]) for line in lines]
    assert [line.split()[1] for line in lines] == ["0", "0", "1"], "the last 10 steps of epoch 0 were not saved"
    assert errors[-1] < 0.1


def test_the_page_about_data(start, tmp_path):
    (code,) = blocks("docs/how-to/data.md", "python")
    (tmp_path / "program.py").write_text(code + "hpcfsdp.finalize()\nprint('all of it')\n")
    job = start("program.py", ranks=3).wait()
    assert (job.code, job.stdout.count("all of it")) == (0, 3), job.stderr


EXAMPLES = """
import torch.distributed as dist
import hpcfsdp

for code in CODES:
    exec(code, {"__name__": "__main__"})
    if dist.is_initialized():
        hpcfsdp.finalize()
print("all of them")
"""


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_communication(start, tmp_path, ranks):
    codes = blocks("docs/explanation/communication.md", "python")
    (tmp_path / "examples.py").write_text(f"CODES = {codes}{EXAMPLES}")
    job = start("examples.py", ranks=ranks).wait()
    assert job.code == 0, job.stderr
    assert job.stdout.count("all of them") == max(ranks, 1)


LOOKING = "docs/how-to/looking-into-files.md"


@pytest.fixture(scope="session")
def looked_into(tmp_path_factory):
    """The folder with the two checkpoints of docs/how-to/looking-into-files.md."""
    import torch

    from hpcfsdp import checkpoint

    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    model = torch.nn.Sequential()
    model.embed, model.head = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in (model.embed, model.head):
            layer.weight.copy_(torch.arange(layer.weight.numel()).view(layer.weight.shape) / 8)
            layer.bias.fill_(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(parameter)}
    for step, lr in ((400, 0.01), (800, 0.005)):
        metrics = {"loss": (range(0, step, 100), [5.0 - n / 400 for n in range(0, step, 100)])}
        values = {"step": step, "config": {"train": {"lr": lr}}, "metrics": metrics}
        checkpoint.save(folder / f"step-{step:08}.h5", model=model, optimizer=optimizer, **values)
        with torch.no_grad():
            model.embed.weight[1, 2] += 0.5
    return folder


def blocks_of(pages, language):
    """Parameters of a test: each block of these pages, with its number on the page."""
    found = [(page, number) for page in pages for number in range(len(blocks(page, language)))]
    return pytest.mark.parametrize(("page", "number"), found, ids=[f"{Path(page).stem}-{n}" for page, n in found])


@blocks_of([LOOKING], "python")
def test_looking_into_files_from_python(start, looked_into, page, number):
    job = start("-c", blocks(page, "python")[number], cwd=looked_into).wait()
    assert job.code == 0, job.stderr


@blocks_of([LOOKING], "console")
def test_looking_into_files_from_a_shell(looked_into, tmp_path, page, number):
    """Every command ends with the exit code on the page, and prints the lines that follow it there."""
    shutil.copytree(looked_into.parent, tmp_path, dirs_exist_ok=True)
    folder = tmp_path if (page, number) == (LOOKING, 1) else tmp_path / looked_into.name
    for command, *lines in (part.splitlines() for part in blocks(page, "console")[number].split("$ ")[1:]):
        if command.startswith("cd "):
            folder /= command.removeprefix("cd ")
            continue
        if not shutil.which(command.split()[0]) and not command.startswith("hpcfsdp"):
            pytest.skip(f"{command.split()[0]} is not installed here")
        shell = f'hpcfsdp() {{ "{sys.executable}" -m hpcfsdp "$@"; }}; {command}'
        done = subprocess.run(
            ["bash", "-c", shell], check=False, capture_output=True, text=True, cwd=folder, timeout=120
        )
        code = re.search(r"# exit code (\d)", command)
        assert done.returncode == (int(code[1]) if code else 0), done.stderr
        found = [" ".join(line.split()) for line in done.stdout.splitlines()]
        for line in lines:
            if line.endswith("..."):
                assert any(other.startswith(line.removesuffix("...")) for other in found), (command, done.stdout)
            else:
                assert line in found, (command, done.stdout)


RUNNER = """
import functools
import importlib
import json
from pathlib import Path

import torch

import hpcfsdp

drawn = []


def recorded(draw):
    @functools.wraps(draw)
    def recording(*args, **options):
        found = draw(*args, **options)
        drawn.append(found.flatten().tolist())
        return found

    return recording


torch.randn, torch.randint = recorded(torch.randn), recorded(torch.randint)

for page, blocks in json.loads(Path("pages.json").read_text()).items():
    drawn.clear()
    names = {"__name__": "__main__"}
    for line, code in blocks:
        exec(compile("\\n" * line + code, page, "exec"), names)
    everyone = names["world"].comm.allgather(drawn)
    if page != "docs/how-to/mesh.md":  # where all ranks draw the whole batch and use a part of it
        assert len(set(map(len, everyone))) == 1
        for number, draws in enumerate(zip(*everyone)):
            assert len(set(map(tuple, draws))) == len(draws), f"{page}: draw {number} is the same on several ranks"
    if names["world"].rank == 0:
        print(f"{page}: {len(blocks)} blocks")
hpcfsdp.finalize()
"""


def numbered(page):
    """The blocks of a page that run (not those marked ``python notest``), with the number of lines before each."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in found]


PAGES_OF_SHARDING = (
    *("sharding", "fully-shard", "migrating", "state-dicts", "dcp", "checkpoints", "tracking", "whole-tensors"),
)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, [f"docs/how-to/{name}.md" for name in PAGES_OF_SHARDING]),
        (4, ["docs/how-to/mesh.md"]),
    ],
    ids=["two ranks", "four ranks"],
)
def test_pages_about_sharding(start, tmp_path, ranks, names):
    """The blocks of a page run one after the other, as one program."""
    pages = {page: numbered(page) for page in names}
    (tmp_path / "pages.json").write_text(json.dumps(pages))
    (tmp_path / "runner.py").write_text(RUNNER)
    job = start("runner.py", ranks=ranks).wait()
    assert job.code == 0, job.stderr
    for page, found in pages.items():
        assert f"{page}: {len(found)} blocks" in job.stdout


def there(name):
    return (ROOT / "hpcfsdp" / name).exists() or (ROOT / name).exists()


def test_the_table_of_meshes_is_what_its_formulas_give():
    """The sizes of docs/how-to/mesh.md, by the terms of its tables."""
    from hpcfsdp.comm.mesh import plan_mesh
    from hpcfsdp.launch.topology import Topology

    layers, width, words, length, batch = 32, 4096, 32_000, 4096, 16
    k, c, w = 4, 2, 2
    cut, whole = layers * 12 * width**2, words * width
    nodes = Topology.regular(num_nodes=4, ranks_per_node=4)
    page = (ROOT / "docs/how-to/mesh.md").read_text()
    rows = re.findall(r"^\| (\d+) x (\d+) x (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for *shape, row in rows:
        replicas, shards, tensor = map(int, shape)
        plan = plan_mesh(nodes, {"replicate": replicas, "shard": shards, "tensor": tensor})
        numel, sequences = cut / tensor + whole, batch * tensor // nodes.size
        sent = (
            2 * w * numel / shards * (replicas - 1) / replicas,
            (2 * c + w) * numel * (shards - 1) / shards,
            8 * c * layers * sequences * length * width * (tensor - 1) / tensor,
        )
        leaves = 0.0
        for dimension, amount in enumerate(sent):
            rings = [{nodes.node_rank(rank) for rank in ring} for ring in plan.lines(dimension)]
            leaves += amount * sum(0 in ring and len(ring) > 1 for ring in rings)
        state, unit = 4 * k * numel / shards, 2 * c * (cut / layers / tensor + whole) + 2 * w * cut / layers / tensor
        activations = c * layers * (4 + 12 / tensor) * width * length
        expected = (state / 1e9, unit / 1e9, activations / 1e9, sequences, *(each / 1e9 for each in (*sent, leaves)))
        assert [float(each) for each in row.split(" | ")] == [round(each, 1) for each in expected]


def test_the_table_of_folders_is_the_order_of_imports():
    """Each row of the page on architecture has the parts of one layer, the highest first."""
    from tests.unit.test_layers import LAYERS

    page = (ROOT / "docs/developers/architecture.md").read_text()
    table = page[page.index("| folder or module |") :].split("\n\n")[0]
    rows = [set(re.findall(r"`(\w+)`", row.split(" | ")[0])) for row in table.splitlines()[2:]]
    assert rows == [found for layer in reversed(LAYERS) if (found := layer - {"", "__main__", "_version"})]


def test_classes_that_pages_for_developers_name_exist():
    classes = {}
    for path in [
        *ROOT.glob("hpcfsdp/**/*.py"),
        ROOT / "tests/unit/engine/recording.py",
        ROOT / "tests/unit/engine/accesses.py",
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, {""}).update(getattr(part, "name", "") for part in node.body)
    for page in ROOT.glob("docs/developers/*.md"):
        named = set(re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.(\w+))?`", page.read_text()))
        unknown = {(name, part) for name, part in named if part not in classes.get(name, ())}
        assert {name for name, _ in unknown} <= {"DTensor", "ShardedTensor", "MixedPrecision", "None"}, (
            page
        )  # of others


@pytest.mark.parametrize("page", ["docs/developers/architecture.md", "docs/developers/glossary.md"])
def test_folders_and_files_that_a_page_names_exist(page):
    names = set(re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", (ROOT / page).read_text()))
    assert len(names) > 10
    assert not [name for name in names if not there(name)]


def resolve(name):
    """Import the longest prefix of a dotted name that is a module, and look the rest up in it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], found)
    raise ModuleNotFoundError(name)


def test_names_on_the_page_about_those_of_torch_exist():
    text = (ROOT / "docs/reference/names.md").read_text()
    names = set(re.findall(r"`(hpcfsdp\.[\w.]+)`", text))
    for module, items in re.findall(r"^`(hpcfsdp\.[\w.]+)`:\n\n((?:[- ] .*\n)+)", text, re.MULTILINE):
        for item in re.findall(r"^- ((?:`\w+`,?\s*)+)", items, re.MULTILINE):
            names |= {f"{module}.{name}" for name in re.findall(r"`(\w+)`", item)}
    assert len(names) > 120
    for name in names:
        resolve(name)


def test_the_table_of_fully_shard_has_all_that_torch_has():
    text = (ROOT / "docs/reference/fully-shard.md").read_text()
    named = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    methods = {name for name, value in vars(stock_fsdp.FSDPModule).items() if not name.startswith("_")}
    arguments = set(inspect.signature(stock_fsdp.fully_shard).parameters)
    assert methods | arguments <= named
    assert named - methods - arguments == {
        "comm_options",
        "register_fsdp_forward_method",
        "share_comm_ctx",
        "fsdp_pre_all_gather",
        "fsdp_post_all_gather",
    }


PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_exist(page):
    """Every `hpcfsdp verb` and `make target` that a page shows."""
    shown = "".join(blocks(page, "console") + blocks(page, "text"))
    assert set(re.findall(r"(?:^\$|[ /-])hpcfsdp ([a-z]+)", shown, re.MULTILINE)) <= set(VERBS)
    text = (ROOT / page).read_text()
    targets = re.findall(r"^\$ make ([a-z-]+)", shown, re.MULTILINE) + re.findall(r"`make ([a-z-]+)[ `]", text)
    assert set(targets) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_of_a_page_are_python(page):
    """Also those that cannot run here, because they need another library or a cluster."""
    for code in blocks(page, "python[^\n]*"):
        compile(textwrap.dedent(code), page, "exec")


def test_the_page_on_configuration_names_every_variable_of_the_library():
    text = (ROOT / "docs/reference/configuration.md").read_text()
    for variable in re.findall(r'"(HPCFSDP_\w+?)"', (ROOT / "hpcfsdp/env.py").read_text()):
        assert variable == "HPCFSDP_" or f"`{variable}`" in text


@functools.cache
def anchors(path):
    """Names by which links reach the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_any_page_names_exist(page):
    text = (ROOT / page).read_text()
    names = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|cpp|def|sbatch))`", text)
    assert not [name for name in names if not there(name)]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page):
    """Also those within the site, of which not every run of the tests builds the pages."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^):\s]*)\)", text):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"{target}#{anchor}"


def test_every_page_of_the_site_is_in_its_table_of_contents():
    listed = re.findall(r"^([a-z-]+/[a-z-]+)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert sorted(f"docs/{name}.md" for name in listed) == [page for page in PAGES if page.count("/") == 2]


def test_names_of_the_library_that_pages_mention_exist():
    for page in PAGES:
        for name in re.findall(r"`(hpcfsdp(?:\.\w+)+)(?:\(|`)", (ROOT / page).read_text()):
            if not name.endswith((".py", ".h5")) and ".integrations." not in name:  # which need other libraries
                resolve(name)


def test_the_page_on_doctor_lists_every_area():
    code = "".join(path.read_text() for path in sorted((ROOT / "hpcfsdp/doctor").glob("*.py")))
    areas = set(re.findall(r'\b(?:ok|note|warning|problem)\)?\(\s*"(\w+)"', code))
    assert len(areas) > 10
    table = "".join(re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs/how-to/doctor.md").read_text(), re.MULTILINE))
    assert areas <= set(re.findall(r"`(\w+)`", table))


def test_numbers_on_pages_are_those_of_the_code():
    from hpcfsdp import env
    from hpcfsdp.launch.job import load_mpi

    load_mpi()  # modules that load it otherwise leave a segment of shared memory
    from hpcfsdp.checkpoint.format import access, footer, schema
    from hpcfsdp.comm.mpi import exchange, node_memory, staged
    from hpcfsdp.engine import order
    from hpcfsdp.hang import departure, waits

    logged = [f"{env.wait_log_s() * at:g}" for at in waits._LOG_AT]
    said = {
        "reference/checkpoint-format.md": [
            f"| bytes of an extent | {schema.BLOCK_BYTES >> 20} MiB |",
            f"| regions of a footer | {footer.MOST_REGIONS:,} |",
            f"| dimensions of a tensor | {schema.MOST_DIMENSIONS},",
            f"| levels of lists and objects in JSON | {schema.MOST_LEVELS} |",
            f"may take {access.LEAST_ROOM_BYTES >> 20} MiB of memory",
            f"Tensors of {schema.ALIGNED_FROM_BYTES >> 10} KiB or more start at a multiple of "
            f"{schema.ALIGNMENT_BYTES >> 10} KiB",
        ],
        "reference/configuration.md": [
            f"| `HPCFSDP_WAIT_LOG_S` | {env.wait_log_s():g} |",
            f"| `HPCFSDP_HANG_S` | {env.hang_s():g} |",
        ],
        "explanation/communication.md": [
            f"after {logged[0]} seconds, then after {', '.join(logged[1:])}, and every further {logged[-1]}"
        ],
        "explanation/scaling.md": [
            f"| up to {exchange._MOST_PAIRS} | any |",
            f"| more | up to {exchange._ROUND_BYTES >> 10} KiB |",
            f"An all-reduce of up to {exchange._SMALL_BYTES >> 10} KiB",
        ],
        "explanation/sharp-bits.md": [
            "waits four seconds" if departure.GRACE_S == 4 else f"{departure.GRACE_S:g} seconds"
        ],
        "developers/node-memory.md": [
            f"for each rank, {node_memory._LINE} bytes",
            f"of {staged._PART_BYTES >> 20} MiB, or less if the regions of all ranks would exceed "
            f"{staged._MOST_BYTES >> 20} MiB",
        ],
        "developers/step.md": [
            f"the same {order.MOST_PATHS} paths",
            "after ten minutes" if order.PATIENCE_S == 600 else f"{order.PATIENCE_S:g} seconds",
        ],
    }
    for page, texts in said.items():
        text = " ".join((ROOT / "docs" / page).read_text().split())
        assert not [each for each in texts if each not in text], page


@pytest.mark.parametrize(
    ("page", "text", "name", "value"),
    [
        ("checkpoints", "(4 GiB by default)", "checkpoint.manager.STAGING_BYTES", 4 << 30),
        ("checkpoints", "an hour after the last write", "checkpoint.format.catalog.ABANDONED_AFTER_S", 3600),
        ("dcp", "more than 16 ranks", "checkpoint.dcp.columns._MOST_WRITERS", 16),
        ("file-systems", "for 90 s", "checkpoint.saving.pending.VISIBLE_WITHIN_S", 90),
        ("file-systems", "pieces of 4 MiB at most", "checkpoint.format.schema.BLOCK_BYTES", 4 << 20),
        ("file-systems", "each tensor of 64 KiB or more", "checkpoint.format.schema.ALIGNED_FROM_BYTES", 64 << 10),
        ("file-systems", "the tensors below 64 KiB", "checkpoint.saving.subfiles.LEAST_BYTES", 64 << 10),
        ("hangs", "| 30 min |", "launch.job.DEFAULT_TIMEOUT_S", 1800),
        ("plan", "less than 2%", "plan.choice.SAME_TIME", 0.02),
        ("preemption", "30 seconds more", "preempt._SPARE_S", 30),
        ("preemption", "at least every 20 steps", "preempt._MOST_STEPS", 20),
        ("report", "the last 200 steps", "report.problems.WINDOW", 200),
        ("report", "in 30% of a step", "report.problems.HIGH_COMM_SHARE", 0.3),
        ("report", "92% of the capacity", "report.problems.HIGH_MEMORY_SHARE", 0.92),
        ("report", "20% below its best", "report.problems.SLOWER", 0.8),
        ("report", "5% of the time", "report.problems.LONG_HELD", 0.05),
        ("../tutorials/quickstart", "every 10 seconds", "launch.lock.BEAT_S", 10),
        ("../tutorials/quickstart", "for 150 seconds", "launch.lock.SILENT_S", 150),
    ],
)
def test_a_number_on_a_page_is_that_of_the_code(page, text, name, value):
    assert text in " ".join((ROOT / f"docs/how-to/{page}.md").read_text().split())
    assert resolve(f"hpcfsdp.{name}") == value


def test_waits_and_extras_on_pages_are_those_of_the_package(monkeypatch):
    from hpcfsdp import env

    for name in ("HPCFSDP_WAIT_LOG_S", "HPCFSDP_HANG_S"):
        monkeypatch.delenv(name, raising=False)
    hangs = (ROOT / "docs/how-to/hangs.md").read_text()
    assert (env.wait_log_s(), env.hang_s()) == (10, 300)
    assert re.search(r"^\| 10 s \|.*`HPCFSDP_WAIT_LOG_S`", hangs, re.MULTILINE)
    assert re.search(r"^\| 5 min \|.*`HPCFSDP_HANG_S`", hangs, re.MULTILINE)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    table = (ROOT / "docs/how-to/install.md").read_text().split("## Extras")[1]
    shown = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE))))
    developers = {"test", "test-report", "test-programs", "docs", "lint", "packages"}
    assert shown == set(setup["options.extras_require"]) - developers
