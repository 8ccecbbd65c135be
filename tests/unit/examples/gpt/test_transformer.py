import math

import pytest
import torch

from hpcfsdp.examples.gpt.run_config import ModelConfig
from hpcfsdp.examples.gpt.transformer import GPT, VOCABULARY, Attention, count_elements, own_random_numbers

SMALL = ModelConfig(layers=2, width=16, heads=4, context=12)


def make(config=SMALL):
    torch.manual_seed(0)
    return GPT(config)


def test_logits_are_one_row_of_256_for_each_byte():
    for length in (1, 7, 12):
        assert make()(torch.zeros(3, length, dtype=torch.int64)).shape == (3, length, VOCABULARY)


def test_a_prediction_does_not_see_later_bytes():
    model = make()
    ids = torch.randint(256, (2, 12))
    other = ids.clone()
    other[:, 7:] = torch.randint(256, (2, 5))
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[:, :7], model(other)[:, :7])
        assert not torch.allclose(model(ids)[:, 7:], model(other)[:, 7:])


def test_a_prediction_sees_all_earlier_bytes():
    model = make()
    ids = torch.randint(256, (1, 12))
    with torch.no_grad():
        last = model(ids)[0, -1]
        for place in range(12):
            other = ids.clone()
            other[0, place] = (other[0, place] + 1) % 256
            assert not torch.equal(model(other)[0, -1], last)


def test_embedding_and_head_are_tied():
    model = make()
    assert model.head.weight is model.embed.weight


def test_a_new_model_predicts_about_uniformly():
    model = make()
    ids, targets = torch.randint(256, (2, 8, 12))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_every_parameter_gets_a_gradient():
    model = make()
    model(torch.randint(256, (2, 12))).sum().backward()
    assert [name for name, param in model.named_parameters() if param.grad is None] == []


def test_dropout_acts_in_training_alone():
    model = make(ModelConfig(layers=1, width=16, heads=2, context=8, dropout=0.5))
    ids = torch.randint(256, (2, 8))
    with torch.no_grad():
        assert not torch.equal(model(ids), model(ids))
        model.eval()
        assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("config", [SMALL, ModelConfig(layers=1, width=8, heads=1, context=3)])
def test_elements_are_counted_without_making_the_model(config):
    assert count_elements(config) == sum(param.numel() for param in GPT(config).parameters())


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_rank_s_rows_of_qkv_are_whole_heads(parts):
    """The heads of several parts of the rows, each merged by its own columns, sum up to the output of all heads."""
    torch.manual_seed(0)
    whole, width = Attention(SMALL), SMALL.width
    x = torch.randn(2, 12, width)
    total = whole.merge.bias.expand(2, 12, width)
    for part in range(parts):
        own = Attention(SMALL)
        rows, columns = 3 * width // parts, width // parts
        own.qkv.weight = torch.nn.Parameter(whole.qkv.weight[part * rows : (part + 1) * rows])
        own.qkv.bias = torch.nn.Parameter(whole.qkv.bias[part * rows : (part + 1) * rows])
        own.merge.weight = torch.nn.Parameter(whole.merge.weight[:, part * columns : (part + 1) * columns])
        own.merge.bias = None
        total = total + own(x)
    torch.testing.assert_close(total, whole(x))


CPU = torch.device("cpu")


def drawn(tensor_rank):
    """Numbers from before, within and after a context of one of the ranks."""
    torch.manual_seed(5)
    before = torch.rand(3)
    with own_random_numbers(tensor_rank, CPU):
        within = torch.rand(3)
    return before, within, torch.rand(3)


def test_ranks_draw_their_own_numbers_within_the_context_and_the_same_around_it():
    first, second, again = drawn(0), drawn(1), drawn(0)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_numbers_differ_from_context_to_context():
    torch.manual_seed(5)
    seen = []
    for _ in range(2):
        with own_random_numbers(0, CPU):
            seen.append(torch.rand(3))
    assert not torch.equal(*seen)


def test_without_a_rank_numbers_go_on_as_if_there_were_no_context():
    torch.manual_seed(5)
    expected = torch.rand(9)
    assert torch.equal(torch.cat(drawn(None)), expected)


def test_dropout_of_tensor_parallel_attention_differs_by_rank():
    torch.manual_seed(0)
    attention, x = Attention(ModelConfig(width=16, heads=4, context=8, dropout=0.5)), torch.randn(1, 8, 16)
    outputs = {}
    for rank in (None, 0, 1):
        attention.tensor_rank = rank
        torch.manual_seed(1)
        outputs[rank] = attention(x)
    assert not torch.equal(outputs[0], outputs[1])
    attention.eval()
    with torch.no_grad():
        state = torch.get_rng_state()
        attention(x)
    assert torch.equal(torch.get_rng_state(), state)  # no dropout draws no numbers
