"""vsa: all tensors in one vector of d components (places), by a vector symbolic architecture.

Each tensor is sketched to d places with hashed signs and permutations (a count sketch, as in
FetchSGD, https://arxiv.org/abs/2007.07682), bound to a key of ±1 that belongs to its name, and
added to the others. Binding is the product, which undoes itself: the vector times a tensor's key is
the tensor's sketch plus what the others leave, which looks like noise. Nothing of size n × d is
ever made. A scale per tensor, the least-squares one, keeps every decoded tensor the best multiple
of its direction, so error feedback cannot diverge. Signs and places change with every payload, so a
later payload shows what an earlier one could not.

A tensor that is small beside the others would be lost in their noise, so the smallest tensors,
which together have at most a quarter of the places, are sent uncoded in addition to the bundle of
the others. Where the payload would not be smaller than the tensors, all are sent uncoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratagem.common.compression.codec import (
    ByteArray,
    FloatArray,
    Layout,
    NonFiniteError,
    Plain,
    Read,
    State,
    TensorCodec,
    check_finite,
    from_bytes,
    in_memory,
    joined,
    split,
    to_bytes,
)
from stratagem.common.compression.quantize import Int8, Ternary
from stratagem.common.numerics.keys import SIGN_SALT, Words, derive, hash32, name_seed, places
from stratagem.common.numerics.shards import pairwise_sum

MIN_DIMENSION: Final = 64
BUNDLE: Final = "the bundle of all tensors"
"""The name that NonFiniteError gives if the sum of finite tensors (the bundle) overflows."""
SKETCH_THRESHOLD_FRACTION: Final = 0.7
PLAIN_SHARE: Final = 0.25
"""The largest share of the sketch's size that tensors sent uncoded may take."""
_KEY_SALT: Final = 0x5BD1E995


@dataclass(frozen=True, slots=True)
class Sketch:
    """A count sketch, a linear map from n values to d: place j of block b holds element b·d +
    (a_b·j + c_b mod d), or 0 beyond n, times a sign; blocks are added in ascending order."""

    seed: int
    numel: int
    dimension: int
    """The size d of the sketch; a power of two, so that an odd a_b makes a permutation."""

    def project(self, x: FloatArray) -> FloatArray:
        """Return the sketch, (d,), of the values x, (n,)."""
        total = np.zeros(self.dimension, np.float32)
        for block in range(self._num_blocks):
            elements, signs = self._block(block)
            inside = elements < self.numel
            values = np.where(inside, x[np.where(inside, elements, 0)], np.float32(0.0))
            total += values * signs
        return total

    def transpose(self, y: FloatArray) -> FloatArray:
        """Map y, (d,), back by the transpose of the sketch, and return (n,) values."""
        x = np.empty(self.numel, np.float32)
        for block in range(self._num_blocks):
            elements, signs = self._block(block)
            inside = elements < self.numel
            x[elements[inside]] = (y * signs)[inside]
        return x

    @property
    def _num_blocks(self) -> int:
        return -(-self.numel // self.dimension)

    def _block(self, block: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], FloatArray]:
        """Return the index and the sign of the element that block b puts at each place."""
        pair = np.array([2 * block, 2 * block + 1], np.uint64).astype(np.uint32)
        a, c = hash32(self.seed, pair)
        here = places(self.dimension)
        inner = ((a | np.uint32(1)) * here + c) & np.uint32(self.dimension - 1)
        elements = inner.astype(np.int64) + block * self.dimension
        first = np.uint32(block * self.dimension & 0xFFFFFFFF)
        return elements, signs_of(self.seed ^ SIGN_SALT, here + first)


def signs_of(seed: int, where: Words) -> FloatArray:
    """Return a pseudorandom sign for each place: +1 if the hash of the place is even, else -1."""
    odd = (hash32(seed, where) & np.uint32(1)).astype(np.float32)
    return np.float32(1.0) - np.float32(2.0) * odd


def key_of(name: str, dimension: int) -> FloatArray:
    """Return the ±1 vector (key) that a tensor is multiplied by; it follows from the name alone."""
    return signs_of(key_seed(name), places(dimension))


def key_seed(name: str) -> int:
    """Return the seed of the hash that makes a tensor's ±1 vector (key)."""
    return name_seed(name) ^ _KEY_SALT


def bind(vector: FloatArray, key: FloatArray) -> FloatArray:
    """Multiply a sketch by a tensor's ±1 key; a second call with the same key undoes the first.
    Raises ValueError for different lengths."""
    if vector.shape != key.shape:
        raise ValueError(f"a vector of shape {vector.shape} and a key of {key.shape}")
    return vector * key


def bundle(vectors: Sequence[FloatArray]) -> FloatArray:
    """Add the vectors in order. Raises ValueError if there are none or their lengths differ."""
    if not vectors:
        raise ValueError("a bundle of no vectors")
    total = vectors[0].copy()
    for place, vector in enumerate(vectors):
        if vector.shape != total.shape:
            raise ValueError(
                f"vector {place} of a bundle has shape {vector.shape}, the first {total.shape}"
            )
        if place:
            total += vector
    return total


def places_beside(layout: Layout, dimension_fraction: float, numerics: int) -> frozenset[int]:
    """Return the indices of the small tensors that are sent uncoded in addition to the bundle (the
    sum of the sketches); none under the numerics rules number 1."""
    if numerics < 2:
        return frozenset()
    room = PLAIN_SHARE * dimension_fraction * sum(spec.numel for spec in layout)
    beside = set[int]()
    for place in sorted(range(len(layout)), key=lambda at: (layout[at].numel, layout[at].name)):
        room -= layout[place].numel
        if room < 0:
            break
        beside.add(place)
    return frozenset(beside)


class VsaBesidePlain:
    """A codec that sums sketches of most tensors in one bundle, and sends small tensors uncoded."""

    def __init__(self, layout: Layout, beside: frozenset[int], bundled: "Vsa") -> None:
        """Wrap the codec of the bundle. beside: indices of the tensors to send uncoded."""
        self._layout, self._beside, self._bundled = layout, beside, bundled
        plain = [layout[place] for place in sorted(beside)]
        self._sizes = [bundled.payload_bytes, *(spec.raw_bytes for spec in plain)]
        self.payload_bytes = sum(self._sizes)
        self.bypassed = (*bundled.bypassed, *(spec.name for spec in plain if spec.numel))

    def initial_state(self) -> State:
        return {}

    def encode(
        self, tensors: Sequence[FloatArray], state: State, key: int
    ) -> tuple[ByteArray, State]:
        check_finite(self._layout, tensors)
        others = [x for place, x in enumerate(tensors) if place not in self._beside]
        payload, _ = self._bundled.encode(others, {}, key)
        plain = [to_bytes(tensors[place]) for place in sorted(self._beside)]
        return joined([payload, *plain]), state

    def decode(self, payload: ByteArray, key: int) -> list[FloatArray]:
        coded, *parts = split(payload, self._sizes)
        others = iter(self._bundled.decode(coded, key))
        plain = iter(parts)
        return [
            from_bytes(next(plain), "<f4").astype(np.float32)
            if place in self._beside
            else next(others)
            for place in range(len(self._layout))
        ]

    def part(self, places: range) -> None:
        """Return None, as the tensors in the bundle share one payload."""

    def decoder(self, place: int, read: Read) -> None:
        """Return None, as the tensors in the bundle share one payload."""


class Vsa:
    """Vector symbolic codec: one sum (bundle) of all tensors' sketches, then a scale per tensor."""

    def __init__(self, layout: Layout, *, dimension_fraction: float, sketch_codec: str) -> None:
        self._layout = layout
        # The order of names does not depend on the layout, so bundles of all processes are alike.
        self.order = sorted(range(len(layout)), key=lambda place: layout[place].name)
        numel = sum(spec.numel for spec in layout)
        self.dimension = power_of_two_below(dimension_fraction * numel)
        self._inner = _inner_codec(sketch_codec, self.dimension)
        self.payload_bytes = self._inner.payload_bytes + 4 * len(layout)
        self.is_bypassed = self.payload_bytes >= 4 * numel
        self.bypassed: tuple[str, ...] = ()
        if self.is_bypassed:
            self.payload_bytes = 4 * numel
            self.bypassed = tuple(spec.name for spec in layout if spec.numel)

    def initial_state(self) -> State:
        return {}

    def encode(
        self, tensors: Sequence[FloatArray], state: State, key: int
    ) -> tuple[ByteArray, State]:
        check_finite(self._layout, tensors)
        if self.is_bypassed:
            return joined([to_bytes(tensor) for tensor in tensors]), state
        total = self._bundled(tensors, key)
        if not np.isfinite(total).all():
            raise NonFiniteError(BUNDLE)
        coded = self._inner.encode(total, derive(key, len(self._layout)))
        guesses = self._unbound(coded, key)
        scales = [best_scale(x, y) for x, y in zip(tensors, guesses, strict=True)]
        return joined([coded, to_bytes(np.array(scales, np.float32))]), state

    def decode(self, payload: ByteArray, key: int) -> list[FloatArray]:
        if self.is_bypassed:
            parts = split(payload, [spec.raw_bytes for spec in self._layout])
            return [from_bytes(part, "<f4").astype(np.float32) for part in parts]
        coded, scales = split(payload, [self._inner.payload_bytes, 4 * len(self._layout)])
        return [
            guess * scale
            for guess, scale in zip(
                self._unbound(coded, key), from_bytes(scales, "<f4"), strict=True
            )
        ]

    def part(self, places: range) -> None:
        """Return None, as all tensors share one payload, the bundle."""

    def decoder(self, place: int, read: Read) -> None:
        """Return None: every element depends on the whole payload, so it cannot be decoded in
        windows."""

    @np.errstate(over="ignore", invalid="ignore")  # the caller checks the sum
    def _bundled(self, tensors: Sequence[FloatArray], key: int) -> FloatArray:
        return bundle(
            [
                bind(
                    self.sketch(place, key).project(tensors[place]),
                    key_of(self._layout[place].name, self.dimension),
                )
                for place in self.order
            ]
        )

    def _unbound(self, coded: ByteArray, key: int) -> list[FloatArray]:
        """Decode each tensor from the bundle, not yet multiplied by the tensor's scale."""
        vector = self._inner.decoder(in_memory(coded))(0, self.dimension)
        return [
            self.sketch(place, key).transpose(bind(vector, key_of(spec.name, self.dimension)))
            for place, spec in enumerate(self._layout)
        ]

    def sketch(self, place: int, key: int) -> Sketch:
        """Return the count sketch of the tensor at this index, for the payload with this key."""
        spec = self._layout[place]
        return Sketch(derive(key, name_seed(spec.name)), spec.numel, self.dimension)


def power_of_two_below(value: float) -> int:
    """Return the largest power of two that is at most the value, but at least MIN_DIMENSION."""
    return max(MIN_DIMENSION, 1 << max(0, int(value).bit_length() - 1))


def best_scale(x: FloatArray, y: FloatArray) -> np.float32:
    """Return the factor s with which s·y is nearest to x by least squares; 0 if y is zero."""
    wide = y.astype(np.float64)  # squares of float32 overflow; products of two are exact
    return scale_of(pairwise_sum(wide * x), pairwise_sum(wide * wide))


def scale_of(product: float, square: float) -> np.float32:
    """Return the factor s with which s·y is nearest to x, from the sums of x·y and of y²."""
    return np.float32(product / square if square else 0.0)


def _inner_codec(name: str, dimension: int) -> TensorCodec:
    match name:
        case "int8":
            return Int8(dimension, stochastic=False)
        case "ternary":
            return Ternary(
                dimension, threshold_fraction=SKETCH_THRESHOLD_FRACTION, stochastic=False
            )
        case _:
            return Plain(dimension)
