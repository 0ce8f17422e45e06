"""Puts a runner together from a job, a placement of its stages, and a transport."""

from dataclasses import dataclass

import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.model.stages import plan_stages
from stratagem.common.numerics.rules import CURRENT, KEEPS_DTYPES
from stratagem.common.strategy.choices import AUTO, SCHEDULE_NAMES
from stratagem.worker.data.data_sources import DataSources, load_data
from stratagem.worker.data.datasets import training_split
from stratagem.worker.data.order.row_order import epoch_rows_of
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.engine.numerics.memory_modes import make_gather
from stratagem.worker.engine.numerics.mixed_precision import low_dtype
from stratagem.worker.engine.numerics.prepare_model import prepare_nodes
from stratagem.worker.engine.objectives.evaluator import make_evaluator
from stratagem.worker.engine.step.callbacks import make_callbacks
from stratagem.worker.engine.step.optimizer_round_trip import check_alone, check_optimizer_of
from stratagem.worker.models.graph_model import node_modules
from stratagem.worker.models.model_builder import build_model
from stratagem.worker.models.model_nodes import (
    check_not_shared,
    program_of,
    remove_nodes,
    separate_tied,
    tie_again,
    without_storage,
)
from stratagem.worker.pipeline.rank_pass import StageChannel
from stratagem.worker.pipeline.rank_setup import RunnerSetup
from stratagem.worker.pipeline.rank_trainer import StageRunner
from stratagem.worker.pipeline.stage import StagePart
from stratagem.worker.pipeline.stage_transport import StageTransport
from stratagem.worker.user_code.entrypoints import EntryPoints

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The placement of a model's nodes on ranks, and the portions in which they work.

    partitions: node ids (of a graph also ids and paths of subgraphs). ranks: of each partition.
    micro_batch_size: rows; None = the whole batch at once. schedule: one of `SCHEDULE_NAMES`.
    """

    partitions: tuple[tuple[str, ...], ...]
    ranks: tuple[int, ...]
    micro_batch_size: int | None = None
    schedule: str = AUTO
    numerics: int = CURRENT
    """Which rules decide the bits; see stratagem.common.numerics.rules."""

    def __post_init__(self) -> None:
        size = len(set(self.ranks))
        if len(self.ranks) != len(self.partitions) or set(self.ranks) != set(range(size)):
            raise InvalidInputError.at("ranks", f"{self.ranks}: one of 0, 1, … per partition")
        if self.schedule not in SCHEDULE_NAMES:
            allowed = ", ".join(SCHEDULE_NAMES)
            raise InvalidInputError.at("schedule", f"{self.schedule!r} is not one of {allowed}")


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """A rank's number and its transport to the others; it waits `timeout_s` for one message."""

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
    """Builds the runner of one rank. fresh: initialised from the seed, as the whole model would be;
    otherwise load_state must come first."""
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
        check_alone(job.optimizer, [(each.name, each.param) for each in trained], entrypoints)
    randomness = KeyedRandomness(model, device)
    gather = make_gather(job, model, device, sources.readers)  # of all stages alike
    foreign = {node for node in owner if owner[node] != seat.rank}
    remove_nodes(model, foreign)
    trained = without_storage(trained, foreign)
    model.to(device)
    tie_again(trained)
    execution = prepare_nodes(model, job, device, randomness, program, foreign, placement.numerics)
    evaluator = make_evaluator(
        job, entrypoints, model, data, execution, randomness, gather, placement.numerics
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
    return StageRunner(
        RunnerSetup(
            job=job,
            model=model,
            trained=trained,
            parts=parts,
            lane=lane,
            data=data,
            evaluator=evaluator,
            micro_batch_size=placement.micro_batch_size,
            schedule=placement.schedule,
            execution=execution,
            numerics=placement.numerics,
            entrypoints=entrypoints,
            callbacks=callbacks,
            epoch_rows=epoch_rows_of(job, data, entrypoints),
        )
    )
