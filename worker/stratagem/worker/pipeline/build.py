"""Build the trainer of one pipeline rank from a job, a placement of stages and a transport."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.model.stages import plan_stages
from stratagem.common.numerics.rules import CURRENT, KEEPS_DTYPES
from stratagem.common.strategy.choices import AUTO, SCHEDULE_NAMES
from stratagem.worker.data.datasets import training_split
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.engine.build import collect_setup
from stratagem.worker.engine.callbacks import make_callbacks
from stratagem.worker.engine.round_trip import check_alone, check_optimizer_of
from stratagem.worker.exchange import GradientReducer
from stratagem.worker.models.build import build_model, node_modules
from stratagem.worker.models.nodes import (
    check_not_shared,
    program_of,
    remove_nodes,
    separate_tied,
    tie_again,
    without_storage,
)
from stratagem.worker.numerics.model import make_gather, prepare_nodes
from stratagem.worker.numerics.precision import low_dtype
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.pipeline.agreement import StageGradients
from stratagem.worker.pipeline.messages import StageTransport
from stratagem.worker.pipeline.rank_pass import StageChannel
from stratagem.worker.pipeline.rank_trainer import RankSetup, StageRunner
from stratagem.worker.pipeline.stage import StagePart
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Build a stage runner ----

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The assignment of a model's nodes to ranks, with the micro-batch size and the schedule.

    partitions: node ids of each stage (of a graph also ids and paths of subgraphs). ranks: the rank
    of each stage. micro_batch_size: rows; None: the whole batch. schedule: one of `SCHEDULE_NAMES`.
    """

    partitions: tuple[tuple[str, ...], ...]
    ranks: tuple[int, ...]
    micro_batch_size: int | None = None
    schedule: str = AUTO
    numerics: int = CURRENT
    """The version of the rules that decide the bits; see stratagem.common.numerics.rules."""

    def __post_init__(self) -> None:
        size = len(set(self.ranks))
        if len(self.ranks) != len(self.partitions) or set(self.ranks) != set(range(size)):
            raise InvalidInputError.at("ranks", f"{self.ranks}: one of 0, 1, … per partition")
        if self.schedule not in SCHEDULE_NAMES:
            allowed = ", ".join(SCHEDULE_NAMES)
            raise InvalidInputError.at("schedule", f"{self.schedule!r} is not one of {allowed}")


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """A rank's number, its transport, and the timeout of each wait for a message."""

    rank: int
    transport: StageTransport
    timeout_s: float = 60.0


def build_stage_runner(
    job: JobSpec,
    entrypoints: EntryPoints,
    placement: StageAssignment,
    seat: RankEndpoint,
    *,
    device: torch.device = _CPU,
    fresh: bool,
    sources: DataSources | None = None,
) -> StageRunner:
    """Build the trainer of one rank. fresh: its part is initialised from the seed to the same
    values as in the whole model; otherwise load_state must come first."""
    sources = sources or DataSources()
    data = load_data(job, entrypoints, sources, numerics=placement.numerics)
    if not job.only_evaluates:
        training_split(data)
    model = build_model(job, entrypoints, device=_CPU, fresh=fresh)
    callbacks = make_callbacks(job, entrypoints)
    callbacks.built(model)
    program = program_of(model, job)
    plan = plan_stages(program, placement.partitions)
    rank_of = tuple(placement.ranks[stage.partition] for stage in plan.stages)
    owner = {node: rank_of[stage] for node, stage in plan.stage_of.items()}
    check_not_shared(model, plan.stage_of, program)
    trained = separate_tied(model, program)
    if not trained and not job.only_evaluates:
        raise InvalidInputError.at("model", "has no trainable parameter")
    check_optimizer_of(job, model, entrypoints)
    if not job.only_evaluates:
        check_alone(job.optimizer, [(entry.name, entry.param) for entry in trained], entrypoints)
    randomness = KeyedRandomness(model, device)
    gather = make_gather(job, model, device, sources.readers)  # of all stages alike
    foreign = {node for node in owner if owner[node] != seat.rank}
    remove_nodes(model, foreign)
    trained = without_storage(trained, foreign)
    model.to(device)
    tie_again(trained)
    execution = prepare_nodes(model, job, device, randomness, program, foreign, placement.numerics)
    setup = collect_setup(
        *(job, entrypoints, model, data, gather, randomness, execution, callbacks),
        placement.numerics,
    )
    interval = job.execution.checkpoint_interval
    ends_single = low_dtype(job.execution) is not None or placement.numerics < KEEPS_DTYPES
    parts = {
        stage: StagePart(
            plan, stage, node_modules(model, program), device, interval, ends_single=ends_single
        )
        for stage, owned_by in enumerate(rank_of)
        if owned_by == seat.rank
    }
    lane = StageChannel(plan, rank_of, seat.rank, seat.transport, seat.timeout_s)
    size, schedule = placement.micro_batch_size, placement.schedule
    return StageRunner(RankSetup(setup, trained, parts, lane, size, schedule))


# ---- Sum over replicas ----
#
# Data parallelism around a pipeline adds up the gradients of equal ranks of all replicas. Each such
# column of ranks has an exchange of its own, which adds the logical shards in the same tree as
# without pipelines.


class SumOverReplicas:
    """A `Reduce` that sums the gradients of a rank's parameters over the replicas."""

    def __init__(self, runner: StageRunner, exchange: GradientReducer) -> None:
        self._runner, self._exchange = runner, exchange

    def __call__(self, num_live: int, shards: Iterator[StageGradients]) -> StageGradients:
        exchange, owned = self._exchange, self._exchange.party.owned
        exchange.begin_step(self._runner.step + 1, owned, num_live)
        for shard, computed in enumerate(shards, owned.start):
            exchange.begin_shard(shard)
            exchange.buckets.fill(list(computed.gradients.values()))
            exchange.end_shard(shard, computed.scalars)
        scalars = exchange.finish()
        sums = {name: param.grad for name, param in self._runner.params if param.grad is not None}
        return StageGradients(sums, scalars)
