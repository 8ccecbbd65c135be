import dataclasses

import pytest

from hpcfsdp.config import parse
from hpcfsdp.errors import UsageError
from hpcfsdp.examples.gpt.run_config import DataConfig, MeshConfig, RunConfig, as_list, changes, check


def changed(**values):
    """A configuration with ``section__key=value`` changed."""
    config = RunConfig()
    for name, value in values.items():
        section, _, key = name.rpartition("__")
        if section:
            value = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section or key: value})
    return config


def error_of(config, num_ranks=1, num_nodes=1):
    with pytest.raises(UsageError) as caught:
        check(config, num_ranks, num_nodes)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_defaults_work_on_one_and_on_eight_ranks():
    check(RunConfig(), 1)
    check(RunConfig(), 8)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers",
        "model.width",
        "model.heads",
        "model.context",
        "train.steps",
        "train.batch",
        "train.accumulation",
        "train.log_every",
        "mesh.tensor",
        "mesh.replicate",
        "eval.bytes",
        "optim.lr",
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_value_that_must_be_positive_is_named(name, value):
    assert error_of(changed(**{name.replace(".", "__"): value})) == f"{name} must be positive, not {value}"


@pytest.mark.parametrize(
    "name",
    ["train.run_steps", "checkpoint.every", "optim.warmup_steps", "optim.clip_norm", "optim.min_lr"],
)
def test_a_value_that_must_not_be_negative_is_named(name):
    check(changed(**{name.replace(".", "__"): 0}), 1)
    assert error_of(changed(**{name.replace(".", "__"): -1})) == f"{name} must not be negative, but is -1"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"model__width": 10, "model__heads": 4},
            "model.width (10) must be a multiple of model.heads (4)",
        ),
        ({"model__dropout": 1.0}, "model.dropout must be in [0, 1), not 1.0"),
        ({"model__dropout": -0.1}, "model.dropout must be in [0, 1), not -0.1"),
        ({"data__held_out": 0.0}, "data.held_out must be between 0 and 1, not 0.0"),
        ({"data__held_out": 1.0}, "data.held_out must be between 0 and 1, not 1.0"),
        ({"optim__lr": float("nan")}, "optim.lr must be positive, not nan"),
        ({"optim__clip_norm": float("nan")}, "optim.clip_norm must not be negative, but is nan"),
    ],
)
def test_a_value_that_cannot_work_is_named(values, text):
    assert error_of(changed(**values)) == text


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"optim__beta1": 1.0}, "optim.beta1"),
        ({"optim__beta1": -0.1}, "optim.beta1"),
        ({"optim__beta2": 1.0}, "optim.beta2"),
        ({"optim__weight_decay": -0.1}, "optim.weight_decay"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_value_that_torch_or_numpy_refuse_is_named_before_they_do(values, name):
    assert name in error_of(changed(**values))


def test_a_batch_too_small_for_the_ranks_is_refused_with_a_hint():
    config = changed(train__batch=8, train__accumulation=3)
    check(config, 2)
    assert error_of(config, 3) == (
        "train.batch (8 sequences a step) is less than one for each of 3 rank(s) in each of train.accumulation=3 "
        "micro-batch(es): use a larger batch or fewer ranks"
    )


@pytest.mark.parametrize(("given", "paths"), [([], []), ("a b", ["a b"]), (["a", "b"], ["a", "b"])])
def test_a_single_path_becomes_a_list(given, paths):
    assert as_list(DataConfig(paths=given).paths) == paths


@pytest.mark.parametrize(
    ("replicate", "tensor", "ranks", "nodes"),
    [(1, 2, 4, 1), (2, 2, 4, 1), (4, 1, 4, 1), (1, 4, 4, 1), (2, 2, 8, 2), ("nodes", 1, 4, 1), ("nodes", 4, 12, 3)],
)
def test_a_mesh_that_divides_the_ranks_works(replicate, tensor, ranks, nodes):
    check(changed(mesh__replicate=replicate, mesh__tensor=tensor), ranks, nodes)


@pytest.mark.parametrize(
    ("values", "ranks", "nodes", "text"),
    [
        (
            {"mesh__tensor": 3, "model__heads": 3, "model__width": 24},
            4,
            1,
            "mesh.replicate (1) x mesh.tensor (3) = 3 does not divide the 4 rank(s) of this job: change one of them, "
            "or start a multiple of 3 ranks",
        ),
        (
            {"mesh__tensor": 2, "mesh__replicate": 4},
            4,
            1,
            "mesh.replicate (4) x mesh.tensor (2) = 8 does not divide the 4 rank(s) of this job: change one of them, "
            "or start a multiple of 8 ranks",
        ),
        (
            {"mesh__tensor": 4, "mesh__replicate": "nodes"},
            6,
            3,
            "mesh.replicate (nodes, 3 here) x mesh.tensor (4) = 12 does not divide the 6 rank(s) of this job: change "
            "one of them, or start a multiple of 12 ranks",
        ),
        (
            {"mesh__tensor": 8},
            8,
            1,
            "model.heads (4) must be a multiple of mesh.tensor (8): attention is divided by heads",
        ),
        (
            {"mesh__tensor": 2, "train__batch": 3},
            8,
            1,
            "train.batch (3 sequences a step) is less than one for each of 4 group(s) of mesh.tensor=2 rank(s) in each "
            "of train.accumulation=1 micro-batch(es): use a larger batch or fewer ranks",
        ),
    ],
)
def test_an_impossible_mesh_is_refused_with_a_hint(values, ranks, nodes, text):
    assert error_of(changed(**values), ranks, nodes) == text


def test_tensor_parallel_ranks_need_one_sequence_together():
    check(changed(mesh__tensor=4, train__batch=2), 8)


def test_replicas_are_a_number_or_the_nodes(tmp_path):
    def replicas(*arguments):
        return parse(RunConfig, arguments, prog="train", environ={}).mesh.replicate

    assert [replicas(), replicas("--mesh.replicate", "3"), replicas("--mesh.replicate", "nodes")] == [1, 3, "nodes"]
    with pytest.raises(UsageError, match=r"mesh\.replicate"):
        replicas("--mesh.replicate", "racks")
    (tmp_path / "run.yaml").write_text("mesh:\n  replicate: nodes\n  tensor: 2\n")
    assert parse(RunConfig, [str(tmp_path / "run.yaml")], prog="train", environ={}).mesh == MeshConfig("nodes", 2)


def test_changes_are_of_the_training_and_not_of_the_job():
    before = dataclasses.asdict(RunConfig(seed=3, run_dir="elsewhere", device="cuda", take_over=True))
    now = changed(train__batch=8, model__width=64, checkpoint__every=7, checkpoint__resume="a.h5", train__run_steps=2)
    assert changes(now, before) == {
        "seed": (3, 0),
        "model.width": (256, 64),
        "train.batch": (16, 8),
        "checkpoint.every": (200, 7),
    }
    del before["model"]["width"]  # of another version of the program
    assert "model.width" not in changes(now, before | {"older": 1})
