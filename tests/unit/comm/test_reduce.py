import functools

import pytest
import torch

from hpcfsdp.comm import reduce
from hpcfsdp.comm.reduce import Reduction, accumulate_dtype, reduce_into, refuse_op

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]
SIGNED = [torch.int64, torch.int32, torch.int16, torch.int8]
UNSIGNED = [torch.uint64, torch.uint32, torch.uint16, torch.uint8]
DTYPES = [*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool]
OPS = ["sum", "average", "product", "min", "max", "band", "bor", "bxor"]


def sources(dtype, numel, count=3):
    """Small numbers of both signs, exact in every dtype, and in every sum and product of three of them."""
    generator = torch.Generator().manual_seed(count * 1000 + numel)
    made = []
    for _ in range(count):
        values = torch.randint(0 if dtype in UNSIGNED else -2, 3, (numel,), generator=generator)
        if dtype.is_complex:
            values = torch.complex(values.double(), values.flip(0).double())
        made.append(values.to(dtype))
    return made


def fold(op, values):
    """One element by Python's own arithmetic."""
    if isinstance(values[0], bool):
        whole = {"sum": any, "max": any, "bor": any, "product": all, "min": all, "band": all}
        return whole[op](values) if op in whole else sum(values) % 2 == 1
    two = {
        "sum": lambda a, b: a + b,
        "average": lambda a, b: a + b,
        "product": lambda a, b: a * b,
        "min": min,
        "max": max,
        "band": lambda a, b: a & b,
        "bor": lambda a, b: a | b,
        "bxor": lambda a, b: a ^ b,
    }[op]
    return functools.reduce(two, values)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_agrees_with_pythons_arithmetic(monkeypatch, dtype, op):
    if refuse_op(op, dtype):
        return
    monkeypatch.setattr(reduce, "_CHUNK_NUMEL", 4)
    given = sources(dtype, 11)
    output = torch.empty(11, dtype=dtype)
    reduce_into(output, given, op, accumulate_dtype(dtype))
    expected = [fold(op, values) for values in zip(*(source.tolist() for source in given), strict=True)]
    assert output.tolist() == expected
    assert all(torch.equal(source, again) for source, again in zip(given, sources(dtype, 11), strict=True))


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
@pytest.mark.parametrize("op", ["sum", "product"])
def test_whole_numbers_wrap_around_as_they_do_in_their_dtype(dtype, op):
    largest, bits = torch.iinfo(dtype).max, torch.iinfo(dtype).bits
    output = torch.empty(2, dtype=dtype)
    reduce_into(output, [torch.tensor([largest, 3], dtype=dtype)] * 3, op, accumulate_dtype(dtype))
    expected = [3 * largest, 9] if op == "sum" else [largest**3, 27]
    assert [value % 2**bits for value in output.tolist()] == [value % 2**bits for value in expected]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint16, torch.bool], ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_the_output_may_be_any_of_the_sources(monkeypatch, place, dtype, op):
    monkeypatch.setattr(reduce, "_CHUNK_NUMEL", 3)
    apart, given = torch.empty(8, dtype=dtype), sources(dtype, 8, 4)
    reduce_into(apart, given, op, accumulate_dtype(dtype))
    reduce_into(given[place], given, op, accumulate_dtype(dtype))
    assert torch.equal(given[place], apart)


@pytest.mark.parametrize("numel", [1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_long_tensors_are_reduced_to_their_last_element(numel, dtype):
    given = sources(dtype, numel)
    output = torch.full((numel,), -1.0, dtype=dtype)
    reduce_into(output, given, "sum", torch.float32)
    assert torch.equal(output.float(), given[0].float() + given[1].float() + given[2].float())


def test_nothing_is_reduced_to_nothing():
    reduce_into(torch.empty(0), [torch.empty(0), torch.empty(0)], "sum", torch.float32, divisor=2)


@pytest.mark.parametrize("divisor", [1, 4])
def test_a_single_source_is_copied_and_divided(divisor):
    source, output = torch.tensor([2.0, -6.0]), torch.empty(2)
    reduce_into(output, [source], "average", torch.float32, divisor=divisor)
    assert output.tolist() == [2.0 / divisor, -6.0 / divisor]
    assert source.tolist() == [2.0, -6.0]
    reduce_into(source, [source], "average", torch.float32, divisor=divisor)
    assert torch.equal(source, output)


def test_the_total_is_rounded_once_at_the_end():
    # 256 + 1 is 256 in bfloat16: rounded after each addition, the ones would vanish.
    given = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    output = torch.empty(1, dtype=torch.bfloat16)
    reduce_into(output, given, "sum", torch.float32)
    assert output.item() == 258.0
    reduce_into(output, given, "sum", torch.bfloat16)
    assert output.item() == 256.0


def test_the_result_may_be_kept_in_a_wider_dtype():
    given = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0)]
    output = torch.empty(1)
    reduce_into(output, given, "average", torch.float32, divisor=2)
    assert output.item() == 128.5


def test_sources_may_differ_in_dtype():
    output = torch.empty(1, dtype=torch.float64)
    given = [torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([2.25])]
    reduce_into(output, given, "sum", torch.float64)
    assert output.item() == 3.75


@pytest.mark.parametrize("op", ["min", "max"])
def test_a_nan_is_kept_by_minimum_and_maximum(op):
    output = torch.empty(2)
    reduce_into(output, [torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 2.0])], op, torch.float32)
    assert output.isnan().all()


def test_no_graph_is_recorded():
    source = torch.ones(3, requires_grad=True)
    output = torch.empty(3)
    reduce_into(output, [source, source], "sum", torch.float32)
    assert not output.requires_grad


def test_only_an_average_is_divided_by_the_number_of_ranks():
    assert [Reduction(op, torch.float32, 8).divisor for op in OPS] == [1, 8, 1, 1, 1, 1, 1, 1]


def test_averages_of_integers_are_rounded_towards_zero():
    output = torch.empty(3, dtype=torch.int32)
    reduce_into(output, list(torch.tensor([[-3, 3, -4], [0, 0, 0]])), "average", torch.int64, divisor=2)
    assert output.tolist() == [-1, 1, -2]
