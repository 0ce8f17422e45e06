"""DataParallel: every global batch is cut into num_replicas logical shards.

Gradients are summed over the shards in a fixed binary tree and divided once (synchronous SGD as in
https://arxiv.org/abs/1706.02677, weighted by rows). The sum does not depend on how many workers
there are: with fewer than num_replicas some compute several shards, with the same bits. So a lost
worker is not waited for; the survivors redo the step, and a replacement joins when it comes.

AllReduce moves the gradients between the workers; ParameterServer moves them through the
coordinator, which only adds them up.
"""

from stratagem.common.errors import Violation
from stratagem.common.ids import Party, RunId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import (
    DataParallel,
    Decentralized,
    GradientAggregation,
    ParameterServer,
)
from stratagem.coordinator.core.effects import Effect, ExchangeMethod
from stratagem.coordinator.core.facts import Fact
from stratagem.coordinator.core.state import World
from stratagem.coordinator.strategies import segments
from stratagem.coordinator.strategies.contract import Outlook
from stratagem.coordinator.strategies.segments import PartyRun, Shape


def _shape(job: JobSpec) -> Shape:
    strategy = job.strategy
    assert isinstance(strategy, DataParallel)
    return Shape(
        num_shards=strategy.num_replicas,
        min_members=strategy.options.min_replicas,
        exchange=_exchange(strategy.aggregation),
    )


def _exchange(aggregation: GradientAggregation) -> ExchangeMethod:
    is_server = isinstance(aggregation, ParameterServer)
    return ExchangeMethod.PARAMETER_SERVER if is_server else ExchangeMethod.ALL_REDUCE


def check(job: JobSpec) -> list[Violation]:
    """Refuse what cannot be trained: an unsupported aggregation, or more replicas than rows."""
    strategy = job.strategy
    assert isinstance(strategy, DataParallel)
    violations = []
    if isinstance(strategy.aggregation, Decentralized):
        message = "'Decentralized' has no implementation here; use AllReduce or ParameterServer"
        violations.append(Violation("strategy.aggregation.method", message))
    if strategy.num_replicas > job.batch_size:
        message = (
            f"{strategy.num_replicas} replicas cannot share batches of {job.batch_size} rows; "
            "must be <= batch_size"
        )
        violations.append(Violation("strategy.num_replicas", message))
    return violations


def init(job: JobSpec, party: Party) -> PartyRun:
    """Nothing placed, nothing built."""
    del job
    return PartyRun(party)


def decide(job: JobSpec, value: PartyRun, world: World, now_s: float) -> Fact | None:
    """As many workers as there are, up to num_replicas; the end."""
    del now_s
    return segments.decide(job, value, _shape(job), world)


def transition(job: JobSpec, value: PartyRun, fact: Fact, now_s: float) -> PartyRun:
    """Fold one fact."""
    del now_s
    return segments.transition(value, fact, _shape(job))


def is_welcome(job: JobSpec, value: PartyRun, fact: Fact) -> str:
    """Why a reported fact is stale; "" when welcome."""
    del job
    return segments.is_welcome(value, fact)


def pending(
    run_id: RunId, job: JobSpec, value: PartyRun, horizon: int | None = None
) -> frozenset[Effect]:
    """The segment to train and the commit that is due."""
    return segments.pending(run_id, job, value, _shape(job), horizon)


def next_deadline(value: PartyRun) -> float | None:
    """Nothing here depends on time."""
    del value
    return None


def outlook(job: JobSpec, value: PartyRun, world: World) -> Outlook:
    """How the run stands."""
    return segments.outlook(job, value, _shape(job), world)


parties = segments.parties
deaths = segments.deaths
reform = segments.reform
job_of = segments.job_of
blobs = segments.blobs
standing = segments.standing
rebase = segments.rebase
