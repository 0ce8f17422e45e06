"""Brings the slices of all members to all of them, over a link: an all-gather of slices that need
not be equally long.

Each member sends each of its pieces to every other one. The transfers are prepared once.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from stratagem.worker.exchange.all_reduce.all_reduce_schedule import Cut, cut_slices
from stratagem.worker.exchange.all_reduce.transfer_ops import Transfer, start_transfers
from stratagem.worker.exchange.buckets.gradient_buckets import GradientBuckets
from stratagem.worker.exchange.buckets.kept_sums import KeptSums
from stratagem.worker.exchange.buckets.slice_owners import SliceOwners
from stratagem.worker.exchange.buckets.transfer_thread import MeshTransport, Turn
from stratagem.worker.mesh.link import Link


@dataclass(frozen=True, slots=True)
class Gathering:
    """The transfers of one member."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


class GatherRun:
    """Carries out gatherings in the transfer thread."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def run(self, prepared: Gathering, turn: Turn) -> None:
        turn.await_launch(0)  # the device may still be writing what is sent
        received, sent = start_transfers(
            self._link, turn.first_tag, prepared.sends, prepared.receives
        )
        turn.wait(received + sent)


class LinkSlices:
    """A `SliceTransport` over the link of a transport, in its thread."""

    def __init__(
        self,
        transport: MeshTransport,
        link: Link,
        buckets: GradientBuckets,
        owners: SliceOwners,
        *,
        is_mirrored: bool = False,
        kept: KeptSums | None = None,
    ) -> None:
        """is_mirrored: each member gets the sums of the one before it, and so not its updates.
        kept: the own sums, where they are not in buckets."""
        self._transport, self._run, self._buckets = transport, GatherRun(link), buckets
        self._size, self._rank = link.size, link.rank
        counts = [count + 1 for count in owners.num_norms]
        ends = list(accumulate(counts))
        self._norms = torch.zeros(ends[-1], dtype=torch.float64, device=buckets.device)
        self._by_rank = list(torch.split(self._norms, counts))
        places = tuple(zip([0, *ends[:-1]], ends, strict=True))
        norms = [Cut(0, False, False, places)]
        self._gather_norms = _prepare(link, norms, [self._norms], 0)
        cuts = cut_slices(buckets.layout, owners)
        self._given: Sequence[Tensor] = ()
        if kept is not None:  # there is no slice that all members have in their buckets
            if kept.mirrored is not None:
                self._gather_sums = _prepare_kept(link, cuts, owners, kept, kept.mirrored)
                self._given = kept.mirrored.flats
            return
        self._given = flats = buckets.tensors(0)
        following = {(rank, (rank + 1) % link.size) for rank in range(link.size)}
        without = following if is_mirrored else set()
        self._gather_slices = _prepare(link, cuts, flats, 1, without=without)
        pairs = {(a, b) for a in range(link.size) for b in range(link.size)}
        self._gather_sums = _prepare(link, cuts, flats, 1 + len(cuts), without=pairs - following)

    def gather_norms(self, own: Tensor) -> list[Tensor]:
        """See `SliceTransport`."""
        self._by_rank[self._rank].copy_(own)
        self._transport.run_between(self._run, self._gather_norms)
        host = self._norms.cpu()
        return list(torch.split(host, [len(each) for each in self._by_rank]))

    def open_sums(self) -> Sequence[Tensor]:
        """See `SliceTransport`: they come into the own buckets, or where they are kept apart."""
        self._transport.run_between(self._run, self._gather_sums)
        return self._given

    def open_slices(self) -> Sequence[Sequence[Tensor]]:
        """See `SliceTransport`: all come into the own buckets."""
        self._transport.run_between(self._run, self._gather_slices)
        return [self._buckets.tensors(0)] * self._size

    def close_slices(self) -> None:
        """See `SliceTransport`: all have been sent."""


def num_gather_tags(buckets: GradientBuckets, owners: SliceOwners) -> int:
    """Returns how many tags the gatherings of one step use."""
    return 1 + 2 * len(cut_slices(buckets.layout, owners))


def _prepare_kept(
    link: Link, cuts: Sequence[Cut], owners: SliceOwners, kept: KeptSums, mirrored: KeptSums
) -> Gathering:
    """Returns this member's transfers, after which the next one has its sums, and this one those of
    the member before it; tags as with `_prepare` after the slices."""
    before, after = owners.mirrored_rank(link.rank), (link.rank + 1) % link.size
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    for tag, cut in enumerate(cuts, start=1 + len(cuts)):
        (start, stop), (first, end) = cut.slices[link.rank], cut.slices[before]
        if start < stop:
            sends.append(Transfer(after, tag, kept.part(cut.bucket, start, stop)))
        if first < end:
            receives.append(Transfer(before, tag, mirrored.part(cut.bucket, first, end)))
    return Gathering(tuple(sends), tuple(receives))


def _prepare(
    link: Link,
    cuts: Sequence[Cut],
    flats: Sequence[Tensor],
    first_tag: int,
    *,
    without: Set[tuple[int, int]] = frozenset(),
) -> Gathering:
    """Returns this member's transfers, after which every flat tensor has the slices of all; they
    use as many tags from `first_tag` on as there are pieces. without: (owner, peer) between which
    nothing goes."""
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    for number, cut in enumerate(cuts):
        for owner, (start, stop) in enumerate(cut.slices):
            if start == stop:
                continue
            piece, tag = flats[cut.bucket][start:stop], first_tag + number
            if owner == link.rank:
                peers = (peer for peer in range(link.size) if peer != owner)
                sends += [Transfer(p, tag, piece) for p in peers if (owner, p) not in without]
            elif (owner, link.rank) not in without:
                receives.append(Transfer(owner, tag, piece))
    return Gathering(tuple(sends), tuple(receives))
