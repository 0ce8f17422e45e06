"""Decoding a payload window by window, against decoders of whole payloads in plain numpy."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stratagem.common.compression import Codec, FloatArray, TensorLayout
from stratagem.common.compression.codec import ByteArray, Read
from tests.common.compression.support import CODECS, codec_of, flat, values
from tests.every_pair import every_pair

pytestmark = pytest.mark.core

SHAPES = ((), (0, 3), (1,), (7,), (8, 3), (33, 7), (5, 3, 2, 11), (1, 400), (400, 1), (40, 60))
LAYOUT = tuple(TensorLayout(f"t{i}", shape) for i, shape in enumerate(SHAPES))
SHARED = {name for name, document in CODECS.items() if document["codec"] == "vsa"}
WINDOWED = [name for name in CODECS if name not in SHARED]


# ---- whole payloads of one tensor ----


def plain(payload: ByteArray, shape: tuple[int, ...], options: dict[str, Any]) -> FloatArray:
    return np.frombuffer(payload.tobytes(), np.float32)


def fp16(payload: ByteArray, shape: tuple[int, ...], options: dict[str, Any]) -> FloatArray:
    shift = int(np.frombuffer(payload[:4].tobytes(), "<i4")[0])
    halves = np.frombuffer(payload[4:].tobytes(), "<f2").astype(np.float32)
    values: FloatArray = (halves * np.float64(2.0) ** shift).astype(np.float32)
    return values


def bf16(payload: ByteArray, shape: tuple[int, ...], options: dict[str, Any]) -> FloatArray:
    words: np.ndarray[Any, Any] = np.frombuffer(payload.tobytes(), "<u2").astype(np.uint32)
    values: FloatArray = (words << np.uint32(16)).view(np.float32)
    return values


def int8(payload: ByteArray, shape: tuple[int, ...], options: dict[str, Any]) -> FloatArray:
    scale = np.frombuffer(payload[:4].tobytes(), "<f4")
    values: FloatArray = payload[4:].view(np.int8).astype(np.float32) * scale
    return values


def blocks(payload: ByteArray, shape: tuple[int, ...], options: dict[str, Any]) -> FloatArray:
    numel, block = math.prod(shape), options.get("block", 128)
    num_blocks = math.ceil(numel / block)
    scales = np.frombuffer(payload[: 4 * num_blocks].tobytes(), "<f4")
    rest = payload[4 * num_blocks :]
    if options["codec"] == "int8":
        levels = rest.view(np.int8).astype(np.float32)
    else:
        nibbles = (rest[:, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1)[:numel]
        levels = nibbles.astype(np.float32) - 16 * (nibbles > 7).astype(np.float32)
    values: FloatArray = levels * np.repeat(scales, block)[:numel]
    return values


def ternary(payload: ByteArray, shape: tuple[int, ...], options: dict[str, Any]) -> FloatArray:
    scale = np.frombuffer(payload[:4].tobytes(), "<f4")
    codes = (payload[4:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    trits = np.array([0, 1, -1], np.float32)[codes.reshape(-1)[: math.prod(shape)]]
    values: FloatArray = trits * scale
    return values


def top_k(payload: ByteArray, shape: tuple[int, ...], options: dict[str, Any]) -> FloatArray:
    numel = math.prod(shape)
    k = min(numel, max(1, math.ceil(options["k_fraction"] * numel)))
    where = payload[4 * k :]
    if where.size < 4 * k:
        kept = np.flatnonzero(np.unpackbits(where, count=numel, bitorder="little"))
    else:
        kept = np.frombuffer(where.tobytes(), "<u4").astype(np.int64)
    x = np.zeros(numel, np.float32)
    x[kept] = np.frombuffer(payload[: 4 * k].tobytes(), "<f4")
    return x


def low_rank(payload: ByteArray, shape: tuple[int, ...], options: dict[str, Any]) -> FloatArray:
    num_rows, num_columns = shape[0], math.prod(shape[1:])
    rank = min(options["rank"], num_rows, num_columns)
    factors = np.frombuffer(payload.tobytes(), "<f4")
    left = factors[: rank * num_rows].reshape(rank, -1)
    right = factors[rank * num_rows :].reshape(rank, -1)
    total: FloatArray = left[0][:, None] * right[0]
    for p, q in zip(left[1:], right[1:], strict=True):
        total = total + p[:, None] * q
    return total.reshape(-1)


Whole = Callable[[ByteArray, tuple[int, ...], dict[str, Any]], FloatArray]
WHOLE: dict[str, Whole] = {
    "none": plain,
    "fp16": fp16,
    "bf16": bf16,
    "int8": lambda *piece: (blocks if "block" in piece[2] else int8)(*piece),
    "int4": blocks,
    "ternary": ternary,
    "top_k": top_k,
    "low_rank": low_rank,
}


def reference(name: str, payload: ByteArray) -> list[FloatArray]:
    """Each tensor of LAYOUT: coded, or as it is where coding it would save nothing."""
    found, start = [], 0
    for place, spec in enumerate(LAYOUT):
        part = codec_of(CODECS[name], LAYOUT).part(range(place, place + 1))
        assert part is not None
        piece = payload[start : start + part.payload_bytes]
        is_plain = spec.name in part.bypassed or not spec.numel
        whole = plain if is_plain else WHOLE[CODECS[name]["codec"]]
        found.append(whole(piece, spec.shape, CODECS[name]))
        start += piece.size
    return found


# ---- windows ----


class Counted:
    """A payload that counts what is read of it at once."""

    def __init__(self, payload: ByteArray) -> None:
        self.payload, self.most = payload, 0

    def read(self, at: int, num: int, dtype: str) -> NDArray[Any]:
        end = at + num * np.dtype(dtype).itemsize
        assert 0 <= at <= end <= self.payload.size
        self.most = max(self.most, end - at)
        return np.frombuffer(self.payload[at:end].tobytes(), dtype)


def windows(codec: Codec, place: int, read: Read, step: int) -> FloatArray:
    decode = codec.decoder(place, read)
    assert decode is not None
    numel = LAYOUT[place].numel
    cuts = [*range(0, numel, step), numel]
    pieces = [decode(start, stop) for start, stop in pairwise(cuts)]
    for piece, (start, stop) in zip(pieces, pairwise(cuts), strict=True):
        assert piece.dtype == np.float32
        assert piece.shape == (stop - start,)
    return np.concatenate([np.empty(0, np.float32), *pieces])


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_of_any_size_have_the_bits_of_the_whole(name: str) -> None:
    codec = codec_of(CODECS[name], LAYOUT)
    payload, _ = codec.encode(values(LAYOUT, 4), codec.initial_state(), 9)
    expected = reference(name, payload)
    for place, whole in enumerate(expected):
        for step in (1, 3, 7, 8, 64, 10**6):
            if whole.size // step <= 500:  # more windows are of the same places in their bytes
                decoded = windows(codec, place, Counted(payload).read, step)
                assert decoded.tobytes() == whole.tobytes()
    assert flat(codec.decode(payload, 9)).tobytes() == flat(expected).tobytes()
    counted = Counted(payload)
    windows(codec, len(LAYOUT) - 1, counted.read, 64)
    needed = 4 * max(64, round(2400 * CODECS[name].get("k_fraction", 0)))
    assert name == "low_rank" or counted.most <= needed, "no more is read than a window needs"


def test_a_bundle_has_no_windows() -> None:
    for name in SHARED:
        codec = codec_of(CODECS[name])
        assert codec.decoder(0, Counted(np.empty(0, np.uint8)).read) is None
        assert codec.part(range(0)) is None


@pytest.mark.parametrize(("at", "step"), [(0, 64), (130, 3), (130, 1000), (249, 1), (249, 64)])
def test_the_code_11_is_found_in_every_window(at: int, step: int) -> None:
    layout = (TensorLayout("w", (250,)),)
    codec = codec_of(CODECS["ternary"], layout)
    payload = codec.encode(values(layout, 1), codec.initial_state(), 1)[0].copy()
    payload[4 + at // 4] |= np.uint8(3 << 2 * (at % 4))
    with pytest.raises(ValueError, match="code 11"):
        decode_all(codec, payload, 250, step)


@pytest.mark.parametrize(
    ("damage", "step"), every_pair(("low", "high", "twice", "back"), (1, 9, 64, 1000))
)
def test_places_that_no_encoder_gives_are_refused(damage: str, step: int) -> None:
    """Eight of 256 places are named, each by a number: the values, then the places."""
    layout = (TensorLayout("w", (256,)),)
    codec = codec_of({"codec": "top_k", "k_fraction": 0.03}, layout)
    payload = codec.encode(values(layout, 1), codec.initial_state(), 1)[0].copy()
    places = payload[32:].view("<u4")
    assert places.size == 8
    match damage:
        case "high":
            places[-1] = 256
        case "low":
            places[0] = 2**32 - 1
        case "twice":
            places[4] = places[3]
        case "back":
            places[3:5] = places[[4, 3]]
    with pytest.raises(ValueError, match="top_k payload"):
        decode_all(codec, payload, 256, step)


@pytest.mark.parametrize("step", [1, 9, 64, 1000])
@pytest.mark.parametrize("bits", [0x00, 0xFF])
def test_a_bitmap_of_too_few_or_too_many_places_is_refused(bits: int, step: int) -> None:
    layout = (TensorLayout("w", (250,)),)
    codec = codec_of(CODECS["top_k-bitmap"], layout)
    payload = codec.encode(values(layout, 1), codec.initial_state(), 1)[0].copy()
    payload[-9] = bits
    with pytest.raises(ValueError, match="does not name 75 of 250 places"):
        decode_all(codec, payload, 250, step)


def decode_all(codec: Codec, payload: ByteArray, numel: int, step: int) -> None:
    decode = codec.decoder(0, Counted(payload).read)
    assert decode is not None
    for start, stop in pairwise([*range(0, numel, step), numel]):
        decode(start, stop)
