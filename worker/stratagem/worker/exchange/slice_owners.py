"""Divide all parameters among the members of an exchange that each keep the optimizer state of
their own slice (ZeRO, https://arxiv.org/abs/1910.02054).

A slice is a run of whole blocks of `layout.BLOCK` elements in each bucket. So the norm of a
gradient is made of the same blocks whoever owns them, and the part of a parameter that a member
updates ends with a block or with the parameter: kernels that treat the last elements of a tensor
apart, and round them otherwise, do so at the same elements as with the whole parameter. The
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
    """The elements [first, stop) of a parameter, which are one member's, and their place."""

    index: int
    """Of the parameter, among all of them."""
    first: int
    stop: int
    bucket: int
    offset: int
    """Of the first, in elements of the bucket."""

    @property
    def num_blocks(self) -> int:
        """Return how many norms describe its gradient; one where it has no element."""
        return max(1, -(-(self.stop - self.first) // BLOCK))


@dataclass(frozen=True, slots=True)
class SliceOwners:
    """The slices of all members."""

    slices: tuple[tuple[tuple[int, int], ...], ...]
    """By bucket, without the extras, and by rank: the elements [start, stop), which may be none."""
    parts: tuple[tuple[OwnedPart, ...], ...]
    """By rank, in order of parameter: at most one of each."""

    @property
    def num_norms(self) -> tuple[int, ...]:
        """Return by rank how many norms describe the gradients of its parts."""
        return tuple(sum(part.num_blocks for part in own) for own in self.parts)

    def mirrored_rank(self, rank: int) -> int:
        """Return whose parts the member of this rank keeps a copy of: of the one before it."""
        return (rank - 1) % len(self.parts)

    def places_of_norms(self) -> list[list[tuple[int, range]]]:
        """Return for each parameter where its norms stand, in order: the ranks, and the places
        among the norms of each."""
        found: dict[int, list[tuple[int, int, range]]] = {}
        for rank, own in enumerate(self.parts):
            start = 0
            for part in own:
                at = range(start, start + part.num_blocks)
                found.setdefault(part.index, []).append((part.first, rank, at))
                start = at.stop
        return [[(rank, at) for _, rank, at in sorted(found[i])] for i in range(len(found))]


def divide_slices(layout: BucketLayout, size: int) -> SliceOwners:
    """Divides every bucket but the extras among `size` members: in order of rank, and as equally as
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
            rank = min(rank, size - 1)  # a block without elements behind the last one
            before += numel
            if starts[rank] is None:
                starts[rank] = block.offset
            held = parts[rank].get(block.index)
            first, offset = (held.first, held.offset) if held else (block.first, block.offset)
            parts[rank][block.index] = OwnedPart(block.index, first, block.stop, bucket, offset)
        slices.append(_ranges(starts, flat.numel))
    ordered = (tuple(own[index] for index in sorted(own)) for own in parts)
    return SliceOwners(tuple(slices), tuple(ordered))


def _blocks(layout: BucketLayout, bucket: int) -> Iterator[OwnedPart]:
    """Yields the blocks of a bucket in the order in which they lie there."""

    def place(slot: Slot) -> tuple[int, int]:
        return slot.offset, -slot.index  # slots without elements share their offset with the next

    for slot in sorted((s for s in layout.slots if s.bucket == bucket), key=place):
        numel = slot.shape.numel()
        for first in range(0, max(1, numel), BLOCK):
            stop = min(first + BLOCK, numel)
            yield OwnedPart(slot.index, first, stop, bucket, slot.offset + first)


def _ranges(starts: list[int | None], numel: int) -> tuple[tuple[int, int], ...]:
    """Returns the range of each member: it ends where the next one that has any begins."""
    ranges: list[tuple[int, int]] = []
    end = numel
    for start in reversed(starts):
        ranges.append((end, end) if start is None else (start, end))
        end = end if start is None else start
    return tuple(reversed(ranges))


# ---- Sums of own slices ----
#
# The sums have storage of their own where the buckets of gradients are given back as soon as they
# are summed up.


@dataclass(frozen=True, slots=True)
class KeptSums:
    """Flat sums by bucket, without the extras."""

    flats: list[Tensor]
    starts: tuple[int, ...]
    """Of the slices, in elements of their buckets."""
    mirrored: "KeptSums | None" = None
    """A place for those of the member before this one, which are mirrored here."""

    def part(self, bucket: int, start: int, stop: int) -> Tensor:
        """Returns the sums of these elements of a bucket; of none where they are no slice."""
        if start == stop:
            return self.flats[bucket][:0]
        return self.flats[bucket].narrow(0, start - self.starts[bucket], stop - start)

    def move_to(self, flats: Sequence[Tensor]) -> None:
        """Has sums stand here from now on; those of before are not copied."""
        self.flats[:] = flats


def keep_sums(
    layout: BucketLayout,
    owners: SliceOwners,
    rank: int,
    device: torch.device,
    *,
    is_mirrored: bool = False,
) -> KeptSums:
    """Makes the storage of a member's sums. is_mirrored: also of those of the member before it."""
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
    """Returns by rank how much memory `kept_in` needs for a member's sums; none where they are not
    mirrored."""
    if kept is None or kept.mirrored is None or owners is None:
        return [0] * size
    return [sum(up for _, up in _places(layout, owners, rank)) for rank in range(size)]


def kept_in(memory: Tensor, layout: BucketLayout, owners: SliceOwners, rank: int) -> list[Tensor]:
    """Returns a member's flat sums by bucket in this memory, which is bytes; each begins on
    SLOT_BYTES."""
    found, start = list[Tensor](), 0
    for bucket, (num_bytes, size) in enumerate(_places(layout, owners, rank)):
        found.append(memory[start : start + num_bytes].view(layout.buckets[bucket].dtype))
        start += size
    return found


def _places(layout: BucketLayout, owners: SliceOwners, rank: int) -> list[tuple[int, int]]:
    """Returns by bucket the bytes of a member's sums, and those up to the next ones."""
    widths = [bucket.dtype.itemsize for bucket in layout.buckets]
    ranges = [slices[rank] for slices in owners.slices]
    sizes = [(b - a) * width for (a, b), width in zip(ranges, widths, strict=False)]
    return [(size, -(-size // SLOT_BYTES) * SLOT_BYTES) for size in sizes]


# ---- Held parts of each block ----
#
# A member holds one run of bytes of each block of the model, which travels as one message. Each
# part begins on `SLOT_BYTES`. The places follow from the division of the parameters and the blocks
# only.


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a parameter, and where its bytes begin among those of its owner and block."""

    part: OwnedPart
    start: int


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """What each member holds of each block."""

    parts: tuple[tuple[tuple[HeldPart, ...], ...], ...]
    """By rank and block."""
    sizes: tuple[tuple[int, ...], ...]
    """By rank and block, in bytes; multiples of SLOT_BYTES."""

    @property
    def num_blocks(self) -> int:
        return len(self.sizes[0])


def hold_blocks(
    owners: SliceOwners, blocks: Sequence[Sequence[int]], item_bytes: Sequence[int]
) -> HeldBlocks:
    """Places the parts of all members. blocks: of each the numbers of its parameters. item_bytes:
    of an element of each parameter."""
    block_of = {index: number for number, block in enumerate(blocks) for index in block}
    parts, sizes = [], []
    for own in owners.parts:
        held: list[list[HeldPart]] = [[] for _ in blocks]
        ends = [0] * len(blocks)
        for part in own:
            number = block_of[part.index]
            held[number].append(HeldPart(part, ends[number]))
            size = (part.stop - part.first) * item_bytes[part.index]
            ends[number] += -(-size // SLOT_BYTES) * SLOT_BYTES
        parts.append(tuple(map(tuple, held)))
        sizes.append(tuple(ends))
    return HeldBlocks(tuple(parts), tuple(sizes))
