"""Divide all parameters among the members of an exchange that each keep the optimizer state of
their own slice (ZeRO, https://arxiv.org/abs/1910.02054).

A slice is a run of whole blocks of `layout.BLOCK` elements in each bucket. So the norm of a
gradient is made of the same blocks whoever owns them, and the part of a parameter that a member
updates ends with a block or with the parameter: kernels that treat the last elements of a tensor
separately, with another rounding, do so at the same elements as with the whole parameter. The
division follows from the layout and the number of members only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.worker.exchange.layout import BLOCK, SLOT_BYTES, BucketLayout, Slot

# ---- Slice owners ----


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """The elements [first, stop) of a parameter that one member owns."""

    index: int
    """Index of the parameter."""
    first: int
    stop: int
    bucket: int
    offset: int
    """Offset of the first element in the bucket, in elements."""

    @property
    def num_blocks(self) -> int:
        """Number of norms of the part's gradient: one per block, at least one."""
        return max(1, -(-(self.stop - self.first) // BLOCK))


@dataclass(frozen=True, slots=True)
class SliceOwners:
    """The division of all parameters into slices, one per member."""

    slices: tuple[tuple[tuple[int, int], ...], ...]
    """The elements [start, stop) by bucket (without the extras) and rank; may be empty."""
    parts: tuple[tuple[OwnedPart, ...], ...]
    """The parts by rank, in order of parameter; each rank has at most one part of a parameter."""

    @property
    def num_norms(self) -> tuple[int, ...]:
        """Number of norms of each rank's gradients."""
        return tuple(sum(part.num_blocks for part in parts) for parts in self.parts)

    def mirrored_rank(self, rank: int) -> int:
        """Return the rank whose parts this rank also updates, as its mirror: the one before it."""
        return (rank - 1) % len(self.parts)

    def places_of_norms(self) -> list[list[tuple[int, range]]]:
        """Return for each parameter the ranks with its norms, and the norms' indices at these."""
        places: dict[int, list[tuple[int, int, range]]] = {}
        for rank, parts in enumerate(self.parts):
            start = 0
            for part in parts:
                at = range(start, start + part.num_blocks)
                places.setdefault(part.index, []).append((part.first, rank, at))
                start = at.stop
        return [[(rank, at) for _, rank, at in sorted(places[i])] for i in range(len(places))]


def divide_slices(layout: BucketLayout, size: int) -> SliceOwners:
    """Divide every bucket but the extras among `size` members: in order of rank, and as equally as
    whole blocks allow."""
    slices = []
    parts: list[dict[int, OwnedPart]] = [{} for _ in range(size)]
    for bucket, flat in enumerate(layout.buckets[:-1]):
        blocks = list(_blocks(layout, bucket))
        total = sum(block.stop - block.first for block in blocks)
        starts: list[int | None] = [None] * size
        before = 0
        for block in blocks:
            numel = block.stop - block.first
            rank = (2 * before + numel) * size // (2 * total) if total else 0
            rank = min(rank, size - 1)  # a block without elements after the last one
            before += numel
            if starts[rank] is None:
                starts[rank] = block.offset
            held = parts[rank].get(block.index)
            first, offset = (held.first, held.offset) if held else (block.first, block.offset)
            parts[rank][block.index] = OwnedPart(block.index, first, block.stop, bucket, offset)
        slices.append(_ranges(starts, flat.numel))
    ordered = (tuple(owned[index] for index in sorted(owned)) for owned in parts)
    return SliceOwners(tuple(slices), tuple(ordered))


def _blocks(layout: BucketLayout, bucket: int) -> Iterator[OwnedPart]:
    """Yield each block of a bucket as a part without an owner, in order."""

    def place(slot: Slot) -> tuple[int, int]:
        return slot.offset, -slot.index  # slots without elements share the offset of the next one

    for slot in sorted((s for s in layout.slots if s.bucket == bucket), key=place):
        numel = slot.shape.numel()
        for first in range(0, max(1, numel), BLOCK):
            stop = min(first + BLOCK, numel)
            yield OwnedPart(slot.index, first, stop, bucket, slot.offset + first)


def _ranges(starts: list[int | None], numel: int) -> tuple[tuple[int, int], ...]:
    """Return the range of each member: it ends where the next non-empty range begins."""
    ranges: list[tuple[int, int]] = []
    end = numel
    for start in reversed(starts):
        ranges.append((end, end) if start is None else (start, end))
        end = end if start is None else start
    return tuple(reversed(ranges))


# ---- Sums of own slices ----
#
# The sums have separate storage where the buckets of gradients give their memory back.


@dataclass(frozen=True, slots=True)
class KeptSums:
    """Separate flat storage for the sums of a member's slices, by bucket without the extras."""

    flats: list[Tensor]
    starts: tuple[int, ...]
    """Start of the member's slice in each bucket, in elements."""
    mirrored: "KeptSums | None" = None
    """The mirrored sums of the member before this one; None without a mirror."""

    def part(self, bucket: int, start: int, stop: int) -> Tensor:
        """Return the sums of these elements of a bucket; None if they are not in the slice."""
        if start == stop:
            return self.flats[bucket][:0]
        return self.flats[bucket].narrow(0, start - self.starts[bucket], stop - start)

    def move_to(self, flats: Sequence[Tensor]) -> None:
        """Move the sums to this storage; earlier values are not copied."""
        self.flats[:] = flats


def keep_sums(
    layout: BucketLayout,
    owners: SliceOwners,
    rank: int,
    device: torch.device,
    *,
    is_mirrored: bool = False,
) -> KeptSums:
    """Allocate the storage of a member's sums; is_mirrored: and of the previous member's sums."""
    ranges = [slices[rank] for slices in owners.slices]
    flats = [
        torch.zeros(stop - start, dtype=layout.buckets[bucket].dtype, device=device)
        for bucket, (start, stop) in enumerate(ranges)
    ]
    mirrored = None
    if is_mirrored:
        mirrored = keep_sums(layout, owners, owners.mirrored_rank(rank), device)
    return KeptSums(flats, tuple(start for start, _ in ranges), mirrored)


def shared_bytes(
    kept: KeptSums | None, layout: BucketLayout, owners: SliceOwners | None, size: int
) -> list[int]:
    """Return by rank the shared bytes that `kept_in` needs; 0 if sums are not mirrored."""
    if kept is None or kept.mirrored is None or owners is None:
        return [0] * size
    return [sum(up for _, up in _places(layout, owners, rank)) for rank in range(size)]


def kept_in(memory: Tensor, layout: BucketLayout, owners: SliceOwners, rank: int) -> list[Tensor]:
    """Return a member's flat sums by bucket in this memory; each begins at a multiple of
    SLOT_BYTES."""
    sums, start = list[Tensor](), 0
    for bucket, (num_bytes, size) in enumerate(_places(layout, owners, rank)):
        sums.append(memory[start : start + num_bytes].view(layout.buckets[bucket].dtype))
        start += size
    return sums


def _places(layout: BucketLayout, owners: SliceOwners, rank: int) -> list[tuple[int, int]]:
    """Return for each bucket the bytes of a member's sums, without and with padding."""
    widths = [bucket.dtype.itemsize for bucket in layout.buckets]
    ranges = [slices[rank] for slices in owners.slices]
    sizes = [(b - a) * width for (a, b), width in zip(ranges, widths, strict=False)]
    return [(size, -(-size // SLOT_BYTES) * SLOT_BYTES) for size in sizes]


# ---- Held parts of each block ----
#
# A member has one run of bytes of each block of the model, which travels as one message. Each part
# begins at a multiple of `SLOT_BYTES`. The places follow from the division of the parameters and
# the blocks only.


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a parameter, and its byte offset among the parts of its owner and block."""

    part: OwnedPart
    start: int


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """The parts of each block at each member, if parameters are divided."""

    parts: tuple[tuple[tuple[HeldPart, ...], ...], ...]
    """The parts by rank and block."""
    sizes: tuple[tuple[int, ...], ...]
    """Sizes in bytes by rank and block; multiples of SLOT_BYTES."""

    @property
    def num_blocks(self) -> int:
        return len(self.sizes[0])


def hold_blocks(
    owners: SliceOwners, blocks: Sequence[Sequence[int]], item_bytes: Sequence[int]
) -> HeldBlocks:
    """Assign byte offsets to the parts of all members. blocks: the parameter indices of each block.
    item_bytes: the element size of each parameter."""
    block_of = {index: number for number, block in enumerate(blocks) for index in block}
    parts, sizes = [], []
    for owned in owners.parts:
        held: list[list[HeldPart]] = [[] for _ in blocks]
        ends = [0] * len(blocks)
        for part in owned:
            number = block_of[part.index]
            held[number].append(HeldPart(part, ends[number]))
            size = (part.stop - part.first) * item_bytes[part.index]
            ends[number] += -(-size // SLOT_BYTES) * SLOT_BYTES
        parts.append(tuple(map(tuple, held)))
        sizes.append(tuple(ends))
    return HeldBlocks(tuple(parts), tuple(sizes))
