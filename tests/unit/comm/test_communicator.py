import pytest
import torch

from hpcfsdp.comm.communicator import accumulate_dtype


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int32, torch.int32),
    ],
)
def test_half_precision_is_summed_in_float32_and_others_in_their_own(dtype, wide):
    assert accumulate_dtype(dtype) == wide
