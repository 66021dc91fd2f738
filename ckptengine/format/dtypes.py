"""The dtypes that can be stored, by torch's names, without importing torch.

`legacy` is the storage class that `torch.load` of every version knows; dtypes without one are
rebuilt by `_rebuild_tensor_v3` from an untyped storage.
"""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    itemsize: int  # bytes an element
    legacy: str | None


DTYPES = {
    "float64": DType(8, "DoubleStorage"),
    "float32": DType(4, "FloatStorage"),
    "float16": DType(2, "HalfStorage"),
    "bfloat16": DType(2, "BFloat16Storage"),
    "int64": DType(8, "LongStorage"),
    "int32": DType(4, "IntStorage"),
    "int16": DType(2, "ShortStorage"),
    "int8": DType(1, "CharStorage"),
    "uint8": DType(1, "ByteStorage"),
    "bool": DType(1, "BoolStorage"),
    "complex64": DType(8, "ComplexFloatStorage"),
    "complex128": DType(16, "ComplexDoubleStorage"),
    "complex32": DType(4, None),
    "uint64": DType(8, None),
    "uint32": DType(4, None),
    "uint16": DType(2, None),
    "float8_e4m3fn": DType(1, None),
    "float8_e4m3fnuz": DType(1, None),
    "float8_e5m2": DType(1, None),
    "float8_e5m2fnuz": DType(1, None),
    "float8_e8m0fnu": DType(1, None),
    "float4_e2m1fn_x2": DType(1, None),
}
