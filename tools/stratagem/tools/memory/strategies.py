"""Compute the memory that a worker needs for its strategy or codec besides its own models.

The parts are the copies of nodes under Decentralized, the messages of outer gradients, the codec,
the stages of a pipeline, and the states that clients of federations begin from.
"""

import math
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.compression import Layout, TensorLayout, make_codec
from stratagem.common.job import CompressionSpec, JobSpec
from stratagem.common.model.program import ModelProgram
from stratagem.common.model.stages import plan_stages
from stratagem.common.numerics.shards import assign_shards
from stratagem.common.pipeline.schedules import choose
from stratagem.common.pipeline.simulation import peak_live
from stratagem.common.strategy import (
    Federated,
    Local,
    ModelParallel,
    Pipeline,
    PopulationBased,
    Strategy,
)
from stratagem.common.strategy.choices import AUTO
from stratagem.common.strategy.local_steps import fragments_of
from stratagem.common.strategy.topology import graph_of
from stratagem.common.tensors.local_files import MAX_COPY_BYTES
from stratagem.tools.memory.live_bytes import LiveBytes
from stratagem.tools.memory.play import Reading, Site, gather_shapes, play_training
from stratagem.worker.exchange.gossip import SLICE_ELEMENTS, WINDOW
from stratagem.worker.exchange.layout import ShardOwners, plan_buckets
from stratagem.worker.host.blobs import MAX_FEDERATIONS, NUM_STATES
from stratagem.worker.models.build import build_shapes, node_modules
from stratagem.worker.models.nodes import program_of
from stratagem.worker.models.program import Slots, run_calls
from stratagem.worker.process.settings import MAX_BLOB_MEMORY_BYTES

# ---- Copies of gossip nodes ----
#
# Every own node and every neighbour of one is held again: bucket by bucket while they are mixed,
# or, with a codec, as a public copy that stays. The result is that of the member that listens to
# most nodes.

_DOUBLE: Final = 8
_SCRATCH_BYTES: Final = 4 * SLICE_ELEMENTS * _DOUBLE
_MIXING_ARRAYS: Final = 5
"""The number of float64 arrays of a tensor that exist while copies of gossip nodes are mixed."""


@dataclass(frozen=True, slots=True)
class NodeCopies:
    """The memory for copies of gossip nodes' models. num_nodes: own nodes and neighbours. held:
    bytes kept from step to step. moment: further bytes while copies are mixed."""

    num_nodes: int
    held: int
    moment: int


def num_known(topology: str, num_nodes: int, num_members: int, seed: int) -> int:
    """Return the most gossip nodes that one member handles: its own and their neighbours."""
    try:
        neighbours = graph_of(topology, num_nodes, seed)
    except ValueError as error:
        raise InvalidInputError.at("strategy.aggregation.topology", str(error)) from error
    return max(
        len({*own, *(j for node in own for j in neighbours[node])})
        for own in assign_shards(num_nodes, num_members)
    )


def plain_copies(num_nodes: int, layout: Layout, dtype: torch.dtype) -> NodeCopies:
    """Return the memory for uncoded copies of nodes: buckets in transfer, and one in mixing."""
    tensors = [torch.empty(spec.shape, dtype=dtype, device="meta") for spec in layout]
    slots = [0] * WINDOW
    for index, bucket in enumerate(plan_buckets(tensors)):
        size = bucket.numel * dtype.itemsize
        slots[index % WINDOW] = max(slots[index % WINDOW], size)
    held = num_nodes * sum(slots) + max(slots) + _SCRATCH_BYTES
    return NodeCopies(num_nodes, held, 0)


def coded_copies(num_nodes: int, num_own: int, layout: Layout, job: JobSpec) -> NodeCopies:
    """Return the memory for coded copies of gossip nodes: public copies of all nodes, the codec
    state of own nodes, one payload per node, and scratch to code or mix one copy."""
    assert job.compression is not None
    codec = codec_memory(job.compression, layout, with_feedback=False)
    raw_bytes = sum(spec.raw_bytes for spec in layout)
    largest = max((spec.numel for spec in layout), default=0)
    held = num_nodes * raw_bytes + num_own * codec.state
    # The moves of a node, or its copy before and after one.
    at_once = max(codec.scratch + raw_bytes, 2 * raw_bytes, _MIXING_ARRAYS * _DOUBLE * largest)
    return NodeCopies(num_nodes, held, num_nodes * codec.payload + at_once)


# ---- Messages of outer gradients ----
#
# Outer gradients may be exchanged in few bits. A replica's share of a fragment is coded when the
# fragment is cut, and its message kept until the sums have arrived. At most one fragment is under
# way at a time. The numbers are those of codecs on the host.


@dataclass(frozen=True, slots=True)
class OuterMessages:
    """The memory for messages of outer gradients, the changes of replicas with local steps.
    messages: bytes for all own replicas. moment: further bytes while one message is coded."""

    messages: int
    moment: int


def outer_messages(
    spec: CompressionSpec, layout: Sequence[TensorLayout], num_fragments: int, num_replicas: int
) -> OuterMessages:
    """Measure the memory of messages of outer gradients, for num_replicas of one worker and the
    largest fragment."""
    places = fragments_of([tensor.numel for tensor in layout], num_fragments)
    codecs = [codec_memory(spec, layout[part.start : part.stop]) for part in places]
    return OuterMessages(
        num_replicas * max(codec.payload for codec in codecs),
        max(codec.scratch for codec in codecs),
    )


# ---- Memory of a codec ----
#
# The memory is measured by coding a small copy of the layout. All codecs take memory in proportion
# to the elements, so a layout of the same proportions gives the memory per element; a change to a
# codec need not change a formula here. The numbers are those of codecs on the host.

_MAX_ELEMENTS: Final = 1 << 20
"""The size of the smaller layout that is coded in place of the real one, to save time."""


@dataclass(frozen=True, slots=True)
class CodecMemory:
    """The memory that a codec takes for one shard, in bytes."""

    payload: int
    state: int
    """The bytes of a codec's state kept from step to step, such as residuals and bases."""
    scratch: int
    """The bytes used, beyond the payload and the new state, while a shard is coded and decoded."""


def codec_memory(
    spec: CompressionSpec, layout: Layout, *, with_feedback: bool = True
) -> CodecMemory:
    """Measure the memory of the codec of a section `compression`, for tensors of these shapes."""
    small = scaled_down(layout, _MAX_ELEMENTS)
    times = max(1.0, _numel(layout) / max(1, _numel(small)))
    codec = make_codec(spec, small, 0, with_feedback=with_feedback)
    draw = np.random.default_rng(0)
    values = [draw.standard_normal(tensor.numel, np.float32) for tensor in small]
    before = codec.initial_state()
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        payload, after = codec.encode(values, before, 1)
        decoded = codec.decode(payload, 1)
        peak = tracemalloc.get_traced_memory()[1] - start
    finally:
        if not was_tracing:
            tracemalloc.stop()
    del decoded
    state = sum(value.nbytes for value in after.values())
    return CodecMemory(
        payload=make_codec(spec, layout, 0, with_feedback=with_feedback).payload_bytes,
        state=round(times * state),
        scratch=round(times * max(0, peak - payload.nbytes - state)),
    )


def scaled_down(layout: Layout, max_elements: int) -> Sequence[TensorLayout]:
    """Return a layout of smaller tensors: as many dimensions, about the same shares of elements."""
    total = _numel(layout)
    if total <= max_elements:
        return layout
    share = max_elements / total

    def shrunk(shape: tuple[int, ...]) -> tuple[int, ...]:
        factor = share ** (1 / max(1, len(shape)))
        return tuple(max(1, math.floor(size * factor)) if size else 0 for size in shape)

    return [TensorLayout(tensor.name, shrunk(tensor.shape)) for tensor in layout]


def _numel(layout: Layout) -> int:
    return sum(tensor.numel for tensor in layout)


# ---- Memory of stages ----
#
# One micro-batch is run through the whole model with fake tensors, node by node; the schedule says
# how many of them a stage keeps at one time.


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The costs of one node (module) of a model: bytes of parameters and buffers, and bytes that
    one pass keeps for backward."""

    parameters: int
    buffers: int
    kept: int
    flops: int
    """The floating-point operations of a forward pass: matrix products, convolutions, attention."""


@dataclass(frozen=True, slots=True)
class StageReading:
    """The memory that the worker of a pipeline stage holds; rows: those of a micro-batch."""

    reading: Reading
    rows: int
    name: str
    """The name of the stage, such as "stage 0 of 2"."""
    kept: str
    """The passes whose activations the stage keeps, as in "3 micro-batches at one time"."""


def play_stages(
    job: JobSpec, site: Site, strategy: ModelParallel, num_rows: int
) -> list[StageReading]:
    """Simulate all stages of a pipeline for a batch (or a replica's shard) of num_rows rows."""
    match strategy.communication:
        case Pipeline(micro_batch_size):
            rows = min(micro_batch_size, num_rows)
        case _:
            rows = num_rows
    program, costs = node_costs(job, site, rows)
    alone = job.altered(batch_size=rows, strategy=Local())
    whole = play_training(alone, site, ShardOwners(0, 1, 1))
    plan = plan_stages(program, [part.node_ids for part in strategy.partitions])
    count = len(plan.stages)
    name = strategy.options.schedule
    # What auto may choose, and the larger of the two.
    name = "eager" if name == AUTO else name
    schedule = choose(name, range(count), math.ceil(num_rows / rows))
    live = peak_live(schedule)
    kept = {stage: f"{n} micro-batch{'es' * (n != 1)}" for stage, n in live.items()}
    return [
        StageReading(
            _share(whole, [costs[node] for node in stage.nodes], live[index]),
            rows,
            f"stage {index} of {count}",
            f"{kept[index]} at one time",
        )
        for index, stage in enumerate(plan.stages)
    ]


def node_costs(job: JobSpec, site: Site, rows: int) -> tuple[ModelProgram, Mapping[str, NodeCost]]:
    """Return the program of a model, and the costs of each of its nodes. Raises InvalidInputError
    if the model cannot be cut."""
    data = site.data_of(job)
    gather = gather_shapes(job, site, data)
    live = LiveBytes(site.device)
    costs: dict[str, NodeCost] = {}
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(allow_non_fake_inputs=True), live, counter:
        model = build_shapes(job, site.entrypoints, device=site.device)
        gather = gather.fitted(job, model)
        program = program_of(model, job)
        modules = node_modules(model, program)
        x, _ = gather(data["train"], torch.arange(rows), "reading rows")
        slots: Slots = {}
        for call in program.calls:
            before, counted = live.live, counter.get_total_flops()
            run_calls((call,), modules, program.num_uses, x, slots)
            module = modules[call.node]
            costs[call.node] = NodeCost(
                parameters=live.size_of(module.parameters()),
                buffers=live.size_of(module.buffers()),
                kept=max(0, live.live - before),
                flops=counter.get_total_flops() - counted,
            )
    return program, costs


def _share(whole: Reading, nodes: Sequence[NodeCost], num_live: int) -> Reading:
    """Estimate one pipeline stage from the whole model: parameters and everything proportional to
    them by the stage's nodes, temporaries as large as for the whole model."""
    parameters = sum(node.parameters for node in nodes)
    buffers = 2 * sum(node.buffers for node in nodes)  # the engine keeps a copy
    part = parameters / whole.parameters if whole.parameters else 0.0
    gradients, optimizer = parameters, round(part * whole.optimizer)
    fixed = parameters + gradients + optimizer + buffers
    before_backward = fixed + num_live * sum(node.kept for node in nodes)
    temporaries = max(0, whole.peak - whole.before_backward)
    return Reading(
        parameters=parameters,
        buffers=buffers,
        gradients=gradients,
        optimizer=optimizer,
        before_backward=before_backward,
        peak=before_backward + temporaries,
        num_parameters=round(part * whole.num_parameters),
        state=parameters + optimizer + buffers // 2,
    )


# ---- Received states ----
#
# A worker keeps received states in memory for the clients of federations, and copies of the
# clients' updates that a coordinator on the same machine reads.


def num_received(job: JobSpec, state_bytes: int) -> int:
    """Return the number of received states of this size that a worker keeps; 0 without clients."""
    num = NUM_STATES * min(_num_federations(job.strategy), MAX_FEDERATIONS)
    has_room_for = MAX_BLOB_MEMORY_BYTES // max(state_bytes, 1)
    return min(num, max(NUM_STATES, has_room_for))


def num_copied(job: JobSpec, update_bytes: int) -> int:
    """Return how many updates of this size exist as copies until the coordinator has read them: one
    per federation; 0 if updates are sent instead."""
    if update_bytes > MAX_COPY_BYTES:
        return 0
    return min(_num_federations(job.strategy), MAX_FEDERATIONS)


def _num_federations(strategy: Strategy | None) -> int:
    """Return the number of federations in a strategy whose clients are single workers."""
    match strategy:
        case PopulationBased(population_size=size, options=options):
            return size * _num_federations(options.inner)
        case Federated(options=options) if options.inner is None:
            return 1
        case Federated(num_clients=num_regions, options=options):
            return num_regions * _num_federations(options.inner)
        case _:
            return 0
