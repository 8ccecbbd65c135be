import math

import pytest
import torch

from hpcfsdp.train.config import ModelConfig
from hpcfsdp.train.model import GPT, VOCABULARY, count_elements

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


def test_a_new_model_knows_nothing():
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
