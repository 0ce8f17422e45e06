"""Buckets whose memory is given back: they travel through a few windows, and sums are kept apart.

A bucket has memory of its own from its first gradient until the transfer thread copies it into a
window; so no more of a gradient is here than backward is ahead of the exchange.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from stratagem.worker.exchange.buckets.gradient_buckets import GradientBuckets
from stratagem.worker.exchange.buckets.kept_sums import KeptSums

NUM_WINDOWS: Final = 4


class LentBuckets:
    """The windows of one member, from which it sends."""

    def __init__(self, buckets: GradientBuckets, kept: KeptSums) -> None:
        self.buckets, self.kept = buckets, kept
        self._windows: list[list[Tensor]] = []
        """By set."""

    def sets(self, sets: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Returns these sets as they travel: each bucket but the extras in a window that is also
        that of other buckets, `NUM_WINDOWS` apart."""
        widest = max((bucket.size_bytes for bucket in self.buckets.layout.buckets[:-1]), default=0)
        while len(self._windows) < len(sets):
            made = torch.zeros(NUM_WINDOWS, widest, dtype=torch.uint8, device=self.buckets.device)
            self._windows.append(list(made))
        return [
            [*(_as(flat, windows, bucket) for bucket, flat in enumerate(one_set[:-1])), one_set[-1]]
            for one_set, windows in zip(sets, self._windows, strict=False)
        ]

    def fill(self, bucket: int, num_partials: int) -> None:
        """Copies the partial sums of a bucket into its window, and gives its memory back."""
        if bucket == len(self.buckets.layout.buckets) - 1:
            return
        for index in range(num_partials):
            flat = self.buckets.tensors(index)[bucket]
            _as(flat, self._windows[index], bucket).copy_(flat)
        self.buckets.give_back(bucket)


def _as(flat: Tensor, windows: Sequence[Tensor], bucket: int) -> Tensor:
    return windows[bucket % NUM_WINDOWS][: flat.nbytes].view(flat.dtype)
