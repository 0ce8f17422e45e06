"""What readers of a run get whose clients are drawn in secret: nothing that tells who was drawn.

The promise of such a run counts on the draw (`privacy`, unit client): whoever knows that a client
was not drawn knows that a round has nothing of it. So the facts that the journal has of the clients
of a round are for no reader, and neither is how many there were. Whoever reads the journal itself
sees all; it lies beside the secret. Pure functions.
"""

from dataclasses import replace
from typing import Final

from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.coordinator.core.facts import Fact, RoundAccounted, RoundClosed
from stratagem.coordinator.core.state import EndedRun, RunPhase, RunRecord
from stratagem.coordinator.core.strategy_contract import Status

SHOWN: Final = frozenset(
    {
        "RunSubmitted",
        "RunCancelled",
        "RunResumed",
        "RunFailed",
        "RunCompleted",
        "StoppedEarly",
        "RunReleased",
        "RunDeleted",
        "RunExpired",
        "PartyFailed",
        "MembersFormed",
        "ModelBuilt",
        "BuildFailed",
        "RosterFormed",
        "RoundAccounted",
        "RoundClosed",
        "SegmentCommitted",
        "Evaluated",
    }
)
"""Kinds of facts that follow from nobody's draw, once `shown` has taken the clients from them."""
WHY: Final = "its clients were drawn in secret"


def draws_in_secret(job: JobSpec) -> bool:
    """Return whether the clients of each round are drawn in secret."""
    spec, strategy = job.privacy, job.strategy
    if spec is None or spec.unit != "client" or spec.noise != "secret":
        return False
    return isinstance(strategy, Federated) and spec.sampling_rate(strategy) < 1


def hides_draws(run: RunRecord | EndedRun) -> bool:
    """Return whether readers of a run do not get all of its facts."""
    return run.draws_in_secret if isinstance(run, EndedRun) else draws_in_secret(run.job)


def is_hidden(job: JobSpec, fact: Fact) -> bool:
    """Return whether readers of the run do not get a fact."""
    return type(fact).__name__ not in SHOWN and draws_in_secret(job)


def shown(run: RunRecord | EndedRun | None, fact: Fact) -> Fact:
    """Return a fact of a run, or of none, as readers get it who get it at all."""
    if run is None or not hides_draws(run):
        return fact
    match fact:
        case RoundAccounted():
            return fact.model_copy(update={"drawn": ()})
        case RoundClosed():
            return fact.model_copy(update={"accepted": (), "reason": WHY, "by_policy": True})
        case _:
            return fact


def shown_status(status: Status) -> Status:
    """Return the status of such a run as readers get it: not who trains, nor who is missing."""
    trains = status.strategy_phase == "TRAINING"
    counts = replace(status.counts, part_done=0.0, loss=0.0, num_clients_rejected=0)
    return replace(
        status,
        phase=RunPhase.RUNNING if trains else status.phase,
        reason="" if trains else status.reason,
        num_clients_done=0,
        num_clients=0,
        members=(),
        counts=counts,
    )
