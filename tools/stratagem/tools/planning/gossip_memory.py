"""Computes the memory that a worker needs for nodes under Decentralized besides its own models.

Every own node and every neighbour of one is held again: bucket by bucket while they are mixed,
or, with a codec, as a public copy that stays. Of the member that listens to most nodes.
"""

from dataclasses import dataclass
from typing import Final

import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.compression import Layout
from stratagem.common.job import JobSpec
from stratagem.common.numerics.shards import assign_shards
from stratagem.common.strategy.topology import graph_of
from stratagem.tools.planning.codec_memory import codec_memory
from stratagem.worker.exchange.gossip import SLICE_ELEMENTS, WINDOW
from stratagem.worker.exchange.layout import plan_buckets

_DOUBLE: Final = 8
_SCRATCH_BYTES: Final = 4 * SLICE_ELEMENTS * _DOUBLE
_MIXING_ARRAYS: Final = 5
"""float64 arrays of one tensor at a time while copies are mixed."""


@dataclass(frozen=True, slots=True)
class NodeCopies:
    """num_nodes: own and neighbours. held: bytes from step to step. moment: and at the mixing."""

    num_nodes: int
    held: int
    moment: int


def num_known(topology: str, num_nodes: int, num_members: int, seed: int) -> int:
    """Return the largest number of nodes, own ones and their neighbours, that any one member
    handles."""
    try:
        neighbours = graph_of(topology, num_nodes, seed)
    except ValueError as error:
        raise InvalidInputError.at("strategy.aggregation.topology", str(error)) from error
    return max(
        len({*own, *(j for node in own for j in neighbours[node])})
        for own in assign_shards(num_nodes, num_members)
    )


def plain_copies(num_nodes: int, layout: Layout, dtype: torch.dtype) -> NodeCopies:
    """Each of the buckets under way, of all nodes, and one that is being mixed."""
    tensors = [torch.empty(spec.shape, dtype=dtype, device="meta") for spec in layout]
    slots = [0] * WINDOW
    for index, bucket in enumerate(plan_buckets(tensors)):
        size = bucket.numel * dtype.itemsize
        slots[index % WINDOW] = max(slots[index % WINDOW], size)
    held = num_nodes * sum(slots) + max(slots) + _SCRATCH_BYTES
    return NodeCopies(num_nodes, held, 0)


def coded_copies(num_nodes: int, num_own: int, layout: Layout, job: JobSpec) -> NodeCopies:
    """Public copies of all, and what the codec keeps of the own ones; a payload of each, and what
    coding or mixing one needs."""
    assert job.compression is not None
    codec = codec_memory(job.compression, layout, with_feedback=False)
    raw_bytes = sum(spec.raw_bytes for spec in layout)
    largest = max((spec.numel for spec in layout), default=0)
    held = num_nodes * raw_bytes + num_own * codec.state
    # The moves of a node, or its copy before and after one.
    at_once = max(codec.scratch + raw_bytes, 2 * raw_bytes, _MIXING_ARRAYS * _DOUBLE * largest)
    return NodeCopies(num_nodes, held, num_nodes * codec.payload + at_once)
