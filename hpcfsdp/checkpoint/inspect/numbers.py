"""Elements of tensors as numpy numbers. Pure."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np


def decoded(block: np.ndarray, dtype: str) -> np.ndarray:
    """Decodes elements from ``BlockReader.read``, by torch's name of their dtype.

    bfloat16 and 8-bit floats become float32, which has all of their values; other dtypes stay, bool as uint8.
    """
    if dtype == "bfloat16":
        return (block.astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("float8"):
        return _float8_values(dtype)[block]
    return block


def json_number(value: Any) -> Any:
    """A number for JSON: not finite or complex ones as text."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


# exponent bits, mantissa bits, bias; then which codes are no finite numbers, see below
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}


@functools.cache
def _float8_values(dtype: str) -> np.ndarray:
    """The values of all 256 codes of an 8-bit float, float32.

    e5m2 follows IEEE 754. "fn" has no infinity: all bits set is NaN, and no other code is. "uz" has no negative zero
    either: its code is the only NaN. e8m0fnu is a power of two without a sign.
    """
    codes = np.arange(256)
    if dtype == "float8_e8m0fnu":
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)).astype(np.float32)
    exponent_bits, mantissa_bits, bias = _FLOAT8[dtype]
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    significand = mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)
    values = sign * np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    if dtype.endswith("uz"):
        values[0x80] = np.nan
    elif dtype.endswith("fn"):
        values[[0x7F, 0xFF]] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    return values.astype(np.float32)
