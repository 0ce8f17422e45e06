"""The interface of what brings the slices of all members to all of them, between the sums of one
step and the next step."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class SliceTransport(Protocol):
    """Brings to all members what each has made of its slice. All make the same calls in the same
    order, between a step's `finish` and the next step's `begin`."""

    def gather_norms(self, own: Tensor) -> list[Tensor]:
        """Returns the float64 numbers that each member gives, by rank; valid until the next call.
        Raises ExchangeError."""

    def open_sums(self) -> Sequence[Tensor]:
        """Blocks until the sums of the slice of the member before this one are final, which
        `gather_norms` ends. Returns flat buckets in which they stand; only that slice of each
        where sums are kept apart. Raises ExchangeError."""

    def open_slices(self) -> Sequence[Sequence[Tensor]]:
        """Declares the own slices of set 0 final, and blocks until all are. Returns by rank flat
        buckets in which the slices of that member stand. Raises ExchangeError."""

    def close_slices(self) -> None:
        """Blocks until no other member reads the own slices any more. Raises ExchangeError."""
