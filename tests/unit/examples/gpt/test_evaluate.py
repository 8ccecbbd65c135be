import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import DataError
from hpcfsdp.examples.gpt.data import Corpus, Span
from hpcfsdp.examples.gpt.evaluate import evaluate
from hpcfsdp.examples.gpt.parallel import Share


class Uniform(nn.Module):
    """Predicts every byte with the same probability."""

    def forward(self, ids):
        return torch.zeros(*ids.shape, 256)


class Copying(nn.Module):
    """Predicts the same byte again, with probability near one."""

    def forward(self, ids):
        return 50.0 * nn.functional.one_hot(ids, 256).float()


@pytest.fixture
def corpus(tmp_path):
    """``corpus(content)``: a corpus of one file."""
    opened = []

    def make(content):
        path = tmp_path / f"{len(opened)}"
        path.write_bytes(content)
        opened.append(Corpus([Span(str(path), 0, len(content))]))
        return opened[-1]

    yield make
    for entry in opened:
        entry.close()


def world_of(comm):
    """A world as the evaluation uses it: a communicator and a device."""
    return SimpleNamespace(communicator=comm, device=torch.device("cpu"))


def run(model, corpus, context=8, num_bytes=1000, comm=None, copies=1):
    comm = comm or FakeCommunicator()
    share = Share(comm.rank // copies, comm.size // copies, copies)
    return evaluate(model, world_of(comm), share, corpus, context, num_bytes)


def test_a_uniform_model_needs_8_bits_for_a_byte(corpus):
    assert run(Uniform(), corpus(bytes(range(200)))).bits_per_byte == pytest.approx(8)


def test_a_perfect_model_needs_no_bits(corpus):
    result = run(Copying(), corpus(b"a" * 100))
    assert result.bits_per_byte == pytest.approx(0, abs=1e-6)
    assert result.unigram_bits_per_byte == pytest.approx(0)


def test_the_baseline_is_the_entropy_of_the_predicted_bytes(corpus):
    content = b"abab" * 25 + b"cccc" * 10
    result = run(Uniform(), corpus(content), context=len(content) - 1)
    counts = np.bincount(np.frombuffer(content[1:], np.uint8))
    chances = counts[counts > 0] / counts.sum()
    assert result.predicted_bytes == len(content) - 1
    assert result.unigram_bits_per_byte == pytest.approx(-(chances * np.log2(chances)).sum())


@pytest.mark.parametrize(("num_bytes", "predicted"), [(1, 8), (8, 8), (16, 16), (17, 16), (10_000, 88)])
def test_about_the_wanted_number_of_bytes_is_predicted(corpus, num_bytes, predicted):
    assert run(Uniform(), corpus(bytes(100)), num_bytes=num_bytes).predicted_bytes == predicted


def test_a_corpus_shorter_than_the_context_is_one_window(corpus):
    assert run(Uniform(), corpus(bytes(5)), context=100).predicted_bytes == 4


@pytest.mark.parametrize("length", [0, 1])
def test_a_corpus_of_less_than_two_bytes_is_refused(corpus, length):
    with pytest.raises(DataError) as caught:
        run(Uniform(), corpus(bytes(length)))
    assert str(caught.value) == (
        f"the held-out part has {length} byte(s); two are needed to predict one: give more data"
    )


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_evaluated_in_eval_mode_and_its_mode_is_restored(corpus, training):
    seen = []

    class Watching(Uniform):
        def forward(self, ids):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(ids)

    model = Watching().train(training)
    run(model, corpus(bytes(30)))
    assert set(seen) == {(False, False)}
    assert model.training is training


@pytest.mark.parametrize(("ranks", "copies", "expected_calls"), [(3, 1, 2), (4, 2, 3), (3, 3, 5)])
def test_any_number_of_ranks_gets_the_same_result_in_the_same_number_of_calls(
    corpus, run_ranks, tmp_path, ranks, copies, expected_calls
):
    content = bytes(np.random.default_rng(0).integers(0, 60, 700, dtype=np.uint8))
    alone = run(Copying(), corpus(content))

    def body(comm):
        calls = []

        class Counting(Copying):
            def forward(self, ids):
                calls.append(1)
                return super().forward(ids)

        own = Corpus([Span(str(tmp_path / "0"), 0, len(content))])
        try:
            return run(Counting(), own, comm=comm, copies=copies), len(calls)
        finally:
            own.close()

    results = run_ranks(ranks, body)
    assert [calls for _, calls in results] == [expected_calls] * ranks
    for result, _ in results:
        assert result.predicted_bytes == alone.predicted_bytes
        assert math.isclose(result.bits_per_byte, alone.bits_per_byte, rel_tol=1e-6)
        assert result.unigram_bits_per_byte == alone.unigram_bits_per_byte
