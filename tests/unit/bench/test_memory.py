import torch
from torch import nn

from tests.bench import memory


def test_the_analytic_peak_is_a_share_of_the_state_two_units_a_gradient_and_activations():
    state = 4 * (10 + 30 + 20)
    assert memory.analytic_bytes([10, 30, 20], 2, 7, itemsize=1) == state // 2 + (30 + 20) + 30 + 7
    assert memory.analytic_bytes([10, 30, 20], None, 7, itemsize=1) == state + 7
    assert memory.analytic_bytes([10], 1, 0, itemsize=4) == 4 * (4 * 10 + 10 + 10)


def test_saved_bytes_count_activations_once_and_no_parameters():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    inputs = torch.randn(4, 3)
    # inputs for the weight of the first layer, the output of tanh for its own backward and for the second weight
    assert memory.saved_bytes(lambda: model(inputs).sum(), model) == 4 * (4 * 3 + 4 * 5)


def test_units_are_the_blocks_and_the_rest():
    *blocks, root = memory._unit_sizes(2, 16)
    block = 12 * 16 * 16 + 13 * 16
    assert blocks == [block, block]
    assert root == 256 * 16 * 2 + 64 * 16 + 2 * 16
