"""A codec is a pure function from tensors and explicit state to bytes, and back.

A codec is made for a layout (names and shapes), from which the size of its payload follows, so a
receiver allocates before the first byte. Tensors are flat float32 arrays in the order of the
layout. The module depends on neither torch nor the network.

    Codec         all tensors of one shard at once; may keep state
    TensorCodec   one tensor, without state; `PerTensor` makes a Codec of them
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from stratagem.common.numerics.keys import derive

# ---- Codecs ----

FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
State = Mapping[str, FloatArray]
"""The state of a codec between payloads: float32 arrays keyed by `<kind>/<tensor name>`."""

Read = Callable[[int, int, str], NDArray[Any]]
"""A function that reads elements of a payload, in memory or in a file, given the offset of the
first byte, the number of elements and their type."""

Decode = Callable[[int, int], FloatArray]
"""A function that decodes the elements [start, stop), a window, of one tensor. Windows are
requested in order, once, without gaps. Raises ValueError for bytes that no encoder makes."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The name and shape of one tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def raw_bytes(self) -> int:
        """Return the size in bytes of the tensor as uncoded float32."""
        return 4 * self.numel


Layout = Sequence[TensorLayout]


class Codec(Protocol):
    """An encoder and decoder of the tensors of one layout. Every method is thread-safe."""

    @property
    def payload_bytes(self) -> int:
        """Return the size of a payload, metadata included; the layout alone determines it."""

    @property
    def bypassed(self) -> tuple[str, ...]:
        """Return the names of the tensors that are sent uncoded, since coding saves nothing."""

    def initial_state(self) -> State:
        """Return the codec's state before the first payload; empty for a stateless codec."""

    def encode(
        self, tensors: Sequence[FloatArray], state: State, key: int
    ) -> tuple[ByteArray, State]:
        """Return the payload of the tensors and the state after it; the arguments are not modified.

        key: 32 bits, different for each payload; random choices follow from it. Raises
        NonFiniteError, because a NaN would never leave a residual.
        """

    def decode(self, payload: ByteArray, key: int) -> list[FloatArray]:
        """Decode a payload that was encoded with the same key; return the tensors."""

    def part(self, places: range) -> "Codec | None":
        """Return a codec for this consecutive part of the tensors, with the same bits: the payloads
        of all parts, concatenated, are the whole payload, and each part keeps the state of its own
        tensors. None if the codec mixes tensors in its payload."""

    def decoder(self, place: int, read: Read) -> Decode | None:
        """Return a decoder for the tensor at this index of the layout; it gives the same bits as
        `decode`, but reads only the part of the payload that a window of elements needs. None if
        the codec mixes tensors in its payload."""


class Decodable(Protocol):
    """The decoding half of a tensor codec: the size of one tensor's payload, and its decoder."""

    @property
    def payload_bytes(self) -> int: ...

    def decoder(self, read: Read) -> Decode: ...


class TensorCodec(Decodable, Protocol):
    """A stateless encoder and decoder of one tensor of known size."""

    def encode(self, x: FloatArray, seed: int) -> ByteArray:
        """Encode x, which is flat, finite and not modified; return its payload."""


class NonFiniteError(ValueError):
    """A tensor holds a NaN or an infinity; `name` says which tensor."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name} has values that are not finite")


def check_finite(layout: Layout, tensors: Sequence[FloatArray]) -> None:
    """Raise NonFiniteError for a NaN or infinity, ValueError if tensors do not fit the layout."""
    for spec, tensor in zip(layout, tensors, strict=True):
        if tensor.shape != (spec.numel,) or tensor.dtype != np.float32:
            raise ValueError(
                f"{spec.name} is {tensor.dtype} {tensor.shape}, expected float32 ({spec.numel},)"
            )
        if not np.isfinite(tensor).all():
            raise NonFiniteError(spec.name)


class Plain:
    """The codec that does not compress: float32, little endian."""

    def __init__(self, numel: int) -> None:
        self.payload_bytes = 4 * numel

    def encode(self, x: FloatArray, seed: int) -> ByteArray:
        del seed
        return to_bytes(x)

    def decoder(self, read: Read) -> Decode:
        def window(start: int, stop: int) -> FloatArray:
            return read(4 * start, stop - start, "<f4").astype(np.float32)

        return window


class OneByOne:
    """Base of codecs that encode each tensor by itself and concatenate the tensors' payloads."""

    def __init__(self, layout: Layout, pieces: Sequence[Decodable]) -> None:
        self._layout, self._pieces = layout, pieces
        self._starts = [0, *itertools.accumulate(piece.payload_bytes for piece in pieces)]
        self.payload_bytes = self._starts[-1]

    def decode(self, payload: ByteArray, key: int) -> list[FloatArray]:
        del key
        _check_size(payload, self.payload_bytes)
        read = in_memory(payload)
        return [self.decoder(at, read)(0, spec.numel) for at, spec in enumerate(self._layout)]

    def decoder(self, place: int, read: Read) -> Decode:
        start = self._starts[place]
        return self._pieces[place].decoder(lambda at, num, dtype: read(start + at, num, dtype))


class PerTensor(OneByOne):
    """A codec that encodes each tensor by its own codec, or not at all if that saves nothing."""

    def __init__(self, layout: Layout, codecs: Sequence[TensorCodec], *, first: int = 0) -> None:
        """Decide which tensors to encode. first: the index, in the layout of all tensors, of the
        first tensor of this layout, which may be a part of it."""
        self._first = first
        self.bypassed = tuple(
            spec.name
            for spec, codec in zip(layout, codecs, strict=True)
            if spec.numel and codec.payload_bytes >= spec.raw_bytes
        )
        self._codecs = [
            Plain(spec.numel) if codec.payload_bytes >= spec.raw_bytes else codec
            for spec, codec in zip(layout, codecs, strict=True)
        ]
        super().__init__(layout, self._codecs)

    def initial_state(self) -> State:
        return {}

    def encode(
        self, tensors: Sequence[FloatArray], state: State, key: int
    ) -> tuple[ByteArray, State]:
        check_finite(self._layout, tensors)
        parts = [
            codec.encode(tensor, derive(key, place))
            for place, (codec, tensor) in enumerate(
                zip(self._codecs, tensors, strict=True), self._first
            )
        ]
        return joined(parts), state

    def part(self, places: range) -> "PerTensor":
        cut = slice(places.start, places.stop)
        first = self._first + places.start
        return PerTensor(self._layout[cut], self._codecs[cut], first=first)


def to_bytes(values: NDArray[np.generic]) -> ByteArray:
    """Copy the values into little-endian bytes."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return np.frombuffer(little.tobytes(), np.uint8)


def from_bytes(payload: ByteArray, dtype: str) -> NDArray[Any]:
    """Return the bytes, at any address, as a view with elements of this type."""
    return np.ascontiguousarray(payload).view(dtype)


def in_memory(payload: ByteArray) -> Read:
    """Return a function of type `Read` that reads from a payload held in memory."""

    def read(offset: int, num: int, dtype: str) -> NDArray[Any]:
        return from_bytes(payload[offset : offset + num * np.dtype(dtype).itemsize], dtype)

    return read


def joined(parts: Sequence[ByteArray]) -> ByteArray:
    """Concatenate the arrays into one byte array."""
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def split(payload: ByteArray, sizes: Sequence[int]) -> list[ByteArray]:
    """Split a payload that `joined` made into parts. Raises ValueError unless sizes add up."""
    _check_size(payload, sum(sizes))
    ends = np.cumsum([0, *sizes])
    return [payload[a:b] for a, b in itertools.pairwise(ends)]


def _check_size(payload: ByteArray, num_bytes: int) -> None:
    if payload.shape != (num_bytes,):
        raise ValueError(f"a payload of {payload.size} bytes came, expected {num_bytes}")


# ---- Error feedback ----
#
# Error feedback adds to each payload what the one before did not carry.
#
# r' = (x + r) - decoded, per tensor, in float32. For any codec, the sum of the decoded tensors
# over any number of payloads is the sum of the inputs minus the last residual
# (https://arxiv.org/abs/1901.09847).

RESIDUAL: Final = "residual/"


class ErrorFeedback:
    """A codec that wraps a lossy one and adds what each payload lost (the residual) to the next."""

    def __init__(self, layout: Layout, codec: Codec) -> None:
        self._codec, self._layout = codec, layout
        lossless = set(codec.bypassed)
        self._names = [
            f"{RESIDUAL}{spec.name}" if spec.name not in lossless and spec.numel else ""
            for spec in layout
        ]
        self.payload_bytes, self.bypassed = codec.payload_bytes, codec.bypassed

    def initial_state(self) -> State:
        residuals = {
            name: np.zeros(spec.numel, np.float32)
            for name, spec in zip(self._names, self._layout, strict=True)
            if name
        }
        return {**self._codec.initial_state(), **residuals}

    def encode(
        self, tensors: Sequence[FloatArray], state: State, key: int
    ) -> tuple[ByteArray, State]:
        wanted = [
            tensor + state[name] if name else tensor
            for name, tensor in zip(self._names, tensors, strict=True)
        ]
        inner = {name: value for name, value in state.items() if name not in self._names}
        payload, after = self._codec.encode(wanted, inner, key)
        decoded = self._codec.decode(payload, key)
        residuals = {
            name: x - y for name, x, y in zip(self._names, wanted, decoded, strict=True) if name
        }
        return payload, {**after, **residuals}

    def decode(self, payload: ByteArray, key: int) -> list[FloatArray]:
        return self._codec.decode(payload, key)

    def part(self, places: range) -> "ErrorFeedback | None":
        inner = self._codec.part(places)
        if inner is None:
            return None
        return ErrorFeedback(self._layout[places.start : places.stop], inner)

    def decoder(self, place: int, read: Read) -> Decode | None:
        return self._codec.decoder(place, read)
