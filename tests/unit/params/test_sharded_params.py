import pytest
import torch

from hpcfsdp.params.sharded_params import Dtypes

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("kept", "param", "reduce", "keep_low", "expected"),
    [
        (F32, None, None, False, (F32, F32, F32, F32, F32)),
        (F32, None, None, True, (F32, F32, F32, F32, F32)),
        (F32, BF16, None, False, (F32, BF16, BF16, F32, F32)),
        (F32, BF16, None, True, (F32, BF16, BF16, F32, BF16)),
        (F32, BF16, F32, False, (F32, BF16, F32, F32, F32)),
        (F32, BF16, F32, True, (F32, BF16, F32, F32, F32)),
        (F32, None, F16, False, (F32, F32, F16, F32, F32)),
        (F32, None, F16, True, (F32, F32, F16, F32, F16)),
        (F32, BF16, F64, False, (F32, BF16, F64, F64, F32)),
        (BF16, None, None, False, (BF16, BF16, BF16, F32, BF16)),
        (BF16, None, F32, False, (BF16, BF16, F32, F32, BF16)),
        (F64, F16, None, False, (F64, F16, F16, F32, F64)),
        (F64, None, None, False, (F64, F64, F64, F64, F64)),
    ],
)
def test_each_dtype_is_chosen_apart_from_the_others(kept, param, reduce, keep_low, expected):
    found = Dtypes.plan(kept, param=param, reduce=reduce, keep_low_precision_grads=keep_low)
    assert found == Dtypes(*expected)


@pytest.mark.parametrize("kept", [torch.int64, torch.bool, torch.uint8, torch.complex64, torch.complex128])
def test_what_is_no_real_number_is_never_cast(kept):
    found = Dtypes.plan(kept, param=BF16, reduce=F16, keep_low_precision_grads=True)
    assert {found.param, found.compute, found.reduce, found.accumulate, found.grad} == {kept}
