"""The division of all parameters among the members of an exchange, where each keeps the optimizer
state of its own slice (ZeRO, https://arxiv.org/abs/1910.02054).

A slice is a run of whole blocks of `gradient_norm.BLOCK` elements in each bucket. So the norm of a
gradient is made of the same blocks whoever owns them, and what a member updates of a parameter ends
with a block or with the parameter: kernels that treat the last elements of a tensor apart, and
round them otherwise, do so at the same elements as with the whole parameter. Follows from the
layout and the number of members only. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stratagem.worker.exchange.buckets.bucket_layout import BucketLayout, Slot
from stratagem.worker.exchange.buckets.gradient_norm import BLOCK


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
