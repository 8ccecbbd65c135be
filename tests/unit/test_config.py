import dataclasses
import os
from dataclasses import dataclass, field

import pytest
import yaml
from hypothesis import example, given, settings, strategies as st

from hpcfsdp.config import known_keys, parse, write_yaml
from hpcfsdp.errors import UsageError, nearest


@dataclass(frozen=True)
class Optim:
    """A section."""

    rate: float = 0.5
    steps: int = 10
    fused: bool = False


@dataclass(frozen=True)
class Data:
    """Another section."""

    paths: list[str] | str = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    limit: int | None = None


@dataclass(frozen=True)
class Config:
    """All of it."""

    name: str = "run"
    seed: int = 0
    optim: Optim = field(default_factory=Optim)
    data: Data = field(default_factory=Data)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("HPCFSDP_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path):
    """``file(text)``: a configuration file."""

    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def environment(monkeypatch):
    """``environment(NAME=value)``: variables of the process."""

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def read(*arguments, **options):
    return parse(Config, list(arguments), prog="hpcfsdp try", **options)


def error_of(*arguments, **options):
    with pytest.raises(UsageError) as caught:
        read(*arguments, **options)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_without_anything_there_are_the_defaults():
    assert read() == Config()


def test_values_come_from_flags_in_both_spellings():
    config = read("--seed", "3", "--optim.steps=7", "--optim.fused", "true")
    assert config == Config(seed=3, optim=Optim(steps=7, fused=True))


def test_values_come_from_the_file(file):
    config = read("--config", file("name: a\noptim:\n  rate: 1e-3\n  steps: 4\ndata:\n  limit: null\n"))
    assert config == Config(name="a", optim=Optim(rate=0.001, steps=4))


def test_the_first_word_is_the_file(file):
    path = file("seed: 5\n")
    assert read(path).seed == 5
    assert read(path, "--name", "b") == Config(name="b", seed=5)
    assert read(f"--config={path}").seed == 5


def test_values_come_from_the_environment(environment):
    environment(HPCFSDP_SEED="4", HPCFSDP_OPTIM__RATE="0.25")
    assert read() == Config(seed=4, optim=Optim(rate=0.25))


def test_an_environment_that_is_given_takes_the_place_of_the_process(environment):
    environment(HPCFSDP_SEED="4")
    assert read(environ={"HPCFSDP_OPTIM__STEPS": "6"}) == Config(optim=Optim(steps=6))
    assert read(environ={}) == Config()


def test_flag_beats_environment_beats_file_beats_default(file, environment):
    path = file("optim:\n  rate: 1.0\n  steps: 1\n  fused: true\n")
    environment(HPCFSDP_OPTIM__RATE="2.0", HPCFSDP_OPTIM__STEPS="2")
    config = read(path, "--optim.rate", "3.0")
    assert config.optim == Optim(rate=3.0, steps=2, fused=True)
    assert config.seed == 0


def test_a_flag_beats_the_file_wherever_it_stands(file):
    path = file("seed: 5\n")
    assert read("--seed", "7", "--config", path).seed == 7
    assert read("--config", path, "--seed", "7").seed == 7


def test_the_file_may_be_named_by_the_environment(file, environment):
    environment(HPCFSDP_CONFIG=file("seed: 5\nname: a\n"), HPCFSDP_NAME="b")
    assert read() == Config(name="b", seed=5)


def test_a_file_of_the_command_line_takes_the_place_of_that_of_the_environment(file, environment):
    environment(HPCFSDP_CONFIG=file("seed: 5\nname: a\n", "1.yaml"))
    assert read(file("seed: 6\n", "2.yaml")) == Config(seed=6)


def test_a_section_may_be_given_whole_and_its_keys_beat_it(environment):
    environment(HPCFSDP_OPTIM="{rate: 1.0, steps: 3}", HPCFSDP_OPTIM__STEPS="4")
    assert read().optim == Optim(rate=1.0, steps=4)
    assert read("--optim", "{rate: 2.0}", "--optim.fused=true").optim.rate == 2.0


def test_the_last_flag_and_the_last_file_count(file):
    first, second = file("seed: 1\nname: a\n", "1.yaml"), file("seed: 2\n", "2.yaml")
    assert read("--config", first, "--config", second) == Config(name="a", seed=2)
    assert read("--seed", "1", "--seed", "2").seed == 2


@pytest.mark.parametrize(
    ("flag", "known"),
    [("--optim.stepz", "optim.steps"), ("--steps", "optim.steps"), ("--sed", "seed")],
)
def test_an_unknown_flag_suggests_the_nearest(flag, known):
    assert error_of(flag, "3") == f"unknown option {flag}; did you mean {known!r}?"
    assert error_of(f"{flag}=3") == f"unknown option {flag}; did you mean {known!r}?"


def test_an_unknown_flag_that_resembles_nothing_suggests_nothing():
    assert error_of("--zzzzzz", "3") == "unknown option --zzzzzz"


def test_a_part_of_a_flag_is_not_enough():
    assert error_of("--optim.rat", "3") == "unknown option --optim.rat; did you mean 'optim.rate'?"


def test_an_unknown_variable_suggests_the_nearest():
    assert error_of(environ={"HPCFSDP_OPTIM__STEPZ": "3"}) == (
        "unknown environment variable HPCFSDP_OPTIM__STEPZ; did you mean 'HPCFSDP_OPTIM__STEPS'?"
    )


def test_an_unknown_key_of_a_file_is_named_with_the_file_and_suggests_the_nearest(file):
    path = file("optim:\n  stepz: 3\n")
    assert error_of(path) == f"configuration file {path}: unknown key 'optim.stepz'; did you mean 'optim.steps'?"
    path = file("optimm: {}\n")
    assert error_of(path) == f"configuration file {path}: unknown key 'optimm'; did you mean 'optim'?"
    path = file("steps: 3\n")
    assert error_of(path) == f"configuration file {path}: unknown key 'steps'; did you mean 'optim.steps'?"


def test_an_unknown_key_is_named_also_in_a_file_that_the_environment_names(file, environment):
    path = file("optim:\n  stepz: 3\n")
    environment(HPCFSDP_CONFIG=path)
    message = error_of()
    assert path in message
    assert "'optim.stepz'; did you mean 'optim.steps'?" in message


@pytest.mark.parametrize(
    ("flag", "value"), [("--optim.steps", "many"), ("--optim.rate", "fast"), ("--optim.steps", "1.5")]
)
def test_a_flag_of_the_wrong_type_names_key_and_value(flag, value):
    message = error_of(flag, value)
    assert message.startswith("try: ")
    assert flag.removeprefix("--") in message
    assert value in message
    assert "\n" not in message


def test_a_value_of_the_wrong_type_is_told_in_a_few_words():
    assert error_of("--optim.steps", "many") == "try: optim.steps: expected int, got many"


def test_a_file_value_of_the_wrong_type_names_key_and_value(file):
    message = error_of(file("optim:\n  steps: many\n"))
    assert "optim.steps" in message
    assert "many" in message


def test_a_variable_of_the_wrong_type_names_key_and_value(environment):
    environment(HPCFSDP_OPTIM__STEPS="many")
    message = error_of()
    assert "optim.steps" in message.lower().replace("__", ".")
    assert "many" in message


@pytest.mark.parametrize("flag", ["--seed", "--config"])
def test_a_flag_without_its_value_is_an_error(flag):
    assert flag in error_of(flag)


@pytest.mark.parametrize("word", ["extra", "-x"])
def test_words_that_belong_to_nothing_are_refused_by_name(word):
    assert word in error_of("--seed", "1", word)


def test_a_second_file_without_its_flag_is_refused_by_name(file):
    first, second = file("seed: 1\n", "1.yaml"), file("seed: 2\n", "2.yaml")
    assert second in error_of(first, second)


def test_a_missing_file_is_named(tmp_path):
    assert error_of(f"{tmp_path}/none.yaml") == f"configuration file {tmp_path}/none.yaml: No such file or directory"


def test_a_folder_is_no_file(tmp_path):
    assert error_of("--config", str(tmp_path)) == f"configuration file {tmp_path}: Is a directory"


def test_a_file_that_is_not_yaml_is_named(file, tmp_path):
    path = file("a: [1\n")
    assert error_of(path).startswith(f"configuration file {path}: not YAML: ")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert error_of(str(binary)).startswith(f"configuration file {binary}: not YAML: ")


@pytest.mark.parametrize(("text", "kind"), [("- 1\n", "list"), ("3\n", "int"), ("text\n", "str")])
def test_a_file_without_keys_is_refused_by_what_it_holds(file, text, kind):
    path = file(text)
    assert error_of(path) == f"configuration file {path}: must hold keys and values, not a {kind}"


@pytest.mark.parametrize("text", ["", "# nothing but this\n", "{}\n"])
def test_an_empty_file_changes_nothing(file, text):
    assert read(file(text)) == Config()


def test_lists_come_from_flags_files_and_the_environment(file, environment):
    assert read("--data.paths", "[a, b]").data.paths == ["a", "b"]
    assert read("--data.paths", "a").data.paths == "a"
    assert read("--data.paths+", "a", "--data.paths+=b").data.paths == ["a", "b"]
    assert read("--data.weights", "[1, 2.5]").data.weights == [1.0, 2.5]
    assert read(file("data:\n  paths:\n  - a\n  - b c\n")).data.paths == ["a", "b c"]
    environment(HPCFSDP_DATA__PATHS="[a, b]")
    assert read().data.paths == ["a", "b"]


def test_nothing_is_a_value_of_its_own(file):
    assert read("--data.limit", "3").data.limit == 3
    assert read(file("data:\n  limit: 3\n"), "--data.limit", "null").data.limit is None


def test_sections_are_dataclasses_that_cannot_be_changed():
    config = read("--optim.steps", "3")
    assert isinstance(config.optim, Optim)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.steps = 4


def test_help_prints_every_key_to_stdout(capsys):
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{key}" in text for key in known_keys(Config))
    assert "hpcfsdp try" in text


def test_print_config_is_a_file_that_reads_back(capsys, file):
    with pytest.raises(SystemExit) as caught:
        read("--seed", "3", "--data.paths", "[a]", "--print_config")
    assert caught.value.code == 0
    assert read(file(capsys.readouterr().out)) == Config(seed=3, data=Data(paths=["a"]))


def test_known_keys_are_sections_and_their_keys():
    assert known_keys(Config) == [
        "name",
        "seed",
        "optim",
        "optim.rate",
        "optim.steps",
        "optim.fused",
        "data",
        "data.paths",
        "data.weights",
        "data.limit",
    ]


def test_a_written_file_is_nested_and_plain(tmp_path):
    write_yaml(Config(data=Data(paths=["a"])), tmp_path / "config.yaml")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {
        "name": "run",
        "seed": 0,
        "optim": {"rate": 0.5, "steps": 10, "fused": False},
        "data": {"paths": ["a"], "weights": [], "limit": None},
    }


configs = st.builds(
    Config,
    name=st.text(st.characters(categories=["L", "N", "P"]), min_size=1),
    seed=st.integers(-(2**40), 2**40),
    optim=st.builds(
        Optim, rate=st.floats(allow_nan=False, allow_infinity=False), steps=st.integers(), fused=st.booleans()
    ),
    data=st.builds(Data, weights=st.lists(st.floats(-1e9, 1e9), max_size=3), limit=st.none() | st.integers()),
)


@given(configs)
@example(Config(name="0E0"))
@example(Config(name="-.5e+3"))
@settings(max_examples=15, deadline=None)
def test_a_written_file_reads_back_as_it_was(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    write_yaml(config, path)
    assert yaml.safe_load(path.read_text()) == dataclasses.asdict(config)
    assert read(str(path), environ={}) == config


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("stepz", "; did you mean 'steps'?"),
        ("data.steps", "; did you mean 'steps'?"),
        ("model.layers", "; did you mean 'net.layers'?"),
        ("qqqq", ""),
    ],
)
def test_nearest_ends_a_message_or_is_nothing(name, end):
    assert nearest(name, ["steps", "seed", "net.layers"]) == end


def test_a_section_without_keys_in_a_file_is_an_error(tmp_path):
    (tmp_path / "run.yaml").write_text("optim:\nseed: 1\n")
    with pytest.raises(UsageError, match=r"run\.yaml: section 'optim' is empty: leave it out, or give it keys"):
        parse(Config, [str(tmp_path / "run.yaml")], prog="p", environ={})


@pytest.mark.parametrize("argv", [["--optim.fused"], ["--optim.fused", "--seed", "3"], ["--optim.fused", "true"]])
def test_a_switch_may_stand_alone(argv):
    assert parse(Config, argv, prog="test").optim.fused is True


def test_a_switch_takes_the_value_behind_it():
    assert parse(Config, ["--optim.fused", "false", "--seed", "3"], prog="test").optim.fused is False
    with pytest.raises(UsageError, match=r"optim\.fused"):
        parse(Config, ["--optim.fused", "maybe"], prog="test")


def test_another_flag_may_not_stand_alone():
    with pytest.raises(UsageError, match="seed"):
        parse(Config, ["--seed", "--optim.fused"], prog="test")
