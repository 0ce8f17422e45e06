"""Payloads that travel between a member and a parameter server: sums, or coded shards.

    SumFreight     up: the member's partial sums, bucket by bucket; down: the sums
    CodedFreight   up: the messages of the member's shards; down: the messages of all shards, or the
                   sum of what they say, whichever is fewer bytes

Both ends follow the same rules, which depend on sizes alone. Knows neither threads nor streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stratagem.common.compression import TensorLayout
from stratagem.common.compression.table import are_forwarded
from stratagem.common.numerics.shards import Node
from stratagem.worker.exchange.buckets.bucket_layout import BucketLayout
from stratagem.worker.exchange.buckets.gradient_buckets import GradientBuckets
from stratagem.worker.exchange.buckets.shard_owners import StepPlan
from stratagem.worker.exchange.coded.coded_all_gather import Summing, put
from stratagem.worker.exchange.coded.gradient_compressor import Compressor
from stratagem.worker.mesh.device_staging import host_room


@dataclass(frozen=True, slots=True)
class StreamVector:
    """One vector that a member sends."""

    bucket: int
    node: Node
    dtype: str
    numel: int
    size_bytes: int


class Freight(Protocol):
    """The payloads of one step, up and down; begun again for the next step."""

    inbox: list[Tensor]
    """What comes back is staged here, one after the other."""

    @property
    def layout(self) -> tuple[TensorLayout, ...]:
        """The tensors that are coded; empty where the entries are sums."""

    def begin(
        self, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        """Starts a step; arguments as in `ReductionTransport.begin`."""

    def entries(self) -> tuple[StreamVector, ...]:
        """Returns the vectors that this member sends up, in order."""

    def part(self, bucket: int) -> list[Tensor]:
        """Returns the vectors that can be sent once this bucket and those before it are final."""

    def unload(self) -> None:
        """Leaves the sums, divided, in set 0, once all of the inbox is staged."""


class SumFreight:
    """Partial sums, sent as they are in the buckets."""

    layout: tuple[TensorLayout, ...] = ()

    def __init__(self, layout: BucketLayout, rank: int, device: torch.device) -> None:
        """device: where the buckets are."""
        self._rank = rank
        self.inbox = [host_room((bucket.numel,), bucket.dtype, device) for bucket in layout.buckets]
        self._nodes: tuple[Node, ...] = ()
        self._sets: Sequence[Sequence[Tensor]] = ()
        self._divisor: float | None = None

    def begin(
        self, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        self._nodes, self._sets, self._divisor = step.nodes[self._rank], sets, divisor

    def entries(self) -> tuple[StreamVector, ...]:
        return tuple(
            _entry(index, node, one_set[index])
            for index in range(len(self.inbox))
            for node, one_set in zip(self._nodes, self._sets, strict=False)
        )

    def part(self, bucket: int) -> list[Tensor]:
        return [one_set[bucket] for one_set in self._sets[: len(self._nodes)]]

    def unload(self) -> None:
        put(self._sets[0], self.inbox, self._divisor, has_extras=True)


class CodedFreight:
    """Coded messages of the member's shards; what comes down, see the head of the module."""

    def __init__(self, buckets: GradientBuckets, compressor: Compressor, rank: int) -> None:
        self._buckets, self._compressor, self._rank = buckets, compressor, rank
        self.layout, self.codec = compressor.layout, compressor.name
        self.inbox: list[Tensor] = []
        self._step: StepPlan | None = None
        self._sets: Sequence[Sequence[Tensor]] = ()
        self._divisor: float | None = None

    def pays_off(self, step: StepPlan) -> bool:
        """Returns whether coded messages are fewer bytes than partial sums, over all members."""
        num_sums = sum(len(nodes) for nodes in step.nodes)
        compressor = self._compressor
        return step.num_live * compressor.message_bytes < num_sums * compressor.raw_bytes

    def begin(
        self, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        self._step, self._sets, self._divisor = step, sets, divisor
        compressor = self._compressor
        if self._are_forwarded:
            num_bytes = step.num_live * compressor.message_bytes
            self.inbox = [self._room(num_bytes, torch.uint8)]
        else:
            numel = sum(tensor.numel for tensor in compressor.layout)
            self.inbox = [
                self._room(numel, torch.float32),
                self._room(self._buckets.num_extras, torch.float64),
            ]

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        return host_room((numel,), dtype, self._buckets.device)

    @property
    def _are_forwarded(self) -> bool:
        assert self._step is not None
        compressor = self._compressor
        return are_forwarded(self._step.num_live, compressor.message_bytes, compressor.raw_bytes)

    def entries(self) -> tuple[StreamVector, ...]:
        assert self._step is not None
        size = self._compressor.message_bytes
        return tuple(StreamVector(0, Node(s, s + 1), "uint8", size, size) for s in self._step.live)

    def part(self, bucket: int) -> list[Tensor]:
        assert self._step is not None
        if bucket < len(self._buckets.layout.buckets) - 1:
            return []
        return [self._compressor.message(shard) for shard in self._step.live]

    def unload(self) -> None:
        assert self._step is not None
        if self._are_forwarded:
            self._add_up(self._step)
        else:
            self._take_sums()
        num_messages, num_sums = len(self._step.live), len(self._step.nodes[self._rank])
        compressor = self._compressor
        compressor.count(num_messages * compressor.message_bytes, num_sums * compressor.raw_bytes)

    def _add_up(self, step: StepPlan) -> None:
        compressor, size = self._compressor, self._compressor.message_bytes
        portions = compressor.portions(self._buckets.layout)
        pieces = {
            shard: compressor.cut(self.inbox[0][shard * size : (shard + 1) * size], portions)
            for shard in range(step.num_live)
            if shard not in step.live
        }
        for portion in portions:
            own = [[flats[bucket] for bucket in portion.buckets] for flats in self._sets]
            partials = dict(zip(step.nodes[self._rank], own, strict=False))
            incoming = {shard: cut[portion.index] for shard, cut in pieces.items()}
            summing = Summing(self._buckets, compressor, portion, partials, incoming)
            put(own[0], summing.total(step.num_live), self._divisor, portion.has_extras)

    def _take_sums(self) -> None:
        views, start = self._buckets.views_of(self._sets[0], self._buckets.all), 0
        for view in views:
            view.copy_(self.inbox[0][start : start + view.numel()].view(view.shape))
            start += view.numel()
        self._sets[0][-1].copy_(self.inbox[1])
        put(self._sets[0], self._sets[0], self._divisor, has_extras=True)


def _entry(bucket: int, node: Node, tensor: Tensor) -> StreamVector:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StreamVector(bucket, node, dtype, tensor.numel(), tensor.nbytes)
