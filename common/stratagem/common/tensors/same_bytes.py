"""Find the bytes of a state that an earlier one shares, so that only the other bytes need to
travel.

The bytes themselves are compared, in blocks from the start of each tensor, not digests. Parameters
that do not train are the same in every commit, as are their moments and the rows of an embedding
that no batch has used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from stratagem.common.base.errors import InvalidInputError, LimitError
from stratagem.common.tensors.manifest import Manifest

# ---- Equal ranges ----

BLOCK_BYTES: Final = 2**20
MAX_RANGES: Final = 2**15  # with the manifest they make one message
_GLANCE_BYTES: Final = 4096  # enough to tell most blocks that have changed


class SameBytes(NamedTuple):
    """A byte range of a state, and the offset in another state that has the same bytes."""

    offset: int
    base_offset: int
    size: int


def same_bytes(
    manifest: Manifest,
    buffers: Sequence[memoryview],
    base: Manifest,
    base_buffers: Sequence[memoryview],
    block_bytes: int = BLOCK_BYTES,
) -> list[SameBytes]:
    """Compare two states and return the ranges with equal bytes, in order and without overlap.

    Only tensors with the same name, type and shape in both are compared; buffers are those of the
    stored tensors, in order. Bytes after MAX_RANGES ranges count as changed.
    """
    bases = {
        (spec.name, spec.dtype, spec.shape): (spec.offset, buffer)
        for spec, buffer in zip(base.stored(), base_buffers, strict=True)
    }
    ranges: list[SameBytes] = []
    for spec, buffer in zip(manifest.stored(), buffers, strict=True):
        base_offset, older = bases.get((spec.name, spec.dtype, spec.shape), (0, None))
        if older is None:
            continue
        for start in range(0, spec.size_bytes, block_bytes):
            end = min(start + block_bytes, spec.size_bytes)
            if are_equal(buffer[start:end], older[start:end]):
                at = SameBytes(spec.offset + start, base_offset + start, end - start)
                if not _joined(ranges, at):
                    if len(ranges) == MAX_RANGES:
                        return ranges
                    ranges.append(at)
    return ranges


def _joined(ranges: list[SameBytes], at: SameBytes) -> bool:
    """Extend the last range by this one if they touch in both states; return whether they did."""
    if not ranges:
        return False
    last = ranges[-1]
    if (last.offset + last.size, last.base_offset + last.size) != (at.offset, at.base_offset):
        return False
    ranges[-1] = last._replace(size=last.size + at.size)
    return True


def are_equal(one: memoryview, other: memoryview) -> bool:
    """Return whether two blocks have the same bytes."""
    one_bytes, other_bytes = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    if not np.array_equal(one_bytes[:_GLANCE_BYTES], other_bytes[:_GLANCE_BYTES]):
        return False
    whole = one_bytes.size - one_bytes.size % 8
    return np.array_equal(
        one_bytes[:whole].view(np.uint64), other_bytes[:whole].view(np.uint64)
    ) and bool(np.array_equal(one_bytes[whole:], other_bytes[whole:]))


def check_same(same: Sequence[SameBytes], total_bytes: int, base_bytes: int) -> None:
    """Raise an error for ranges that are too many, unordered, overlapping or out of bounds."""
    if len(same) > MAX_RANGES:
        raise LimitError(f"same: {len(same)} ranges, the limit is {MAX_RANGES}")
    end = 0
    for index, span in enumerate(same):
        if span.size < 1 or span.offset < end or span.offset + span.size > total_bytes:
            raise InvalidInputError.at(f"same[{index}]", f"{tuple(span)} is not in order")
        if span.base_offset < 0 or span.base_offset + span.size > base_bytes:
            raise InvalidInputError.at(
                f"same[{index}]", f"{tuple(span)} is not within the {base_bytes} bytes of the base"
            )
        end = span.offset + span.size


def changed_ranges(same: Sequence[SameBytes], total_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each non-empty range between the equal ranges, in order."""
    start = 0
    for span in (*same, SameBytes(total_bytes, 0, 0)):
        if span.offset > start:
            yield start, span.offset
        start = span.offset + span.size


def num_changed_bytes(same: Sequence[SameBytes], total_bytes: int) -> int:
    return total_bytes - sum(span.size for span in same)


def cut(
    manifest: Manifest, buffers: Sequence[memoryview], same: Sequence[SameBytes]
) -> Iterator[memoryview]:
    """Yield the bytes of a state that lie outside of the equal ranges, as views of its buffers."""
    placed = iter(zip(manifest.stored(), buffers, strict=True))
    spec, buffer = None, memoryview(b"")
    for start, end in changed_ranges(same, manifest.total_bytes):
        while start < end:
            while spec is None or start >= spec.offset + spec.size_bytes:
                spec, buffer = next(placed)
            stop = min(end, spec.offset + spec.size_bytes)
            yield buffer[start - spec.offset : stop - spec.offset]
            start = stop


# ---- Names of slices ----
#
# A state may be divided among members element by element. A member's slice of a parameter, or of
# its optimizer state, travels under such a name, as a flat tensor or a single number; in order,
# the slices make up the tensor of an undivided state. The functions are pure.

_PREFIX: Final = "slice/"
_PARAMETER: Final = "parameter/"


@dataclass(frozen=True, slots=True, order=True)
class SliceName:
    """The parsed name of a slice of optimizer state; sorted, slices are in the undivided order."""

    parameter: int
    """The index of the parameter, from 0."""
    place: int
    """The index among the tensors that the optimizer keeps for the parameter."""
    first: int
    """The index of the slice's first element in the parameter."""
    whole: str
    """The name of the whole tensor in a state that is not divided among members."""

    def __str__(self) -> str:
        return f"{_PREFIX}{self.parameter}/{self.place}/{self.first}/{self.whole}"


@dataclass(frozen=True, slots=True, order=True)
class ParameterSlice:
    """The parsed name of a slice of a parameter that is divided among the members of a party."""

    place: int
    """The index of the parameter among all tensors of the model, from 0."""
    first: int
    """The index of the slice's first element in the parameter."""
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    whole: str
    """The name of the whole tensor in a state that is not divided among members."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{_PARAMETER}{self.place}/{self.first}/{shape}/{self.whole}"


def slice_name(name: str) -> SliceName | None:
    """Parse a tensor's name as a slice name; None if it is none. Raises InvalidInputError for a
    name that only begins like one."""
    if not name.startswith(_PREFIX):
        return None
    *numbers, whole = name.removeprefix(_PREFIX).split("/", 3)
    if len(numbers) != 3 or not all(map(_is_number, numbers)):
        raise InvalidInputError.at("state", f"{name!r} names no slice of a tensor")
    parameter, place, first = map(int, numbers)
    return SliceName(parameter, place, first, whole)


def parameter_slice(name: str) -> ParameterSlice | None:
    """Parse a tensor's name as the name of a slice of a parameter; None if it is none. Raises
    InvalidInputError for a name that only begins like one."""
    if not name.startswith(_PARAMETER):
        return None
    place, first, shape, whole = (*name.removeprefix(_PARAMETER).split("/", 3), "", "", "", "")[:4]
    lengths = shape.split("x") if shape else []
    if not whole or not all(map(_is_number, (place, first, *lengths))):
        raise InvalidInputError.at("state", f"{name!r} names no slice of a parameter")
    return ParameterSlice(int(place), int(first), tuple(map(int, lengths)), whole)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
