"""Compute the memory of each stage of a pipeline: its share of the model, and the passes in flight.

One micro-batch is run through the whole model with fake tensors, node by node; the schedule says
how many of them a stage keeps at one time. The module does not know which worker gets which stage.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from stratagem.common.job import JobSpec
from stratagem.common.model.program import ModelProgram
from stratagem.common.model.stages import plan_stages
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
from stratagem.common.tensors.local_files import MAX_COPY_BYTES
from stratagem.tools.memory.play import LiveBytes, Reading, Site, gather_shapes, play_training
from stratagem.worker.exchange.layout import ShardOwners
from stratagem.worker.host.blobs import MAX_FEDERATIONS, NUM_STATES
from stratagem.worker.models.build import build_shapes, node_modules
from stratagem.worker.models.nodes import program_of
from stratagem.worker.models.program import Slots, run_calls
from stratagem.worker.process.settings import MAX_BLOB_MEMORY_BYTES

# ---- Memory of stages ----


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The costs of one node: bytes of parameters and buffers, and what one pass keeps for
    backward."""

    parameters: int
    buffers: int
    kept: int
    flops: int
    """Of one forward pass, those of matrix products, convolutions and attention."""


@dataclass(frozen=True, slots=True)
class StageReading:
    """The memory that the worker of one stage holds, with so many rows in each micro-batch."""

    reading: Reading
    rows: int
    name: str
    """As "stage 0 of 2"."""
    kept: str
    """How many passes it keeps: "3 micro-batches at one time"."""


def play_stages(
    job: JobSpec, site: Site, strategy: ModelParallel, num_rows: int
) -> list[StageReading]:
    """All stages, for a batch (or the shard of a replica) of so many rows."""
    match strategy.communication:
        case Pipeline(micro_batch_size):
            rows = min(micro_batch_size, num_rows)
        case _:
            rows = num_rows
    program, costs = node_costs(job, site, rows)
    whole = play_whole(job, site, rows)
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


def play_whole(job: JobSpec, site: Site, rows: int) -> Reading:
    """The whole model on one worker, with these rows in a batch."""
    alone = job.altered(batch_size=rows, strategy=Local())
    return play_training(alone, site, ShardOwners(0, 1, 1))


def node_costs(job: JobSpec, site: Site, rows: int) -> tuple[ModelProgram, Mapping[str, NodeCost]]:
    """Each node of a model that can be cut. Raises InvalidInputError for one that cannot."""
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
    """Parameters and what grows with them are divided by nodes; temporaries are those of all."""
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
    """Return how many states of this size are kept, with the settings that a worker has unless it
    is given others; 0 where no clients train."""
    num = NUM_STATES * min(_num_federations(job.strategy), MAX_FEDERATIONS)
    has_room_for = MAX_BLOB_MEMORY_BYTES // max(state_bytes, 1)
    return min(num, max(NUM_STATES, has_room_for))


def num_copied(job: JobSpec, update_bytes: int) -> int:
    """Return of how many updates of this size there is a copy as well, until the coordinator has
    read it: of one for each federation; 0 where updates are sent."""
    if update_bytes > MAX_COPY_BYTES:
        return 0
    return min(_num_federations(job.strategy), MAX_FEDERATIONS)


def _num_federations(strategy: Strategy | None) -> int:
    """Return how many federations there are whose clients are no parties themselves."""
    match strategy:
        case PopulationBased(population_size=size, options=options):
            return size * _num_federations(options.inner)
        case Federated(options=options) if options.inner is None:
            return 1
        case Federated(num_clients=num_regions, options=options):
            return num_regions * _num_federations(options.inner)
        case _:
            return 0
