"""Describe the content of a tensor stream: names, types, shapes and places, checked before anything
is allocated.

All arithmetic is in Python integers, so a header of a few bytes cannot cause an allocation by
overflow. The module must not import torch, and does not depend on files or gRPC.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from stratagem.common.base.errors import InvalidInputError, LimitError
from stratagem.v1 import tensor_pb2

# ---- Manifest ----

MAX_MANIFEST_BYTES: Final = 3 * 2**20  # a message is at most 4 MiB, and has other fields too
MAX_ELEMENTS: Final = 2**63 - 1
ALIAS_PREFIX: Final = "alias:"  # metadata keys that canonical files use for themselves
RESERVED_NAME: Final = "__metadata__"  # means something else in a safetensors header

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}|")


CONTROL: Final = "control/"
"""The name prefix of the control variates (SCAFFOLD) of a federation, in states and updates."""
WITHIN_NORM: Final = "within_norm"
"""The metadata key in a client's update: "1" if its norm was within the clipping norm."""
NUM_AVERAGED_KEY: Final = "average/num_averaged"
"""The metadata key for the number of states in a state's average of the parameters. A state with
the key and without tensors of an average has averages in place of the parameters."""


class Purpose(IntEnum):
    """The purpose of a tensor stream: what its tensors are for."""

    STATE = tensor_pb2.PURPOSE_STATE
    UPDATE = tensor_pb2.PURPOSE_UPDATE
    GRADIENTS = tensor_pb2.PURPOSE_GRADIENTS
    DATA = tensor_pb2.PURPOSE_DATA
    ACTIVATION = tensor_pb2.PURPOSE_ACTIVATION
    MESH = tensor_pb2.PURPOSE_MESH


CODECS: Final[Mapping[str, tensor_pb2.Codec.ValueType]] = {
    "": tensor_pb2.CODEC_UNSPECIFIED,
    "fp16": tensor_pb2.CODEC_FP16,
    "bf16": tensor_pb2.CODEC_BF16,
    "int8": tensor_pb2.CODEC_INT8,
    "int4": tensor_pb2.CODEC_INT4,
    "ternary": tensor_pb2.CODEC_TERNARY,
    "top_k": tensor_pb2.CODEC_TOP_K,
    "low_rank": tensor_pb2.CODEC_LOW_RANK,
    "vsa": tensor_pb2.CODEC_VSA,
}
"""The wire numbers of tensor codecs, keyed by their names in the job; "" is uncoded."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on the tensors and bytes that a receiver accepts."""

    max_tensors: int = 32768
    max_total_bytes: int = 64 * 2**30
    max_tensor_bytes: int = 32 * 2**30
    max_name_bytes: int = 256
    max_dims: int = 8
    max_metadata: int = 4096
    max_metadata_value_bytes: int = 64 * 2**10


DEFAULT_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The name, element type, shape and byte range of one tensor in a stream."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    alias_of: str | None = None
    """The name of an earlier tensor with the same storage, offset and size; None if none."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The header of a tensor stream. Its tensors are in order, without overlap or gaps."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    purpose: Purpose
    weight: float = 0.0
    activation_tag: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    codec: str = ""
    """The codec of the tensors, a key of CODECS; coded tensors are payloads of type uint8."""
    is_in_leaves: bool = False
    """The digest is of the state's list of leaves (`leaves.py`), not of its file."""

    def stored(self) -> tuple[TensorSpec, ...]:
        """Return the tensors whose bytes are in the stream (no aliases), ordered by offset."""
        return tuple(tensor for tensor in self.tensors if tensor.alias_of is None)


def build_manifest(
    named: Iterable[tuple[str, str, tuple[int, ...]]],
    purpose: Purpose,
    *,
    aliases: Mapping[str, str] | None = None,
    weight: float = 0.0,
    activation_tag: int = 0,
    metadata: Mapping[str, str] | None = None,
    codec: str = "",
) -> Manifest:
    """Make a manifest of (name, dtype, shape) in the given order; `aliases` maps name -> earlier
    name. Raises InvalidInputError if the result would break a rule that every receiver checks."""
    aliases = aliases or {}
    specs: list[TensorSpec] = []
    by_name: dict[str, TensorSpec] = {}
    end = 0
    for name, dtype, shape in named:
        source = aliases.get(name)
        size = math.prod(shape) * dtype_named(dtype, name).item_bytes
        if source is None:
            spec = TensorSpec(name, dtype, tuple(shape), end, size)
            end += size
        else:
            start = by_name[source].offset if source in by_name else end
            spec = TensorSpec(name, dtype, tuple(shape), start, size, source)
        specs.append(spec)
        by_name[name] = spec
    manifest = Manifest(
        tuple(specs), end, purpose, weight, activation_tag, dict(metadata or {}), codec=codec
    )
    check(manifest, Limits(max_total_bytes=MAX_ELEMENTS, max_tensor_bytes=MAX_ELEMENTS))
    return manifest


def check(manifest: Manifest, limits: Limits) -> None:
    """Raise InvalidInputError if a manifest breaks a rule, LimitError if it exceeds a limit."""
    _check_counts(manifest, limits)
    _check_values(manifest)
    by_name: dict[str, TensorSpec] = {}
    end = 0
    for index, spec in enumerate(manifest.tensors):
        _check_name(f"tensors[{index}].name", spec.name, limits)
        if spec.name in by_name:
            raise InvalidInputError.at(f"tensors[{index}].name", f"{spec.name!r} stands twice")
        _check_size(f"tensors[{index}]", spec, limits)
        if spec.alias_of is None:
            end = _check_place(f"tensors[{index}].offset", spec, end)
        else:
            _check_alias(f"tensors[{index}].alias_of", spec, by_name.get(spec.alias_of))
        by_name[spec.name] = spec
    if manifest.total_bytes != end:
        raise InvalidInputError.at(
            "total_bytes", f"{manifest.total_bytes} announced, but the last tensor ends at {end}"
        )


def _check_counts(manifest: Manifest, limits: Limits) -> None:
    for what, value, limit in (
        ("tensors", len(manifest.tensors), limits.max_tensors),
        ("total_bytes", manifest.total_bytes, limits.max_total_bytes),
        ("metadata entries", len(manifest.metadata), limits.max_metadata),
    ):
        if value > limit:
            raise LimitError(f"{what}: {value} is over the limit of {limit}")
    for key, text in manifest.metadata.items():
        if not key or key.startswith(ALIAS_PREFIX) or _CONTROL.search(key):
            raise InvalidInputError.at("metadata", f"key {key[:80]!r} is not allowed")
        if len(key.encode()) > limits.max_name_bytes:
            raise LimitError(f"metadata key: over the limit of {limits.max_name_bytes} bytes")
        if len(text.encode()) > limits.max_metadata_value_bytes:
            raise LimitError(
                f"metadata value of {key!r}: over the limit of "
                f"{limits.max_metadata_value_bytes} bytes"
            )


def _check_values(manifest: Manifest) -> None:
    if not (math.isfinite(manifest.weight) and manifest.weight >= 0):
        raise InvalidInputError.at("weight", f"{manifest.weight} is not a finite number >= 0")
    if not 0 <= manifest.activation_tag < 2**32:
        raise InvalidInputError.at("activation_tag", f"{manifest.activation_tag} is no uint32")
    if not _DIGEST.fullmatch(manifest.digest):
        raise InvalidInputError.at("digest", "is neither empty nor 64 lower-case hex digits")


def _check_name(where: str, name: str, limits: Limits) -> None:
    if len(name) > limits.max_name_bytes:  # before anything reads it
        raise LimitError(f"{where}: over the limit of {limits.max_name_bytes} bytes")
    if not name or _CONTROL.search(name) or name == RESERVED_NAME:
        raise InvalidInputError.at(where, f"{name!r} is empty, reserved or has control characters")
    if len(name.encode()) > limits.max_name_bytes:
        raise LimitError(f"{where}: over the limit of {limits.max_name_bytes} bytes")


def _check_size(where: str, spec: TensorSpec, limits: Limits) -> None:
    if len(spec.shape) > limits.max_dims:
        raise LimitError(
            f"{where}.shape: {len(spec.shape)} dimensions, the limit is {limits.max_dims}"
        )
    if any(dim < 0 for dim in spec.shape):
        raise InvalidInputError.at(f"{where}.shape", f"{spec.shape} has a negative dimension")
    item_bytes = dtype_named(spec.dtype, f"{where}.dtype").item_bytes
    # Dimensions of 0 hide the others from the product, but not from code that computes strides.
    if math.prod(max(dim, 1) for dim in spec.shape) * item_bytes > MAX_ELEMENTS:
        raise LimitError(f"{where}.shape: {spec.shape} is beyond any address space")
    size = math.prod(spec.shape) * item_bytes
    if size != spec.size_bytes:
        raise InvalidInputError.at(
            f"{where}.size_bytes",
            f"{spec.size_bytes} announced, but {spec.dtype} {spec.shape} has {size}",
        )
    if size > limits.max_tensor_bytes:
        raise LimitError(f"{where}.size_bytes: {size}, the limit is {limits.max_tensor_bytes}")


def _check_place(where: str, spec: TensorSpec, end: int) -> int:
    if spec.offset != end:
        kind = "overlaps the tensor before it" if spec.offset < end else "leaves a gap"
        raise InvalidInputError.at(where, f"{spec.offset} {kind}; must be {end}")
    return end + spec.size_bytes


def _check_alias(where: str, spec: TensorSpec, source: TensorSpec | None) -> None:
    if source is None or source.alias_of is not None:
        raise InvalidInputError.at(where, f"{spec.alias_of!r} is no earlier tensor of its own")
    if (spec.dtype, spec.shape, spec.offset) != (source.dtype, source.shape, source.offset):
        raise InvalidInputError.at(
            where, f"dtype, shape or offset differ from those of {spec.alias_of!r}"
        )


def to_proto(manifest: Manifest) -> tensor_pb2.Manifest:
    """Encode a manifest as its protobuf message. Raises LimitError if it is too large."""
    message = tensor_pb2.Manifest(
        tensors=[
            tensor_pb2.TensorSpec(
                name=tensor.name,
                dtype=dtype_named(tensor.dtype).wire,
                shape=tensor.shape,
                offset=tensor.offset,
                size_bytes=tensor.size_bytes,
                alias_of=tensor.alias_of or "",
            )
            for tensor in manifest.tensors
        ],
        total_bytes=manifest.total_bytes,
        purpose=tensor_pb2.Purpose.ValueType(int(manifest.purpose)),
        weight=manifest.weight,
        activation_tag=manifest.activation_tag,
        metadata=manifest.metadata,
        digest=manifest.digest,
        codec=CODECS[manifest.codec],
        in_leaves=manifest.is_in_leaves,
    )
    if message.ByteSize() > MAX_MANIFEST_BYTES:
        raise LimitError(
            f"manifest: {message.ByteSize()} bytes are over the limit of {MAX_MANIFEST_BYTES}; "
            f"use fewer tensors, or shorter names"
        )
    return message


def from_proto(
    message: tensor_pb2.Manifest,
    limits: Limits = DEFAULT_LIMITS,
    purpose: Purpose | None = None,
    codecs: Collection[str] = ("",),
) -> Manifest:
    """Decode and check a manifest; `purpose` is the only one accepted, if given, and the codec must
    be one of `codecs`."""
    if len(message.tensors) > limits.max_tensors:  # before any is parsed
        raise LimitError(f"tensors: {len(message.tensors)}, the limit is {limits.max_tensors}")
    codec = next((name for name in codecs if CODECS[name] == message.codec), None)
    if codec is None:
        raise InvalidInputError.at("codec", f"{message.codec} is not expected here")
    manifest = Manifest(
        tensors=tuple(
            TensorSpec(
                tensor.name,
                dtype_on_wire(tensor.dtype, f"tensors[{i}].dtype").name,
                tuple(tensor.shape),
                tensor.offset,
                tensor.size_bytes,
                tensor.alias_of or None,
            )
            for i, tensor in enumerate(message.tensors)
        ),
        total_bytes=message.total_bytes,
        purpose=_purpose(message.purpose, purpose),
        weight=message.weight,
        activation_tag=message.activation_tag,
        metadata=dict(message.metadata),
        digest=message.digest,
        codec=codec,
        is_in_leaves=message.in_leaves,
    )
    check(manifest, limits)
    return manifest


def _purpose(number: int, wanted: Purpose | None) -> Purpose:
    purposes = {int(purpose): purpose for purpose in Purpose}
    if number not in purposes or wanted not in (None, purposes[number]):
        allowed = [wanted] if wanted else list(Purpose)
        names = ", ".join(purpose.name for purpose in allowed)
        raise InvalidInputError.at("purpose", f"{number} is not accepted here; allowed: {names}")
    return purposes[number]


# ---- Element types ----
#
# One table has the element types of the tensor stream, with their names in torch, on the wire and
# in safetensors files. It must not import torch, without which the base install reads and writes
# streams.


@dataclass(frozen=True, slots=True)
class DTypeInfo:
    """An element type: its names and size in torch, safetensors and the protocol."""

    name: str
    """The element type's name in torch, without "torch."."""
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
    """Look up an element type by torch's name for it. field: the field named in an error."""
    if name not in _BY_NAME:
        raise InvalidInputError.at(field, f"{name!r} is not one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def dtype_on_wire(number: int, field: str = "dtype") -> DTypeInfo:
    """Look up an element type by its protocol number. field: the field named in an error."""
    if number not in _BY_WIRE:
        raise InvalidInputError.at(field, f"{number} is no element type of this protocol version")
    return _BY_WIRE[number]


def dtype_in_safetensors(name: str, field: str = "dtype") -> DTypeInfo:
    """Look up an element type by its name in safetensors. field: the field named in an error."""
    if name not in _BY_SAFETENSORS:
        raise InvalidInputError.at(field, f"{name!r} is not one of {', '.join(_BY_SAFETENSORS)}")
    return _BY_SAFETENSORS[name]
