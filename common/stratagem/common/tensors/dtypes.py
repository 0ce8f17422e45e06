"""The element types of the tensor stream, in one table.

Owns which types exist and what they are called by torch, on the wire and in safetensors files.
Must not import torch: the base install reads and writes streams without it.
"""

from dataclasses import dataclass
from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.v1 import tensor_pb2


@dataclass(frozen=True, slots=True)
class DTypeInfo:
    """The properties of one element type."""

    name: str
    """As torch spells it, without "torch."."""
    wire: tensor_pb2.DType.ValueType
    item_bytes: int
    safetensors: str
    is_floating: bool


DTYPES: Final = (
    DTypeInfo("float64", tensor_pb2.D_TYPE_FLOAT64, 8, "F64", True),
    DTypeInfo("float32", tensor_pb2.D_TYPE_FLOAT32, 4, "F32", True),
    DTypeInfo("float16", tensor_pb2.D_TYPE_FLOAT16, 2, "F16", True),
    DTypeInfo("bfloat16", tensor_pb2.D_TYPE_BFLOAT16, 2, "BF16", True),
    DTypeInfo("float8_e4m3fn", tensor_pb2.D_TYPE_FLOAT8_E4M3FN, 1, "F8_E4M3", True),
    DTypeInfo("float8_e5m2", tensor_pb2.D_TYPE_FLOAT8_E5M2, 1, "F8_E5M2", True),
    DTypeInfo("int64", tensor_pb2.D_TYPE_INT64, 8, "I64", False),
    DTypeInfo("int32", tensor_pb2.D_TYPE_INT32, 4, "I32", False),
    DTypeInfo("int16", tensor_pb2.D_TYPE_INT16, 2, "I16", False),
    DTypeInfo("int8", tensor_pb2.D_TYPE_INT8, 1, "I8", False),
    DTypeInfo("uint8", tensor_pb2.D_TYPE_UINT8, 1, "U8", False),
    DTypeInfo("bool", tensor_pb2.D_TYPE_BOOL, 1, "BOOL", False),
)

_BY_NAME: Final = {dtype.name: dtype for dtype in DTYPES}
_BY_WIRE: Final = {int(dtype.wire): dtype for dtype in DTYPES}
_BY_SAFETENSORS: Final = {dtype.safetensors: dtype for dtype in DTYPES}


def dtype_named(name: str, field: str = "dtype") -> DTypeInfo:
    """The type that torch calls `torch.<name>`. field: what a refusal is about."""
    if name not in _BY_NAME:
        raise InvalidInputError.at(field, f"{name!r} is not one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def dtype_on_wire(number: int, field: str = "dtype") -> DTypeInfo:
    """The type of a `DType` value of the protocol. field: what a refusal is about."""
    if number not in _BY_WIRE:
        raise InvalidInputError.at(field, f"{number} is no element type of this protocol version")
    return _BY_WIRE[number]


def dtype_in_safetensors(name: str, field: str = "dtype") -> DTypeInfo:
    """The type that a safetensors header calls `name`. field: what a refusal is about."""
    if name not in _BY_SAFETENSORS:
        raise InvalidInputError.at(field, f"{name!r} is not one of {', '.join(_BY_SAFETENSORS)}")
    return _BY_SAFETENSORS[name]
