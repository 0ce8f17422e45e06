"""Local: one worker trains the whole model on all the data.

The general case with one logical shard and one member; the plain loop of any PyTorch tutorial.
"""

from stratagem.common.errors import Violation
from stratagem.common.ids import Party, RunId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import Effect
from stratagem.coordinator.core.facts import Fact
from stratagem.coordinator.core.state import World
from stratagem.coordinator.strategies import segments
from stratagem.coordinator.strategies.contract import Outlook
from stratagem.coordinator.strategies.segments import PartyRun, Shape

SHAPE = Shape(num_shards=1, min_members=1)


def check(job: JobSpec) -> list[Violation]:
    """Every valid job can run under Local."""
    del job
    return []


def init(job: JobSpec, party: Party) -> PartyRun:
    """Nothing placed, nothing built."""
    del job
    return PartyRun(party)


def decide(job: JobSpec, value: PartyRun, world: World, now_s: float) -> Fact | None:
    """One worker; another when it is lost; the end."""
    del now_s
    return segments.decide(job, value, SHAPE, world)


def transition(job: JobSpec, value: PartyRun, fact: Fact, now_s: float) -> PartyRun:
    """Fold one fact."""
    del job, now_s
    return segments.transition(value, fact, SHAPE)


def is_welcome(job: JobSpec, value: PartyRun, fact: Fact) -> str:
    """Why a reported fact is stale; "" when welcome."""
    del job
    return segments.is_welcome(value, fact)


def pending(
    run_id: RunId, job: JobSpec, value: PartyRun, horizon: int | None = None
) -> frozenset[Effect]:
    """The segment to train and the commit that is due."""
    return segments.pending(run_id, job, value, SHAPE, horizon)


def next_deadline(value: PartyRun) -> float | None:
    """Nothing here depends on time."""
    del value
    return None


def outlook(job: JobSpec, value: PartyRun, world: World) -> Outlook:
    """How the run stands."""
    return segments.outlook(job, value, SHAPE, world)


parties = segments.parties
deaths = segments.deaths
reform = segments.reform
job_of = segments.job_of
blobs = segments.blobs
standing = segments.standing
rebase = segments.rebase
