import importlib
import shlex
import shutil
import subprocess
import sys

import pytest

from hpcfsdp import config as configuration
from hpcfsdp.cli.main import VERBS
from hpcfsdp.examples.gpt.run_config import RunConfig


def test_help_lists_the_verbs_and_exit_codes(hpcfsdp, command):
    done = hpcfsdp("--help")
    assert done.code == 0
    assert command("-h").stdout == command("help").stdout == done.stdout
    assert all(f"\n  {verb} " in done.stdout for verb in ("train", "ls", "show"))
    assert "75 checkpointed after a signal" in done.stdout


def test_version(command):
    from hpcfsdp import __version__

    assert command("--version").stdout == f"hpcfsdp {__version__}\n"


def test_no_verb_is_a_usage_error(command):
    done = command()
    assert (done.code, done.stdout) == (2, "")
    assert "which verb?" in done.stderr


def test_unknown_verb_suggests_the_nearest(command):
    done = command("trian")
    assert done.code == 2
    assert "unknown verb 'trian'; did you mean 'train'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_path_in_place_of_the_verb_suggests_ls(command, tmp_path):
    done = command(tmp_path)
    assert done.code == 2
    assert f"unknown verb '{tmp_path}'; did you mean 'hpcfsdp ls {tmp_path}'?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls"], "ls: the following arguments are required: PATH (hpcfsdp ls --help shows the usage)"),
        (["diff", "a.h5"], "diff: the following arguments are required: B (hpcfsdp diff"),
        (["ls", "a.h5", "--jsn"], "ls: unrecognized arguments: --jsn; did you mean '--json'? (hpcfsdp ls"),
        (["plot", "a.h5", "--kind", "loss", "--smoth=3"], "--smoth=3; did you mean '--smooth'? (hpcfsdp plot"),
        (["ls", "a.h5", "-l"], "ls: unrecognized arguments: -l (hpcfsdp ls"),
    ],
)
def test_wrong_arguments_are_named_alone_and_with_the_nearest(command, arguments, message):
    done = command(*arguments)
    assert done.code == 2
    assert message in done.stderr


HELP = """
import sys
from hpcfsdp.cli.main import main
try:
    assert main([sys.argv[1], "--help"]) == 0
except SystemExit as error:
    assert error.code == 0
loaded = {"torch", "mpi4py", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.fresh
@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_with_examples_and_loads_neither_torch_nor_mpi_for_it(start, verb):
    job = start("-c", HELP, verb).wait()
    assert job.code == 0, job.stderr
    assert f"hpcfsdp {verb}" in job.stdout
    examples = job.stdout.partition("\nexamples:\n")[2].splitlines()
    assert len(examples) >= 2
    assert all(line.startswith("  ") and "hpcfsdp " in line for line in examples)


def examples_of(verb):
    """The command lines of a verb's examples, as its parser takes them."""
    module = importlib.import_module(VERBS[verb][0])
    for line in module.EXAMPLES if verb == "train" else module.parser.examples:
        command = line.partition("hpcfsdp ")[2].partition(" > ")[0].replace(')"', "")
        yield shlex.split(command, comments=True)


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_the_help_are_right(verb, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("train: {steps: 2}")
    for first, *words in examples_of(verb):
        assert first == verb
        if verb != "train":
            importlib.import_module(VERBS[verb][0]).parser.parse_intermixed_args(words)
        elif "--print_config" not in words:
            configuration.parse(RunConfig, words, prog="hpcfsdp train")


def test_examples_that_need_a_file_alone_run(command, saved, tmp_path):
    path, steps = tmp_path / "my_model.h5", tmp_path / "runs" / "quickstart" / "checkpoints"
    steps.mkdir(parents=True)
    for name in (path, tmp_path / "a.h5", tmp_path / "b.h5", tmp_path / "best.h5", steps / "step-00000007.h5"):
        shutil.copy(saved, name)
    for verb in ("ls", "show", "stats", "verify", "diff", "prune", "export", "completion"):  # diff: they are copies
        for words in examples_of(verb):
            words = [word.replace("layers.0", "0") for word in words]
            done = command(*words)
            assert done.code == 0, (words, done.stderr)


COMPLETE = """
eval "$({python} -m hpcfsdp completion bash)"
complete -p hpcfsdp
for given in {lines}; do
  eval "COMP_WORDS=($given)"; COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
  _hpcfsdp
  (IFS='|'; printf '%s\\n' "${{COMPREPLY[*]}}")
done
"""

COMPLETED = {
    "hpcfsdp ve": ["verify"],
    "hpcfsdp diff a.h5 --": ["--help", "--json", "--summary", "--rtol", "--atol"],
    "hpcfsdp diff a.h5 --s": ["--summary"],
    "hpcfsdp plot a.h5 --kind ''": ["histogram", "norms", "loss"],
    "hpcfsdp bench checkp": ["checkpoint"],
    "hpcfsdp completion z": ["zsh"],
    "hpcfsdp train --train.st": ["--train.steps"],
    "hpcfsdp show my": ["my_model.h5"],
    "hpcfsdp ls one.h5 my": ["my_model.h5"],
    "hpcfsdp show best": ["best model.h5"],
}


def test_bash_completes_verbs_options_choices_and_files(tmp_path):
    for name in ("my_model.h5", "best model.h5"):
        (tmp_path / name).touch()
    script = COMPLETE.format(python=sys.executable, lines=shlex.join(COMPLETED))
    done = subprocess.run(
        ["bash", "-c", script], check=False, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    declared, *found = done.stdout.splitlines()
    assert declared == "complete -o filenames -F _hpcfsdp hpcfsdp"
    assert [sorted(line.split("|")) for line in found] == [sorted(expected) for expected in COMPLETED.values()]


def test_zsh_and_fish_get_scripts_of_all_verbs(command):
    zsh, fish = (command("completion", shell).stdout for shell in ("zsh", "fish"))
    assert zsh.startswith("autoload -U +X bashcompinit && bashcompinit\n")
    assert "complete -o filenames -F _hpcfsdp hpcfsdp" in zsh
    assert all(f" -a {verb} -d " in fish for verb in VERBS)
    assert "complete -c hpcfsdp -n '__fish_seen_subcommand_from plot' -l kind -x -a 'histogram norms loss' -d " in fish
    for line in fish.splitlines():
        assert shlex.split(line)[:3] == ["complete", "-c", "hpcfsdp"]  # quoted as a shell wants it
