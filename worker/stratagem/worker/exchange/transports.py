"""The interfaces of transports, which carry step scalars, sums, parameters and slices.

A member without peers has transports that carry nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from stratagem.worker.exchange.layout import StepPlan
from stratagem.worker.exchange.slice_owners import HeldBlocks
from stratagem.worker.mesh.link import ExchangeError, Link, PendingTransfer

# ---- Step scalars ----
#
# The scalars are added over shards together with the gradients and travel in the last bucket. Only
# `StepScalars` knows their order.

FIRST_REACHED: Final = 3
"""Index of the first `reached` among the scalars, after weight, sum of the loss, and stop."""

END: Final = float(1 << 32)
"""Value added to `stop` to end the training before this step; larger than any number of shards."""


def num_scalars(num_params: int, num_rest: int) -> int:
    """Return the number of float64 values in the scalars of a step."""
    return FIRST_REACHED + num_params + num_rest


@dataclass(slots=True)
class StepScalars:
    """Scalars that travel with the gradients of one shard, or their sums over all shards. Those
    that Python needs are plain numbers, since making a tensor takes longer than using them."""

    weight: float
    """The number of rows or tokens that the loss counted."""
    loss_sum: float
    """The sum of mean loss · weight."""
    stop: float
    """Number of shards whose member requests a stop after this step, plus `END` if before it."""
    reached: Sequence[float]
    """Number of shards whose backward reached each parameter. NaN in the first marks that a codec
    met a gradient that was not finite, so that all members know."""
    rest: Tensor
    """Changes of the buffers, and further values of the trainer: 1-d float64 on the CPU."""

    @classmethod
    def of(cls, flat: Tensor, num_params: int) -> "StepScalars":
        """Return the scalars decoded from one tensor on the CPU; the inverse of `flat`."""
        num_head = FIRST_REACHED + num_params
        weight, loss_sum, stop, *reached = flat[:num_head].tolist()
        return cls(weight, loss_sum, stop, reached, flat[num_head:])

    def flat(self) -> Tensor:
        """Encode all scalars as one float64 tensor; the inverse of `of`."""
        head = [self.weight, self.loss_sum, self.stop, *self.reached]
        return torch.cat([torch.tensor(head, dtype=torch.float64), self.rest])

    @property
    def loss(self) -> float:
        """Return the mean loss; NaN if nothing was counted."""
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def is_spoiled(self) -> bool:
        """True if a codec met a gradient that was not finite."""
        return math.isnan(self.reached[0])


# ---- Transport of partial sums ----


class ReductionTransport(Protocol):
    """Interface of transports that turn all members' partial sums of each bucket into the sum, in
    every member's set 0."""

    @property
    def name(self) -> str:
        """Name of the engine, for display: "solo", "shm", "gloo ring", ..."""

    def begin(
        self, number: int, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        """Start a step. sets: set 0 and every set with a partial sum of this member. The sums of
        all buckets but the last, the extras, are divided by divisor."""

    def launch(self, bucket: int) -> None:
        """Declare this member's partial sums of a bucket final, without waiting; called once per
        bucket, in order."""

    def finish(self) -> None:
        """Block until all sums are complete and no peer reads this member's sets any more. Raises
        ExchangeError."""

    def cut(self) -> None:
        """Make `finish` raise soon. May be called from any thread."""

    def close(self) -> None:
        """Free threads and links. Nothing writes into the sets afterwards."""


class SoloTransport:
    """Transport of a lone member, whose partial sum is the sum."""

    name = "solo"

    def __init__(self) -> None:
        self._sums: Sequence[Tensor] = ()
        self._divisor: float | None = None
        self._is_cut = False

    def begin(
        self, number: int, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        self._sums, self._divisor = sets[0], divisor

    def launch(self, bucket: int) -> None: ...

    def finish(self) -> None:
        if self._is_cut:
            raise ExchangeError("the exchange was cut")
        if self._divisor is not None:
            for total in self._sums[:-1]:
                total.div_(self._divisor)

    def gather_norms(self, own: Tensor) -> list[Tensor]:
        """Return the only member's norms: a lone member owns everything."""
        return [own]

    def open_sums(self) -> Sequence[Tensor]:
        """Return the member's buckets: there is no member before it."""
        return self._sums

    def open_slices(self) -> Sequence[Sequence[Tensor]]:
        """Return the member's buckets, which have all slices."""
        return [self._sums]

    def close_slices(self) -> None:
        """Do nothing: nobody else reads the slices."""

    def cut(self) -> None:
        self._is_cut = True

    def close(self) -> None: ...


# ---- Transport of parameters ----
#
# A `ParameterTransport` brings the parts of a block of parameters from their owners to a member.


class ParameterTransport(Protocol):
    """Interface of transports that fetch all parts of a block of parameters, between the end of
    `updated` and the next step's sums."""

    held: HeldBlocks

    def memory(self) -> Sequence[Tensor]:
        """Return for each block the memory in which this member must keep its parts."""

    def fetch(self, block: int) -> Sequence[Tensor]:
        """Return each rank's part of a block as bytes, valid until the next call. Raises
        ExchangeError."""

    def end_passes(self) -> None:
        """Declare that this member needs no block before the next step or evaluation; serve others
        until all have declared so. Raises ExchangeError."""

    def updated(self) -> None:
        """Declare this member's parts updated; block until all have. Raises ExchangeError."""

    def cut(self) -> None:
        """Make calls in progress raise. May be called from any thread."""

    def close(self) -> None:
        """Free threads and links. The memory stays with its users."""


class LoneParameters:
    """A `ParameterTransport` of a lone member, which has all parameters."""

    def __init__(self, held: HeldBlocks, device: torch.device) -> None:
        self.held = held
        self._memory = own_memory(held, 0, device)

    def memory(self) -> Sequence[Tensor]:
        return self._memory

    def fetch(self, block: int) -> Sequence[Tensor]:
        return [self._memory[block]]

    def end_passes(self) -> None: ...

    def updated(self) -> None: ...

    def cut(self) -> None: ...

    def close(self) -> None: ...


def own_memory(held: HeldBlocks, rank: int, device: torch.device) -> list[Tensor]:
    """Allocate memory for a member's parts, one tensor per block."""
    return [torch.zeros(size, dtype=torch.uint8, device=device) for size in held.sizes[rank]]


# ---- Transport of slices ----


class SliceTransport(Protocol):
    """Interface of transports that bring each member's slice to all members. All make the same
    calls in the same order, between a step's `finish` and the next step's `begin`."""

    def gather_norms(self, own: Tensor) -> list[Tensor]:
        """Return every member's norms (float64), by rank, valid until the next call. Raises
        ExchangeError."""

    def open_sums(self) -> Sequence[Tensor]:
        """Block until the sums of the previous member's slice are here; `gather_norms` ends their
        validity. Return flat buckets with that slice. Raises ExchangeError."""

    def open_slices(self) -> Sequence[Sequence[Tensor]]:
        """Declare this member's slices of set 0 final; block until all members have. Return by rank
        flat buckets with that rank's slices. Raises ExchangeError."""

    def close_slices(self) -> None:
        """Block until no other member reads this member's slices any more. Raises ExchangeError."""


# ---- Transfers and additions ----
#
# Every exchange consists of these operations: a tensor goes to a peer or comes from one, and two
# tensors are added.


@dataclass(frozen=True, slots=True)
class Transfer:
    peer: int
    tag: int
    """The number that matches a send with its receive, within the step."""
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Addition:
    """One sum, out = left + right; a copy when there is no right."""

    out: Tensor
    left: Tensor
    right: Tensor | None

    def run(self) -> None:
        if self.right is None:
            self.out.copy_(self.left)
        else:
            torch.add(self.left, self.right, out=self.out)


def start_transfers(
    link: Link, first_tag: int, sends: Sequence[Transfer], receives: Sequence[Transfer]
) -> tuple[list[PendingTransfer], list[PendingTransfer]]:
    """Start transfers, ordered by peer; return (receives, sends). The lower of two members sends
    first, so that links that match transfers by order alone do not deadlock."""
    received, sent = list[PendingTransfer](), list[PendingTransfer]()
    for peer in range(link.size):
        out = [t for t in sends if t.peer == peer]
        back = [t for t in receives if t.peer == peer]
        for is_send in (True, False) if link.rank < peer else (False, True):
            if is_send:
                sent += [link.send(peer, first_tag + t.tag, t.tensor) for t in out]
            else:
                received += [link.recv(peer, first_tag + t.tag, t.tensor) for t in back]
    return received, sent
