"""The sums of a member's own slices, where the buckets that gradients travel in are given back as
soon as they are summed up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.worker.exchange.buckets.bucket_layout import BucketLayout
from stratagem.worker.exchange.buckets.slice_owners import SliceOwners


@dataclass(frozen=True, slots=True)
class KeptSums:
    """Flat sums by bucket, without the extras."""

    flats: tuple[Tensor, ...]
    starts: tuple[int, ...]
    """Of the slices, in elements of their buckets."""

    def part(self, bucket: int, start: int, stop: int) -> Tensor:
        """Returns the sums of these elements of a bucket; of none where they are no slice."""
        if start == stop:
            return self.flats[bucket][:0]
        return self.flats[bucket].narrow(0, start - self.starts[bucket], stop - start)


def keep_sums(
    layout: BucketLayout, owners: SliceOwners, rank: int, device: torch.device
) -> KeptSums:
    """Makes the storage of a member's sums."""
    ranges = [slices[rank] for slices in owners.slices]
    flats = tuple(
        torch.zeros(stop - start, dtype=layout.buckets[bucket].dtype, device=device)
        for bucket, (start, stop) in enumerate(ranges)
    )
    return KeptSums(flats, tuple(start for start, _ in ranges))
