"""The rules that a strategy has for the job that is submitted with it, beside those of every job.

Jobs of before may lack it, and so may those of members and clients that are made from a job; where
they run, the coordinator asks again. A job that is refused is told of this in the same answer.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from stratagem.common.base import ids
from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.job.optimizer import OptimizerSpec, check_optimizer
from stratagem.common.model.program import flatten
from stratagem.common.model.stages import plan_stages
from stratagem.common.schema.json import under
from stratagem.common.schema.rules import found_by
from stratagem.common.strategy import (
    All,
    DataParallel,
    Decentralized,
    Federated,
    FedProx,
    Local,
    ModelParallel,
    PopulationBased,
    Random,
    describe,
)
from stratagem.common.strategy.choices import KNOWN_TOPOLOGIES
from stratagem.common.strategy.topology import graph_of

_INNER: Final = "strategy.options.inner"


class SubmittedJob(Protocol):
    """What is asked of a job here."""

    @property
    def model(self) -> Any: ...
    @property
    def data(self) -> Any: ...
    @property
    def evaluation(self) -> Any: ...
    @property
    def strategy(self) -> Any: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def only_evaluates(self) -> bool: ...
    @property
    def search_space(self) -> Any: ...
    @property
    def steps_per_generation(self) -> int | None: ...
    def optimizers(self) -> Mapping[str, OptimizerSpec]: ...


def check_submitted(job: SubmittedJob) -> Iterator[Violation]:
    """Yield what is wrong with a job that is to be run, as far as the job alone tells."""
    if ids.are_checked() and not job.only_evaluates:
        yield from found_by((_keywords, check_replicas, check_stages), job)
        yield from found_by((check_silos, check_regional, check_members), job)


def _keywords(job: SubmittedJob) -> Iterator[Violation]:
    if job.search_space is None:  # a population has its members'
        for path, optimizer in job.optimizers().items():
            for each in check_optimizer(optimizer):
                yield Violation(f"{path}{each.field.removeprefix('optimizer')}", each.message)


def check_replicas(job: SubmittedJob) -> Iterator[Violation]:
    """Yield why replicas cannot be trained: more than rows, a topology that does not fit."""
    if isinstance(job.strategy, DataParallel):
        yield from found_by((_share, _replica, _topology), job)


def _share(job: SubmittedJob) -> Iterator[Violation]:
    num_replicas = job.strategy.num_replicas
    if job.batch_size is not None and num_replicas > job.batch_size:
        text = f"{num_replicas} replicas cannot share batches of {job.batch_size} rows"
        yield Violation("strategy.num_replicas", f"{text}; must be <= batch_size")


def _topology(job: SubmittedJob) -> Iterator[Violation]:
    strategy = job.strategy
    if isinstance(strategy.aggregation, Decentralized):
        try:
            graph_of(strategy.aggregation.topology, strategy.num_replicas, job.seed)
        except ValueError as error:
            text = f"{error}; known topologies: {KNOWN_TOPOLOGIES}"
            yield Violation("strategy.aggregation.topology", text)


def _replica(job: SubmittedJob) -> Iterator[Violation]:
    """A replica is one worker, or a pipeline whose gradients are summed stage by stage."""
    strategy, inner = job.strategy, job.strategy.options.inner
    if isinstance(inner, Local | DataParallel | None):
        return  # groups of replicas are replicas, or why not has been said
    if not isinstance(inner, ModelParallel):
        text = f"{describe(inner)} cannot be a replica, which takes part in every step; Local, "
        yield Violation(_INNER, f"{text}ModelParallel and DataParallel can")
    elif isinstance(strategy.aggregation, Decentralized):
        text = "a node of 'Decentralized' is one worker, and no pipeline over several; AllReduce "
        yield Violation(
            "strategy.aggregation.method", f"{text}and ParameterServer have replicas that are"
        )
    else:
        yield from _partitions(job, inner, _INNER)


def check_stages(job: SubmittedJob) -> Iterator[Violation]:
    """Yield why the partitions do not tile a graph model; other models are known to the workers
    only."""
    if isinstance(job.strategy, ModelParallel):
        yield from _partitions(job, job.strategy, "strategy")


def _partitions(job: SubmittedJob, spec: ModelParallel, path: str) -> Iterator[Violation]:
    if job.model.graph is not None:
        owned = [partition.node_ids for partition in spec.partitions]
        try:
            plan_stages(flatten(job.model.graph), owned)
        except InvalidInputError as error:
            yield from under(path, error.violations)


def check_silos(job: SubmittedJob) -> Iterator[Violation]:
    """Yield what a silo, a client that is several workers, cannot do."""
    spec = job.strategy
    inner = spec.options.inner if isinstance(spec, Federated) else None
    if not isinstance(spec, Federated) or isinstance(inner, Local | Federated | None):
        return
    if isinstance(spec.aggregation, FedProx):
        text = "FedProx changes a client's steps; with an inner strategy use FedAvg or FedYogi"
        yield Violation("strategy.aggregation.method", text)
    if not isinstance(spec.client_selection, All | Random):
        text = "ByCapability needs clients that live on one worker; use All or Random"
        yield Violation("strategy.client_selection.method", text)
    if job.data.worker_local is not None:
        yield Violation("data.worker_local", "is on single workers, and a silo is several")
    if spec.options.late_updates != "refuse":
        text = 'a silo ends with its round and keeps no base of its own; use "refuse"'
        yield Violation("strategy.options.late_updates", text)
    for path, optimizer in job.optimizers().items():
        schedule = optimizer.schedule
        if schedule is not None and (schedule.name != "plateau" or schedule.warmup_steps):
            text = "counts rounds under Federated, and steps inside a silo; leave it out"
            own = ".warmup_steps" if schedule.name == "plateau" else ""
            yield Violation(f"{path}.schedule{own}", text)
    if spec.options.on_missing_quorum == "wait":
        text = 'a silo that has failed is not asked again in its round; use "fail"'
        yield Violation("strategy.options.on_missing_quorum", text)
    if isinstance(inner, PopulationBased):
        text = "a population is no client: its members end with different models"
        yield Violation(_INNER, text)


def check_regional(job: SubmittedJob) -> Iterator[Violation]:
    """Yield what has no meaning where clients are regions, which are federations."""
    spec = job.strategy
    if not isinstance(spec, Federated) or not isinstance(spec.options.inner, Federated):
        return
    if job.data.worker_local is not None and spec.options.regions is None:
        text = "missing; it says which sites are in which region, for example regions: {north: [a]}"
        yield Violation("strategy.options.regions", text)
    if job.data.worker_local is not None and job.evaluation is not None:
        text = "is not possible with regions of sites: who evaluates are clients on their own rows"
        yield Violation("evaluation", f"{text}, and the clients are regions")
    for path, optimizer in job.optimizers().items():
        if optimizer.plateau is not None:
            text = "follows evaluations of the whole federation, which no region sees; use another"
            yield Violation(f"{path}.schedule", text)


def check_members(job: SubmittedJob) -> Iterator[Violation]:
    """Yield what cannot be a member of a population."""
    if not isinstance(job.strategy, PopulationBased):
        return
    inner, per_generation = job.strategy.options.inner, job.steps_per_generation
    if isinstance(inner, PopulationBased):
        yield Violation(_INNER, "a population is no member: one member has one model and one score")
    if isinstance(inner, Federated) and per_generation not in (None, inner.rounds):
        text = f"{inner.rounds} is not steps_per_generation, {per_generation}; a federated member "
        yield Violation(f"{_INNER}.rounds", f"{text}counts its steps in rounds")
