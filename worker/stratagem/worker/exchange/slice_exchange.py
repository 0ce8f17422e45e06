"""One member's side of a step in which each member updates its own slice of all parameters.

The sums of gradients are with the owners of slices. Here all come to know the norm of the whole
gradient, and then the updated parameters, which take as many bytes as the sums would have. A step
that fails on the way may be applied by some members and not by others. Used by one thread. Knows
neither model nor optimizer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stratagem.common.process.failpoints import failpoint
from stratagem.worker.exchange.buckets.gradient_buckets import GradientBuckets
from stratagem.worker.exchange.buckets.kept_sums import KeptSums
from stratagem.worker.exchange.buckets.slice_owners import OwnedPart, SliceOwners
from stratagem.worker.exchange.buckets.slice_transport import SliceTransport


class SliceExchange:
    """Exchanges what the owners of slices have made of the sums of a step."""

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
        """is_mirrored: see `sliced_exchange`. kept: the own sums, where they are not in buckets."""
        self._buckets, self._owners, self._rank = buckets, owners, rank
        self._transport, self._kept = transport, kept
        self._own = owners.parts[rank]
        self._mirrored = owners.mirrored_rank(rank) if is_mirrored else None
        self._places = owners.places_of_norms()

    def divide(self, divisor: float) -> None:
        """Divides the own sums, where they are widest."""
        if self._kept is not None:
            for flat in self._kept.flats:
                flat.div_(divisor)
            return
        for flat, slices in zip(self._buckets.tensors(0), self._owners.slices, strict=False):
            start, stop = slices[self._rank]
            flat[start:stop].div_(divisor)

    def sums(self) -> list[Tensor]:
        """Returns the sums of the own parts, flat and in order, in the storage of the exchange."""
        if self._kept is not None:
            return [_kept_part_of(self._kept, part) for part in self._own]
        return [_part_of(self._buckets.tensors(0), part) for part in self._own]

    def mirrored_sums(self) -> list[Tensor]:
        """Returns the sums of the parts of the member before this one, which updates them as this
        one does; none where no slice is mirrored. Raises ExchangeError."""
        if self._mirrored is None:
            return []
        sources, parts = self._transport.open_sums(), self._owners.parts[self._mirrored]
        if self._kept is not None and self._kept.mirrored is not None:
            here = self._kept.mirrored
            there = KeptSums(list(sources), here.starts)
            found = [_kept_part_of(here, part) for part in parts]
            given = [_kept_part_of(there, part) for part in parts]
        else:
            found = [_part_of(self._buckets.tensors(0), part) for part in parts]
            given = [_part_of(sources, part) for part in parts]
        moved = [each for each in zip(found, given, strict=True) if _are_apart(*each)]
        _copy([target for target, _ in moved], [source for _, source in moved])
        return found

    def gather_norms(
        self,
        own: Sequence[Tensor | None],
        reached: Sequence[float],
        are_finite: Callable[[], bool],
    ) -> tuple[list[Tensor], bool]:
        """Returns what `gradient_norm.total_norm` needs of all gradients, and whether all elements
        of all of them are finite. Raises ExchangeError.

        own: of each own part the norms of its blocks, if there is a gradient. reached: by
        parameter, 0 where there is none. are_finite: looks at all elements of the own ones, where
        their norms do not say it.
        """
        values = [
            torch.zeros(part.num_blocks, dtype=torch.float64, device=self._buckets.device)
            if norms is None
            else norms.reshape(-1)
            for part, norms in zip(self._own, own, strict=True)
        ]
        mine = torch.cat(values).cpu() if values else torch.zeros(0, dtype=torch.float64)
        is_finite = bool(torch.isfinite(mine).all()) or are_finite()
        given = self._transport.gather_norms(torch.cat([mine, torch.tensor([float(is_finite)])]))
        found = [
            torch.cat([given[rank][at.start : at.stop] for rank, at in places])
            for places, count in zip(self._places, reached, strict=True)
            if count
        ]
        return found, all(bool(each[-1]) for each in given)

    def share(self, pieces: Sequence[Tensor], params: Sequence[nn.Parameter]) -> None:
        """Brings the updated own parts, flat and in order, into the parameters of all members, and
        theirs into these. Raises ExchangeError, after which the parameters may be of two steps."""
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


def _kept_part_of(kept: KeptSums, part: OwnedPart) -> Tensor:
    return kept.part(part.bucket, part.offset, part.offset + part.stop - part.first)


def _are_apart(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() != other.data_ptr()


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
