"""Convert the element types of the tensor stream to types that numpy can compute with.

Three operations on raw little-endian elements: test whether they are finite, convert them to
float64, and round float64 values to them (ties to even, rounded once). numpy has neither bfloat16
nor float8; both are implemented here with integers and tables.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stratagem.common.tensors.stream import Data, Sink

# ---- Conversion ----

Raw = NDArray[Any]
Wide = NDArray[np.float64]

_STORAGE: Final = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "u1",
    "float8_e5m2": "u1",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint8": "u1",
    "bool": "u1",
}
_NATIVE: Final = frozenset({"float64", "float32", "float16"})
# Largest finite code without the sign; everything above it is infinite or not a number.
_MAX_FINITE: Final = {"bfloat16": 0x7F7F, "float8_e4m3fn": 0x7E, "float8_e5m2": 0x7B}
_SIGN_BIT: Final = {"bfloat16": 0x8000, "float8_e4m3fn": 0x80, "float8_e5m2": 0x80}


def storage(dtype: str) -> np.dtype[Any]:
    """Return the numpy type that holds raw elements of `dtype`, bit by bit."""
    return np.dtype(_STORAGE[dtype])


def is_finite(dtype: str, raw: Raw) -> bool:
    """Return True if all elements of a floating type are finite."""
    if dtype in _NATIVE:
        return bool(np.isfinite(raw).all())
    magnitude = raw & raw.dtype.type(_SIGN_BIT[dtype] - 1)
    return not raw.size or int(magnitude.max()) <= _MAX_FINITE[dtype]


def finite_elements(dtype: str, raw: Raw) -> NDArray[np.bool_]:
    """Return a mask of the elements of a floating type: True for finite ones."""
    if dtype in _NATIVE:
        return np.isfinite(raw)
    magnitude = raw & raw.dtype.type(_SIGN_BIT[dtype] - 1)
    return np.asarray(magnitude <= _MAX_FINITE[dtype])


def widen(dtype: str, raw: Raw, out: Wide) -> None:
    """Convert floating elements to float64, exactly, into `out`."""
    if dtype in _NATIVE:
        with np.errstate(all="ignore"):  # numpy warns of values that are not finite
            np.copyto(out, raw)
    elif dtype == "bfloat16":
        with np.errstate(all="ignore"):
            np.copyto(out, (raw.astype(np.uint32) << np.uint32(16)).view(np.float32))
    else:
        np.take(_values_of_codes(dtype), raw, out=out)


def narrow(dtype: str, values: Wide, out: Raw) -> None:
    """Round float64 values to elements of `dtype`, ties to even, in `out`; infinities, NaN stay."""
    if dtype in _NATIVE:
        with np.errstate(over="ignore"):  # beyond the range of the type is infinite, as in torch
            np.copyto(out, values, casting="same_kind")
    elif dtype == "bfloat16":
        np.copyto(out, _to_bfloat16(values))
    else:
        np.copyto(out, _to_float8(dtype, values))


def _to_bfloat16(values: Wide) -> NDArray[np.uint16]:
    # Rounding twice would be wrong at ties. So the first step rounds to ODD (toward zero, then
    # the last bit set where anything was lost), after which the second one errs no more.
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    bits = near.view(np.uint32)
    exact = near.astype(np.float64)
    bits -= np.abs(exact) > np.abs(values)
    bits |= exact != values
    last_kept = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + last_kept) >> np.uint32(16)).astype(np.uint16)


def _to_float8(dtype: str, values: Wide) -> NDArray[np.uint8]:
    middles = _middles(dtype)
    codes = np.searchsorted(middles, np.abs(values), side="left")  # a tie falls to the lower code
    is_tie = np.abs(values) == np.append(middles, np.inf)[codes]
    codes += is_tie & (codes % 2 == 1)
    codes[~np.isfinite(values)] = 0x7F  # which is no number in both types
    codes |= np.where(np.signbit(values), _SIGN_BIT[dtype], 0)
    return codes.astype(np.uint8)


@cache
def _middles(dtype: str) -> Wide:
    """Return the midpoints between consecutive finite magnitudes, in order of the codes."""
    magnitudes = _values_of_codes(dtype)[: _MAX_FINITE[dtype] + 1]
    middles: Wide = (magnitudes[:-1] + magnitudes[1:]) / 2
    middles.flags.writeable = False  # all callers share it
    return middles


@cache
def _values_of_codes(dtype: str) -> Wide:
    """Return the value of each of the 256 codes of a float8 type."""
    num_mantissa_bits = 3 if dtype == "float8_e4m3fn" else 2
    bias = 7 if dtype == "float8_e4m3fn" else 15
    codes = np.arange(256)
    exponent = (codes & 0x7F) >> num_mantissa_bits
    mantissa = (codes & ((1 << num_mantissa_bits) - 1)) / (1 << num_mantissa_bits)
    normal = np.ldexp(1 + mantissa, exponent - bias)
    value = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), normal)
    value[(codes & 0x7F) > _MAX_FINITE[dtype]] = np.nan
    if dtype == "float8_e5m2":  # the other one has no infinity
        value[(codes & 0x7F) == _MAX_FINITE[dtype] + 1] = np.inf
    result: Wide = np.where(codes & 0x80, -value, value)
    result.flags.writeable = False  # all callers share it
    return result


# ---- Offloading to a thread ----
#
# A blocking sink runs in a thread, a few pieces behind the stream that feeds it.
#
# Checking and writing then overlap with receiving, and the event loop stays free. The stream
# waits when the thread falls behind, so memory is bounded. An Offload is created and used on the
# event loop.

MAX_PIECES_BEHIND: Final = 2


class Offload:
    """A sink that passes data to another sink in a thread; keep_up and finish raise its errors."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[tuple[int, Any]] = deque()
        self._worker: asyncio.Future[None] | None = None
        self._has_room = asyncio.Event()
        self._is_held_up = False

    def write(self, offset: int, data: Any) -> None:
        """Queue the next piece for the thread; return at once."""
        self._pieces.append((offset, data))
        self._ensure_worker()

    async def keep_up(self) -> None:
        """Wait until only a few pieces are queued. Raises the sink's error."""
        self._check()
        if len(self._pieces) <= MAX_PIECES_BEHIND:
            return
        self._has_room.clear()
        self._is_held_up = True
        while len(self._pieces) > MAX_PIECES_BEHIND // 2:
            self._ensure_worker()
            assert self._worker is not None
            room = asyncio.ensure_future(self._has_room.wait())
            await asyncio.wait((room, self._worker), return_when=asyncio.FIRST_COMPLETED)
            room.cancel()
            self._check()
        self._is_held_up = False

    async def take(self, offset: int, pieces: Iterator[Data]) -> None:
        """Write all pieces of an iterator, which runs in the sink's thread; the queue must be
        empty. Raises an error of the iterator or the sink."""
        self._worker = self._loop.run_in_executor(None, self._pass_on, offset, pieces)
        await asyncio.shield(self._worker)

    async def finish(self) -> None:
        """Wait until all pieces are written. Raises the sink's error."""
        while self._pieces or (self._worker is not None and not self._worker.done()):
            self._ensure_worker()
            assert self._worker is not None
            # Cancelling the waiting must not make a running thread look as if it had ended.
            await asyncio.shield(self._worker)
        self._check()

    async def close(self) -> None:
        """Finish the current piece and drop all queued ones; the sink is not used afterwards."""
        self._pieces.clear()
        if self._worker is not None:
            await asyncio.wait((self._worker,))

    def _pass_on(self, offset: int, pieces: Iterator[Data]) -> None:
        for piece in pieces:
            self._sink(offset, piece)
            offset += len(piece)

    def _ensure_worker(self) -> None:
        if self._worker is None or (self._worker.done() and self._worker.exception() is None):
            self._worker = self._loop.run_in_executor(None, self._work)

    def _check(self) -> None:
        if self._worker is not None and self._worker.done():
            self._worker.result()

    def _work(self) -> None:
        """Write until the queue is empty; a piece stays in the queue while it is written."""
        while self._pieces:
            try:
                offset, data = self._pieces[0]
            except IndexError:  # dropped meanwhile
                return
            self._sink(offset, data)
            try:
                self._pieces.popleft()
            except IndexError:
                return
            if self._is_held_up and len(self._pieces) <= MAX_PIECES_BEHIND // 2:
                self._loop.call_soon_threadsafe(self._has_room.set)
