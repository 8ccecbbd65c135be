"""``hpcfsdp plan`` as users call it: each way to give a model, what it prints, and what it refuses."""

import json
import re
import xml.etree.ElementTree as xml

import pytest

from tests.cli.conftest import ROOT

SMALL = ("plan", "--params", "1e8", "--layers", "6", "--sequence", "256", "--ranks", "32", "--ranks-per-node", "4")
FACTORIES = "tests.unit.plan.programs"


def planned(command, *arguments):
    done = command("plan", "--json", *arguments)
    assert (done.code, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_one_line_for_16384_ranks(hpcfsdp):
    """The command of the issue: a 7B model, in a process of its own, without MPI."""
    line = "--params 7e9 --layers 32 --ranks 16384 --ranks-per-node 8 --device-memory 80GiB"
    done = hpcfsdp("plan", *line.split(), environ={"PYTHONPATH": str(ROOT), "MPI4PY_RC_INITIALIZE": "false"})
    assert (done.code, done.stderr) == (0, "")
    text = done.stdout
    assert "machine    2048 nodes x 8 ranks, 80.0 GiB each" in text
    for part in (
        "memory of the worst rank",
        "traffic of a rank, a step",
        "step  ",
        "checkpoint 78.2 GiB",
        "recommended:",
    ):
        assert part in text, part
    assert re.search(r"^recommended: HYBRID_SHARD, \d+ replica\(s\) x \d+ shard\(s\)", text, re.MULTILINE)
    assert "FULL_SHARD over all ranks takes" in text
    assert "device_mesh=mesh" in text


def test_json_holds_the_whole_plan(command):
    found = planned(command, *SMALL[1:])
    assert found["fits"] and found["missing_bytes"] == 0
    best = found["recommendation"]
    memory = best["memory"]
    assert sum(memory["peak_by_kind"].values()) == memory["peak_bytes"]
    assert best["shards"] * best["replicas"] == 32
    step = best["step"]
    assert step["seconds"] == pytest.approx(step["compute_s"] + step["exposed_communication_s"] + step["optimizer_s"])
    total, parts = (
        best["traffic"]["total"],
        [best["traffic"][name] for name in ("gathers", "reductions", "replication")],
    )
    assert total["within_bytes"] == pytest.approx(sum(part["within_bytes"] for part in parts))
    assert found["checkpoint"]["nbytes"] == 3 * 4 * found["model"]["parameters"]
    ways = {(each["strategy"], each["shards"], each["activation_checkpointing"]) for each in found["candidates"]}
    assert {("FULL_SHARD", 32, False), ("NO_SHARD", 1, True), ("_HYBRID_SHARD_ZERO2", 4, False)} <= ways


def test_a_configuration_of_a_run(command, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {layers: 3, width: 64, heads: 4, context: 32}\ntrain: {batch: 16}\n")
    found = planned(command, path, "--ranks", "8", "--ranks-per-node", "4", "--device", "a100")
    assert [unit["count"] for unit in found["model"]["units"]] == [3, 1]
    assert found["model"]["tokens_per_rank"] == 2 * 32
    assert found["machine"]["flops"] == 156e12 / 2  # it computes in fp32
    assert {each["strategy"] for each in found["candidates"]} == {"FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"}
    assert not any(each["activation_checkpointing"] for each in found["candidates"])
    assert found["recommendation"]["program"] == ["mesh:", f"  replicate: {found['recommendation']['replicas']}"]


def test_a_factory(command):
    found = planned(command, "--factory", f"{FACTORIES}:with_inputs", "--wrap", "Linear", "--ranks", "2")
    assert found["model"]["units"][0] == {"kind": "Linear", "parameters": 64 * 65, "count": 3}
    found = planned(command, "--factory", f"{FACTORIES}:without_inputs", "--ranks", "2")
    assert "returns no inputs" in found["model"]["notes"][0]
    assert found["tokens_per_s"] == 0


def test_a_configuration_of_transformers(command, tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.Qwen2Config(**shape, num_key_value_heads=2, vocab_size=100).save_pretrained(tmp_path)
    found = planned(command, "--config", tmp_path / "config.json", "--sequence", "32", "--ranks", "4")
    assert found["model"]["units"][0]["kind"] == "Qwen2DecoderLayer"


def test_blocks_that_stay_together(command):
    plain, rows = (planned(command, *SMALL[1:], *more) for more in ((), ("--granularity", "row")))
    assert 0 <= plain["recommendation"]["padding"] < rows["recommendation"]["padding"] < 0.05
    assert "    granularity='row'," in rows["recommendation"]["program"]
    done = command(*SMALL, "--granularity", "row")
    assert "granularity row: padding of" in done.stdout
    done = command(*SMALL, "--granularity", "row", "--front", "fully_shard")
    assert done.code == 2
    assert "--granularity has no effect with --front fully_shard" in done.stderr


def test_fully_shard(command):
    done = command(*SMALL, "--front", "fully_shard", "--strategy", "_HYBRID_SHARD_ZERO2", "--shard", "4")
    assert done.code == 0, done.stderr
    assert "mesh = world.mesh(replicate=8, shard=4)" in done.stdout
    assert "fully_shard(module, reshard_after_forward=False, **options)" in done.stdout


def test_values_that_stay_on_nodes(command):
    slow = (*SMALL, "--link-between", "1,60", "--strategy", "FULL_SHARD")
    done = command(*slow)
    assert "recommended: FULL_SHARD, node, 1 replica(s) x 32 shard(s)" in done.stdout
    assert '      reshard_after_forward="node",' in done.stdout
    found = planned(command, *slow[1:])
    assert found["recommendation"]["reshard_after_forward"] == "node"
    assert {each["reshard_after_forward"] for each in found["candidates"]} == {True, "node"}
    for how, ways in (("yes", {True}), ("node", {"node"}), ("2", {2})):
        found = planned(command, *slow[1:], "--reshard-after-forward", how, "--front", "fully_shard")
        assert {each["reshard_after_forward"] for each in found["candidates"]} == ways


def test_cpus_with_measured_rates(command, tmp_path):
    rates = tmp_path / "machine.json"
    link = {"latency_s": 5e-5, "bytes_per_s": 4e9}
    compute = {"flops": 8e10, "memory_bytes_per_s": 1.4e10}
    rates.write_text(json.dumps({"facts": {"links": {"within": link, "between": link}, "compute": compute}}))
    line = ("--params", "1e8", "--layers", "6", "--sequence", "256", "--ranks", "8", "--ranks-per-node", "4")
    found = planned(command, *line, "--device", "cpu", "--dtype", "fp32", "--links", rates)
    assert found["machine"]["flops"] == 8e10
    ways = {(each["strategy"], each["reshard_after_forward"]): each for each in found["candidates"]}
    node, kept = (ways[name]["memory"]["peak_bytes"] for name in (("FULL_SHARD", "node"), ("SHARD_GRAD_OP", False)))
    assert node == pytest.approx(kept, rel=0.01)
    given = planned(command, *line, "--device", "cpu", "--links", rates, "--peak-tflops", "0.1")
    assert given["machine"]["flops"] == 0.05e12


def test_what_does_not_fit(command):
    found = command(*SMALL, "--device-memory", "200MB", "--shard", "4")
    assert found.code == 0, found.stderr
    assert "does not fit: " in found.stdout
    assert "share each copy among more ranks" in found.stdout
    report = planned(command, *SMALL[1:], "--device-memory", "200MB", "--shard", "4")
    best = report["recommendation"]
    assert report["missing_bytes"] == best["memory"]["peak_bytes"] - int(0.9 * 200e6)
    assert not report["fits"] and best["memory"]["peak_bytes"] == min(
        each["memory"]["peak_bytes"] for each in report["candidates"]
    )


def test_measured_links_and_a_picture(command, tmp_path):
    links, picture = tmp_path / "links.json", tmp_path / "plan.svg"
    links.write_text(
        json.dumps({"facts": {"links": {"within": {"latency_s": 5e-6, "bytes_per_s": 7e9}, "between": None}}})
    )
    done = command(*SMALL, "--links", links, "--link-between", "3,40", "--plot", picture)
    assert done.code == 0, done.stderr
    assert "links      within nodes 7 GB/s, 5 us (measured, links.json)" in done.stdout
    assert "links      between nodes 3 GB/s, 40 us (given)" in done.stdout
    assert xml.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize("width", [80])
def test_lines_fit_a_terminal(command, width):
    """Tables and code; sentences may be longer, as in other commands."""
    done = command(*SMALL)
    code = [line for line in done.stdout.splitlines() if re.match(r" {2,}(model|mesh|    )", line)]
    assert len(code) > 5
    assert max(map(len, code)) <= width


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "8"), "give the model in one way"),
        (("--params", "1e9", "--ranks", "8"), "--params needs --layers"),
        (("--params", "1e9", "--layers", "8", "--factory", "a:b", "--ranks", "8"), "in one way: RUN_YAML"),
        (("--params", "many", "--layers", "8", "--ranks", "8"), "many is not a number of parameters"),
        (("--params", "1e9", "--layers", "8"), "--ranks"),
        (
            ("--params", "1e9", "--layers", "8", "--ranks", "12", "--ranks-per-node", "8"),
            "--ranks 12 is not a multiple of --ranks-per-node 8: give whole nodes, for example --ranks 16",
        ),
        (("--params", "1e9", "--layers", "8", "--ranks", "8", "--reshard-after-forward", "no"), "argument --reshard"),
        (("--params", "1e9", "--layers", "8", "--ranks", "8", "--shard", "3"), "--shard 3 does not divide the 8 ranks"),
        (("--params", "1e9", "--layers", "8", "--ranks", "8", "--strategy", "ZERO"), "there is no strategy 'ZERO'"),
        (("--params", "1e9", "--layers", "8", "--ranks", "8", "--device", "h10"), "did you mean 'h100'"),
        (("--params", "1e9", "--layers", "8", "--ranks", "8", "--link-within", "fast"), "'fast' is no link"),
        (("--params", "1e9", "--layers", "8", "--ranks", "8", "--device-memory", "much"), "much is not a size"),
        (("--params", "1e9", "--layers", "8", "--ranks", "8", "--efficiency", "2"), "at most 1, not 2"),
        (("--params", "1e9", "--layers", "8", "--ranks", "8", "--headroom", "1"), "from 0 to below 1"),
        (("--params", "1e9", "--layers", "8", "--ranks", "8", "--wrap", "Block"), "--wrap has no effect with --params"),
        (("--factory", "missing_module:make", "--ranks", "8"), "cannot import missing_module (ModuleNotFoundError"),
        (("--factory", f"{FACTORIES}:tied", "--wrap", "Linear", "--ranks", "8"), "which is another unit"),
        (("--factory", f"{FACTORIES}:fails", "--ranks", "8"), "could not be made on the meta device"),
        (("no_such_run.yaml", "--ranks", "8"), "no_such_run.yaml: No such file"),
        (("--config", "no/such/config.json", "--ranks", "8"), "there is no such file or folder"),
        (("--params", "1e9", "--layers", "8", "--ranks", "8", "--links", "none.json"), "none.json: No such file"),
        (
            ("--params", "1e9", "--layers", "8", "--ranks", "8", "--strategy", "HYBRID_SHARD", "--shard", "8"),
            "a hybrid strategy needs several copies",
        ),
    ],
)
def test_what_is_refused(command, arguments, message):
    done = command("plan", *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr


PAGE = (ROOT / "docs/how-to/plan.md").read_text()
SHOWN = [
    block for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if "\nmodel " in block
]


@pytest.mark.parametrize("block", SHOWN, ids=["7B"])
def test_the_page_shows_what_is_printed(command, block):
    first, *lines = block.splitlines()
    done = command(*first.removeprefix("$ hpcfsdp ").split())
    assert done.code == 0, done.stderr
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    shown = [" ".join(line.split()) for line in lines]
    assert shown[-1] == "..." and printed[: len(shown) - 1] == shown[:-1]


def test_the_page_runs_in_python(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(code, "plan.md", "exec"), {})
    strategy, nbytes, *program = capsys.readouterr().out.splitlines()
    assert strategy in "\n".join(program) and int(nbytes) > 1 << 30


def test_the_page_names_each_link():
    from hpcfsdp.plan.links import PRESETS

    found = {
        row[0]: (float(row[2]) * 1e-6, float(row[1]) * 1e9)
        for row in re.findall(r"\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", PAGE)
    }
    assert found == {name: pytest.approx(link) for name, link in PRESETS.items()}
