"""The sums of a member's own slices, where the buckets that gradients travel in are given back as
soon as they are summed up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.worker.exchange.buckets.bucket_layout import SLOT_BYTES, BucketLayout
from stratagem.worker.exchange.buckets.slice_owners import SliceOwners


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
