import math

import numpy as np
import pytest
import torch

from hpcfsdp.checkpoint.inspect.numbers import decoded, json_number

FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_code_of_an_8_bit_float_is_what_torch_says(dtype):
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(getattr(torch, dtype)).float().numpy()
    found = decoded(codes, dtype)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))


def test_every_code_of_bfloat16_is_what_torch_says():
    codes = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(codes.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(decoded(codes, "bfloat16"), expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (np.float32(0.5), 0.5),
        (math.nan, "nan"),
        (np.float64(-math.inf), "-inf"),
        (np.complex64(1 + 2j), "(1+2j)"),
        (None, None),
    ],
)
def test_numbers_for_json(value, expected):
    found = json_number(value)
    assert (found, type(found)) == (expected, type(expected))
