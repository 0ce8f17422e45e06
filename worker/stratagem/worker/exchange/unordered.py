"""All-reduces whose order of addition depends on the members, for jobs that gave up equal bits.

`RingMethod` is the ring all-reduce of Patarasuk & Yuan (2009); `NativeMethod` uses that of the
backend. In both a member first adds its own shards, so that every element is sent 2(N - 1)/N times,
for any number of shards. All members get the same bits, which depend on the members.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.common.numerics.shards import split_rows
from stratagem.worker.exchange.layout import BucketLayout, StepPlan
from stratagem.worker.exchange.transfer_thread import Turn
from stratagem.worker.exchange.transports import Transfer, start_transfers
from stratagem.worker.mesh.link import CollectiveLink, Link


@dataclass(frozen=True, slots=True)
class Whole:
    """One bucket of a member: the tensor that is sent and that receives the sum."""

    total: Tensor
    others: tuple[Tensor, ...]
    """The partial sums to be added to `total` first."""
    is_empty: bool
    """True if this member has no live shard and contributes zeros."""
    is_extras: bool

    def fold(self) -> None:
        if self.is_empty:
            self.total.zero_()
        for other in self.others:
            self.total.add_(other)

    def divide(self, divisor: float | None) -> None:
        if divisor is not None and not self.is_extras:
            self.total.div_(divisor)


class RingMethod:
    """The ring all-reduce: N - 1 steps add a chunk on its way around the ring, N - 1 more carry the
    sums around.

    It sends 2(N - 1) L elements in total for L elements; chunk sizes differ by at most one.
    """

    suffix = " ring"

    def __init__(self, link: Link, layout: BucketLayout) -> None:
        self._link = link
        self._steps_per_bucket = 2 * (link.size - 1)
        self.num_tags = len(layout.buckets) * self._steps_per_bucket

    def prepare(self, step: StepPlan, sets: Sequence[Sequence[Tensor]]) -> list[Whole]:
        return wholes(step, self._link.rank, sets)

    def run(self, prepared: list[Whole], turn: Turn) -> None:
        for index, whole in enumerate(prepared):
            turn.await_launch(index)
            whole.fold()
            self._sum(whole.total, turn.first_tag + index * self._steps_per_bucket, turn)
            whole.divide(turn.divisor)  # the same division of the same bits everywhere

    def _sum(self, flat: Tensor, first_tag: int, turn: Turn) -> None:
        rank, size = self._link.rank, self._link.size
        chunks = [flat[part.start : part.stop] for part in split_rows(flat.numel(), size)]
        stage = torch.empty_like(chunks[0])
        for step in range(size - 1):
            received = chunks[(rank - step - 1) % size]
            arriving = stage[: received.numel()]
            self._pass_on(chunks[(rank - step) % size], arriving, first_tag + step, turn)
            received.add_(arriving)
        for step in range(size - 1):
            tag = first_tag + size - 1 + step
            self._pass_on(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size], tag, turn)

    def _pass_on(self, given: Tensor, target: Tensor, tag: int, turn: Turn) -> None:
        rank, size = self._link.rank, self._link.size
        sends = [Transfer((rank + 1) % size, tag, given)] if given.numel() else []
        receives = [Transfer((rank - 1) % size, tag, target)] if target.numel() else []
        received, sent = start_transfers(self._link, 0, sends, receives)
        turn.wait(received + sent)


class NativeMethod:
    """The backend's all-reduce, with all launched buckets in transfer at once."""

    suffix = " native"
    num_tags = 0

    def __init__(self, link: CollectiveLink) -> None:
        self._link = link

    def prepare(self, step: StepPlan, sets: Sequence[Sequence[Tensor]]) -> list[Whole]:
        return wholes(step, self._link.rank, sets)

    def run(self, prepared: list[Whole], turn: Turn) -> None:
        works = []
        for index, whole in enumerate(prepared):
            turn.await_launch(index)
            whole.fold()
            if whole.total.numel():
                works.append((whole, self._link.all_reduce(whole.total)))
        for whole, work in works:
            turn.wait([work])
            whole.divide(turn.divisor)


def wholes(step: StepPlan, rank: int, sets: Sequence[Sequence[Tensor]]) -> list[Whole]:
    """Return the `Whole` of each bucket in a step."""
    num_partials = len(step.nodes[rank])
    return [
        Whole(
            total=total,
            others=tuple(sets[index][bucket] for index in range(1, num_partials)),
            is_empty=num_partials == 0,
            is_extras=bucket == len(sets[0]) - 1,
        )
        for bucket, total in enumerate(sets[0])
    ]
