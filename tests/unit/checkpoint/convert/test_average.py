"""The mean of checkpoints, whatever their dtypes; of weights, or of averages in the optimizer's state."""

import pytest
import torch
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.convert.average import average_checkpoints
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, UsageError
from hpcfsdp.optim import ExponentialAverage


class Mixed(nn.Module):
    """Several dtypes, a tied weight, a counter."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.wide, self.half = nn.Linear(3, 4).double(), nn.Linear(4, 4).to(torch.bfloat16)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.tied = self.wide
        self.register_buffer("count", torch.tensor(seed))


def write(folder, count=3):
    models = [Mixed(seed) for seed in range(count)]
    paths = [folder / f"step-{seed}.h5" for seed in range(count)]
    for seed, (path, model) in enumerate(zip(paths, models, strict=True)):
        checkpoint.save(path, model=model, step=10 * seed)
    return models, paths


def mean(values, weights):
    wide = torch.complex128 if values[0].is_complex() else torch.float64
    total = sum(w * value.to(wide) for w, value in zip(weights, values, strict=True)) / sum(weights)
    return total.to(values[0].dtype)


@pytest.mark.parametrize(
    ("options", "weights"), [({}, [1, 1, 1]), ({"weights": [1, 2, 5]}, [1, 2, 5]), ({"decay": 0.5}, [1, 2, 4])]
)
def test_weights(tmp_path, options, weights):
    models, paths = write(tmp_path)
    done = average_checkpoints(paths, tmp_path / "mean.h5", **options)
    assert done.step == 20 and done.weights == tuple(w / sum(weights) for w in weights)
    found = Mixed(9)
    info = checkpoint.load(tmp_path / "mean.h5", model=found)
    assert info.step == 20 and info.extra["averaged"] == [str(path) for path in paths]
    states = [model.state_dict() for model in models]
    for name, value in found.state_dict().items():
        expected = states[-1][name] if name == "count" else mean([state[name] for state in states], weights)
        torch.testing.assert_close(value, expected, rtol=1e-2 if value.dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_averages_in_the_state_of_the_optimizer(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ExponentialAverage(optimizer, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    average_checkpoints([tmp_path / "a.h5"], tmp_path / "ema.h5", state="ema")
    found = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    checkpoint.load(tmp_path / "ema.h5", model=found)
    for one, param in zip(found.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, optimizer.state[param]["ema"]) and not torch.equal(one, param)
    assert torch.equal(found[1].running_mean, model[1].running_mean)
    with pytest.raises(CheckpointMismatchError, match="the optimizer has no state 'other' of any parameter"):
        average_checkpoints([tmp_path / "a.h5"], tmp_path / "b.h5", state="other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1, 2]}, "there are 2 weights for 3 checkpoints"),
        ({"weights": [1, -1, 1]}, "must be numbers from 0 on"),
        ({"weights": [0, 0, 0]}, "not all 0"),
        ({"decay": 0}, "the decay must be above 0"),
        ({"decay": 0.5, "weights": [1, 1, 1]}, "not both"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, options, message):
    _, paths = write(tmp_path)
    with pytest.raises(UsageError, match=message):
        average_checkpoints(paths, tmp_path / "mean.h5", **options)
    assert not (tmp_path / "mean.h5").exists()


def test_files_that_do_not_fit(tmp_path):
    _, paths = write(tmp_path, 2)
    checkpoint.save(tmp_path / "other.h5", model=nn.Linear(3, 4))
    with pytest.raises(CheckpointMismatchError, match="average checkpoints of one model"):
        average_checkpoints([paths[0], tmp_path / "other.h5"], tmp_path / "mean.h5")
    with pytest.raises(CheckpointError, match="exists"):
        average_checkpoints(paths, paths[0])
    content = bytearray(paths[1].read_bytes())
    place = content.find(Mixed(1).wide.weight.detach().numpy().tobytes())
    content[place + 3] ^= 1
    paths[1].write_bytes(content)
    with pytest.raises(CheckpointCorruptError):
        average_checkpoints(paths, tmp_path / "mean.h5")
    assert not (tmp_path / "mean.h5").exists()
