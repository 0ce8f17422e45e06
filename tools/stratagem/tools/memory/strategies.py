"""Compute the memory that a worker needs for its strategy or codec besides its own models.

The parts are the copies of nodes under Decentralized, the replicas that take local steps, the
messages of outer gradients, and the codec. Real steps can be measured for comparison.
"""

import math
import tracemalloc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.compression import Layout, TensorLayout, make_codec
from stratagem.common.job import CompressionSpec, JobSpec
from stratagem.common.numerics.shards import assign_shards
from stratagem.common.strategy import DataParallel, local_steps_of
from stratagem.common.strategy.local_steps import fragments_of
from stratagem.common.strategy.topology import graph_of
from stratagem.tools.memory.play import (
    NUM_STEPS,
    LiveBytes,
    Reading,
    ShapedRows,
    Site,
    gather_shapes,
    gradient_buckets,
    hold_cached,
    load_rows,
    receive_buffers,
)
from stratagem.worker.data.datasets import Dataset
from stratagem.worker.engine import LocalStepsTrainer, state_format
from stratagem.worker.engine.build import make_setup
from stratagem.worker.engine.local_steps import OUTER
from stratagem.worker.engine.setup import Setup
from stratagem.worker.engine.trainer import Trainer
from stratagem.worker.exchange.gossip import SLICE_ELEMENTS, WINDOW
from stratagem.worker.exchange.layout import ShardOwners, num_sets, plan_buckets
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.sliced_reducer import FragmentExchange
from stratagem.worker.exchange.transports import SoloTransport
from stratagem.worker.models.build import build_model, build_shapes
from stratagem.worker.numerics.model import make_gather

# ---- Copies of gossip nodes ----
#
# Every own node and every neighbour of one is held again: bucket by bucket while they are mixed,
# or, with a codec, as a public copy that stays. The result is that of the member that listens to
# most nodes.

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


# ---- Local steps of replicas ----
#
# The steps of the replicas of one worker are played with fake tensors or for real. The engine's own
# trainer is run over two rounds, which are made as short as fragments and overlap allow: the first
# makes what is kept from step to step, the second holds it all. Parameters, not steps, decide the
# memory. A codec of what is exchanged works on values and is left out.

NUM_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class ReplicasReading:
    """What a worker holds of its replicas and of what joins them, in bytes."""

    reading: Reading
    """All of it, in the parts of any other training."""
    common: int
    """Of `reading.parameters`: what the replicas have in common."""
    momentum: int
    """Of `reading.optimizer`: the outer optimizer's."""
    sums: int
    """Of `reading.gradients`: outer gradients, and what of them is received from others."""
    num_fragments: int


def play_local_steps(job: JobSpec, site: Site, party: ShardOwners) -> ReplicasReading:
    """Measure, with fake tensors, what two rounds of the party's first member hold."""
    data = load_rows(job, site)
    gather = gather_shapes(job, site, data)
    # Whole batches only, and steps after those that are played: the last one joins all at once.
    num_rows, short = min(job.batch_size, len(data["train"])), shortened(job)
    unordered = job.data.with_changes(order=None)
    whole = short.altered(batch_size=num_rows, data=unordered)
    batches = {**data, "train": ShapedRows(num_rows)}
    live = LiveBytes(site.device)
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        common = build_shapes(job, site.entrypoints, device=site.device)
        gather = gather.fitted(job, common)
        setup = make_setup(whole, site.entrypoints, common, batches, gather)
        models = {
            number: build_shapes(job, site.entrypoints, device=site.device)
            for number in party.owned
        }
        trainer = _trainer(setup, models)
        parameters = live.size_of(_parameters_of(common, *models.values()))
        cached = hold_cached(job, data, gather)
        buffers = live.live - parameters
        exchange, received = local_exchange(trainer, party)
        sums = live.live - buffers - parameters
        for _ in range(NUM_ROUNDS):
            live.forget_peak()
            play_round(trainer, exchange, party, short)
        own = live.size_of(_gradients_of(*models.values()))
        peak, before_backward = live.peak, live.before_backward
        state = _state_after(trainer)
        inner = [t for n, t in state.items() if f"/{state_format.OPTIMIZER}" in n]
        momentum = live.size_of(t for n, t in state.items() if n.startswith(OUTER))
        optimizer = live.size_of(inner) + momentum
        del received, cached
    reading = Reading(
        parameters=parameters,
        buffers=buffers,
        gradients=sums + own,
        optimizer=optimizer,
        # The replica whose turn it is has dropped its gradients by then.
        before_backward=before_backward + own // len(models),
        peak=peak,
        num_parameters=sum(param.numel() for param in common.parameters()),
        state=sum(tensor.nbytes for tensor in state.values()),
        layout=tuple(
            TensorLayout(name, tuple(param.shape))
            for name, param in common.named_parameters()
            if param.requires_grad
        ),
    )
    return ReplicasReading(
        reading=reading,
        common=parameters // (1 + len(models)),
        momentum=momentum,
        sums=sums,
        num_fragments=len(trainer.fragments),
    )


def build_replicas(job: JobSpec, site: Site, setup: Setup, party: ShardOwners) -> LocalStepsTrainer:
    """Build the trainer of the party's first member for real, from the common model of the
    setup."""
    models = {
        number: build_model(job, site.entrypoints, device=site.device, fresh=False)
        for number in party.owned
    }
    trainer = _trainer(setup, models)
    trainer.load_state(state_format.model_state(setup.model), state_format.state_metadata(0))
    return trainer


def _trainer(setup: Setup, models: Mapping[int, nn.Module]) -> LocalStepsTrainer:
    for model in models.values():
        setup.callbacks.built(model)
    return LocalStepsTrainer(setup, models)


def shortened(job: JobSpec, num_rounds: int = NUM_ROUNDS) -> JobSpec:
    """The same job with the shortest rounds that cut and apply in the same order, and with more
    steps than so many of them have."""
    strategy = job.strategy
    assert isinstance(strategy, DataParallel)
    overlap = min(1, strategy.options.overlap_steps)
    num_steps = strategy.options.fragments * (1 + overlap)
    options = replace(
        strategy.options,
        local_steps=num_steps,
        overlap_steps=overlap,
        mix=strategy.options.mixed_share,
        outer_bits=None,
    )
    played = replace(strategy, options=options)
    more = num_rounds * num_steps + 1
    return job.altered(strategy=played, steps=more, epochs=None)


def local_exchange(
    trainer: LocalStepsTrainer, party: ShardOwners
) -> tuple[FragmentExchange, list[object]]:
    """Return an exchange that sums what the member itself has, and the buffers in which it would
    receive the sums of others."""
    for fragment in trainer.fragments:
        fragment.buckets.tensors(num_sets(party) - 1)
    received = [receive_buffers(each.buckets, party) for each in trainer.fragments]
    reducers = [GradientReducer(each.buckets, party, SoloTransport()) for each in trainer.fragments]
    return FragmentExchange(reducers), received


def play_round(
    trainer: LocalStepsTrainer, exchange: FragmentExchange, party: ShardOwners, job: JobSpec
) -> None:
    """Make the steps of one round of a shortened job."""
    for _ in range(local_steps_of(job.strategy) or 0):
        trainer.train_step(exchange, party.owned, party.num_shards)


def _state_after(trainer: LocalStepsTrainer) -> Mapping[str, Tensor]:
    """What a commit copies, with sums that are under way, as at the end of a segment."""
    for fragment in trainer.fragments:
        fragment.arrive(trainer.step)
    tensors, _ = trainer.live_state()
    return tensors


def _parameters_of(*models: nn.Module) -> Iterable[Tensor]:
    return [param for model in models for param in model.parameters()]


def _gradients_of(*models: nn.Module) -> Iterable[Tensor]:
    grads = (param.grad for model in models for param in model.parameters())
    return [grad for grad in grads if grad is not None]


# ---- Messages of outer gradients ----
#
# Outer gradients may be exchanged in few bits. A replica's share of a fragment is coded when the
# fragment is cut, and its message kept until the sums have arrived. At most one fragment is under
# way at a time. The numbers are those of codecs on the host.


@dataclass(frozen=True, slots=True)
class OuterMessages:
    """messages: bytes of those of all own replicas. moment: beside them, while one is coded."""

    messages: int
    moment: int


def outer_messages(
    spec: CompressionSpec, layout: Sequence[TensorLayout], num_fragments: int, num_replicas: int
) -> OuterMessages:
    """Measure the codec of the fragment that needs most, for so many replicas of one worker."""
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
"""Of the small copy: coded in a fraction of a second."""


@dataclass(frozen=True, slots=True)
class CodecMemory:
    """The bytes that a codec takes for one shard."""

    payload: int
    state: int
    """What is kept from step to step: residuals, bases."""
    scratch: int
    """Beyond the payload and the new state, while a shard is coded and decoded again."""


def codec_memory(
    spec: CompressionSpec, layout: Layout, *, with_feedback: bool = True
) -> CodecMemory:
    """Measure the memory of the codec that the section names, for tensors of these shapes."""
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
    """Tensors of the same number of dimensions and about the same shares of all elements."""
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


# ---- Measured steps ----
#
# The peak is that of real steps: those that are otherwise played with fake tensors, by the same
# engine on the job's own rows.

MAX_STEPS: Final = 32
"""Enough for a scale of the loss to come down."""


def measure_training(job: JobSpec, site: Site, party: ShardOwners) -> int:
    """The peak of the same steps, done for real: bytes that torch's allocator gave out."""
    data = site.data_of(job)
    steps = _steps if local_steps_of(job.strategy) is None else _local_steps
    if site.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(site.device)
        before = torch.cuda.memory_allocated(site.device)
        steps(job, site, data, party)
        return torch.cuda.max_memory_allocated(site.device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        held = steps(job, site, data, party)
    del held
    return _peak_of(recorded)


def _peak_of(recorded: profile) -> int:
    """The highest sum of allocations less what was freed, in the order of time."""
    assert recorded.profiler is not None
    results = recorded.profiler.kineto_results
    assert results is not None
    changes = sorted(
        (event.start_ns(), event.nbytes())  # type: ignore[attr-defined]  # the stub lacks it
        for event in results.events()
        if event.name() == "[memory]"
    )
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _steps(job: JobSpec, site: Site, data: dict[str, Dataset], party: ShardOwners) -> object:
    """Return what the steps hold in the end."""
    model = build_model(job, site.entrypoints, device=site.device, fresh=True)
    gather = make_gather(job, model, site.device)
    trainer = Trainer(make_setup(job, site.entrypoints, model, data, gather))
    buckets = gradient_buckets(trainer, party)
    received = receive_buffers(buckets, party)
    exchange = GradientReducer(buckets, party, SoloTransport(), trainer.compressor)
    for step in range(1, MAX_STEPS + 1):
        is_whole = bool(trainer.optimizer.state) or not _skips(job)
        trainer.train_step(exchange, party.owned, party.num_shards)
        if step >= NUM_STEPS and is_whole:
            break
    del received
    return trainer, buckets


def _local_steps(job: JobSpec, site: Site, data: dict[str, Dataset], party: ShardOwners) -> object:
    """Likewise, of replicas that take local steps."""
    num_rounds = MAX_STEPS if _skips(job) else NUM_ROUNDS
    short = shortened(job, num_rounds)
    common = build_model(job, site.entrypoints, device=site.device, fresh=True)
    gather = make_gather(job, common, site.device)
    setup = make_setup(short, site.entrypoints, common, data, gather)
    trainer = build_replicas(job, site, setup, party)
    exchange, received = local_exchange(trainer, party)
    for _ in range(num_rounds):
        play_round(trainer, exchange, party, short)
    del received
    return trainer, exchange


def _skips(job: JobSpec) -> bool:
    """Return whether first steps may change nothing because the loss is still scaled too far."""
    return job.execution.precision in ("Mixed", "Half") and job.execution.amp_dtype == "float16"
