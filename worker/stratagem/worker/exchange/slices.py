"""Exchange the slices of a step in which each member updates its own slice of all parameters.

The owners of slices have the sums of gradients. Here all members learn the norm of the whole
gradient, and then the updated parameters, which take as many bytes as the sums would have. When a
step fails on the way, some members may have applied it and others not. Used by one thread. The
module knows neither model nor optimizer.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from stratagem.common.process.failpoints import failpoint
from stratagem.worker.exchange.all_reduce import Cut, cut_slices
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.slice_owners import KeptSums, OwnedPart, SliceOwners
from stratagem.worker.exchange.transfer_thread import MeshTransport, Turn
from stratagem.worker.exchange.transports import SliceTransport, Transfer, start_transfers
from stratagem.worker.mesh.link import Link

# ---- Slice exchange ----


class SliceExchange:
    """Exchanges the norms and updates of a step among the owners of slices."""

    def __init__(
        self,
        buckets: GradientBuckets,
        owners: SliceOwners,
        rank: int,
        transport: SliceTransport,
        *,
        is_mirrored: bool = False,
        kept: KeptSums | None = None,
    ) -> None:
        """Make the exchange. is_mirrored: this member also updates the previous member's slice.
        kept: the storage of this member's sums, if they are not in buckets."""
        self._buckets, self._owners, self._rank = buckets, owners, rank
        self._transport, self._kept_sums = transport, kept
        self._parts = owners.parts[rank]
        self._mirrored = owners.mirrored_rank(rank) if is_mirrored else None
        self._places = owners.places_of_norms()

    def divide(self, divisor: float) -> None:
        """Divide this member's sums, in the bucket's (widest) type."""
        if self._kept_sums is not None:
            for flat in self._kept_sums.flats:
                flat.div_(divisor)
            return
        for flat, slices in zip(self._buckets.tensors(0), self._owners.slices, strict=False):
            start, stop = slices[self._rank]
            flat[start:stop].div_(divisor)

    def sums(self) -> list[Tensor]:
        """Return the flat sums of this member's parts, in order: views of exchanged storage."""
        if self._kept_sums is not None:
            return [_kept_part_of(self._kept_sums, part) for part in self._parts]
        return [_part_of(self._buckets.tensors(0), part) for part in self._parts]

    def mirrored_sums(self) -> list[Tensor]:
        """Return the sums of the previous member's parts, which this member updates too; none
        without a mirror. Raises ExchangeError."""
        if self._mirrored is None:
            return []
        sources, parts = self._transport.open_sums(), self._owners.parts[self._mirrored]
        if self._kept_sums is not None and self._kept_sums.mirrored is not None:
            mirror = self._kept_sums.mirrored
            origin = KeptSums(list(sources), mirror.starts)
            targets = [_kept_part_of(mirror, part) for part in parts]
            given = [_kept_part_of(origin, part) for part in parts]
        else:
            targets = [_part_of(self._buckets.tensors(0), part) for part in parts]
            given = [_part_of(sources, part) for part in parts]
        moved = [pair for pair in zip(targets, given, strict=True) if _are_apart(*pair)]
        _copy([target for target, _ in moved], [source for _, source in moved])
        return targets

    def gather_norms(
        self,
        own: Sequence[Tensor | None],
        reached: Sequence[float],
        are_finite: Callable[[], bool],
    ) -> tuple[list[Tensor], bool]:
        """Exchange norms; return (input of `layout.total_norm` for all gradients, whether all are
        finite). Raises ExchangeError.

        own: the block norms of each own part, None without a gradient. reached: by parameter, 0 if
        there is no gradient. are_finite: checks the own gradients element by element, called if the
        norms do not suffice.
        """
        values = [
            torch.zeros(part.num_blocks, dtype=torch.float64, device=self._buckets.device)
            if norms is None
            else norms.reshape(-1)
            for part, norms in zip(self._parts, own, strict=True)
        ]
        numbers = torch.cat(values).cpu() if values else torch.zeros(0, dtype=torch.float64)
        is_finite = bool(torch.isfinite(numbers).all()) or are_finite()
        given = self._transport.gather_norms(torch.cat([numbers, torch.tensor([float(is_finite)])]))
        norm_parts = [
            torch.cat([given[rank][at.start : at.stop] for rank, at in places])
            for places, count in zip(self._places, reached, strict=True)
            if count
        ]
        return norm_parts, all(bool(flat[-1]) for flat in given)

    def share(self, pieces: Sequence[Tensor], params: Sequence[nn.Parameter]) -> None:
        """Copy the updated own parts (flat, in order) into all members' parameters, and the others'
        parts into this one's. Raises ExchangeError; the parameters may then be of two steps."""
        with torch.no_grad():
            _copy(self.sums(), [piece.detach() for piece in pieces])
            failpoint("worker.slices.updated")
            sources = self._transport.open_slices()
            targets, updated = list[Tensor](), list[Tensor]()
            for rank, parts in enumerate(self._owners.parts):
                if rank in (self._rank, self._mirrored):
                    continue
                for part in parts:
                    flat = params[part.index].detach().view(-1)
                    targets.append(flat[part.first : part.stop])
                    updated.append(_part_of(sources[rank], part))
            _copy(targets, updated)
            self._transport.close_slices()


def _part_of(flats: Sequence[Tensor], part: OwnedPart) -> Tensor:
    return flats[part.bucket].narrow(0, part.offset, part.stop - part.first)


def _kept_part_of(sums: KeptSums, part: OwnedPart) -> Tensor:
    return sums.part(part.bucket, part.offset, part.offset + part.stop - part.first)


def _are_apart(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() != other.data_ptr()


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


# ---- All-gather of slices over a link ----
#
# Slices may have different sizes. Each member sends each of its pieces to every other one. The
# transfers are prepared once.


@dataclass(frozen=True, slots=True)
class Gathering:
    """One member's transfers that gather norms, sums or slices, prepared for all steps."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


class GatherRun:
    """A `Run` that carries out prepared gatherings in the transfer thread."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def run(self, prepared: Gathering, turn: Turn) -> None:
        turn.await_launch(0)  # the device may still be writing the pieces
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
        """Prepare the transfers. is_mirrored: each member gets the previous one's sums instead of
        its updates. kept: the storage of own sums, if not in buckets."""
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
        if kept is not None:  # the slices of the others are in no bucket
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
        """Return every member's norms, by rank; they are exchanged over the link."""
        self._by_rank[self._rank].copy_(own)
        self._transport.run_between(self._run, self._gather_norms)
        host = self._norms.cpu()
        return list(torch.split(host, [len(norms) for norms in self._by_rank]))

    def open_sums(self) -> Sequence[Tensor]:
        """Receive the previous member's sums; return the buckets or the storage that have them."""
        self._transport.run_between(self._run, self._gather_sums)
        return self._given

    def open_slices(self) -> Sequence[Sequence[Tensor]]:
        """Receive all other slices into this member's buckets; return these for each rank."""
        self._transport.run_between(self._run, self._gather_slices)
        return [self._buckets.tensors(0)] * self._size

    def close_slices(self) -> None:
        """Do nothing: the slices had been sent when `open_slices` returned."""


def num_gather_tags(buckets: GradientBuckets, owners: SliceOwners) -> int:
    """Return the number of message tags that the gatherings of one step use."""
    return 1 + 2 * len(cut_slices(buckets.layout, owners))


def _prepare_kept(
    link: Link, cuts: Sequence[Cut], owners: SliceOwners, sums: KeptSums, mirrored: KeptSums
) -> Gathering:
    """Return the transfers that send this member's sums to the next member and receive the previous
    one's; their tags follow those of `_prepare`."""
    before, after = owners.mirrored_rank(link.rank), (link.rank + 1) % link.size
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    for tag, cut in enumerate(cuts, start=1 + len(cuts)):
        (start, stop), (first, end) = cut.slices[link.rank], cut.slices[before]
        if start < stop:
            sends.append(Transfer(after, tag, sums.part(cut.bucket, start, stop)))
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
    """Return this member's transfers that bring all slices into every flat tensor, with one tag per
    piece from `first_tag` on. without: pairs (owner, peer) to skip."""
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
