"""Guard the calls to the strategy of a run, and hide secretly sampled clients from readers.

A strategy that raises fails its run, with the reason. The coordinator and all other runs continue,
and a replay meets the same error. Calls that only read a run return an answer even then. Only
apply.py calls a strategy elsewhere, under the same rule: `init`, `transition` and `pending`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from stratagem.common.base.errors import StratagemError, Violation, told
from stratagem.common.base.ids import Party
from stratagem.common.job import JobSpec
from stratagem.common.job.rules import check_submitted
from stratagem.common.strategy import Federated
from stratagem.coordinator.core.facts import (
    Fact,
    Member,
    PartyFailed,
    RoundAccounted,
    RoundClosed,
    RunFailed,
)
from stratagem.coordinator.core.state import EndedRun, RunRecord
from stratagem.coordinator.core.strategy_contract import PartyView, Status, Strategies
from stratagem.coordinator.core.world import RunPhase, World

# ---- Guarded calls ----


class Raised(str):
    """A sentence about an exception that a strategy has raised: a str of a type of its own."""

    __slots__ = ()

    @classmethod
    def by(cls, error: Exception) -> "Raised":
        return cls(f"the strategy raised {told(error)}")


def objections_to(job: JobSpec, strategies: Strategies) -> list[Violation]:
    """Return the violations that rule out a job. Raises InvalidInputError if its strategy is not
    installed."""
    strategy = strategies.require(job)
    violations = [*check_submitted(job)]
    try:
        return list(dict.fromkeys([*violations, *strategy.check(job, strategies)]))
    except StratagemError:
        raise
    except Exception as error:
        return [*violations, Violation("strategy", Raised.by(error))]


def ask(run: RunRecord, world: World, now_s: float) -> Fact | None:
    """Return the next fact that a run's strategy decides, or the run's failure if it has waited too
    long."""
    try:
        fact = run.strategy.decide(run.job, run.value, world.under(run.numerics), now_s)
    except Exception as error:
        return RunFailed(reason=Raised.by(error))
    return fact or _given_up(run, world, now_s)


def deadline_of(run: RunRecord, world: World) -> float | None:
    """Return the leader-clock time at which an active run must be asked again, or None."""
    try:
        deadline_s = run.strategy.next_deadline(run.value)
    except Exception:  # its next decision fails the run
        return None
    limit_s = run.job.placement_timeout_s
    if limit_s is None or not why_waiting(run, world):
        return deadline_s
    return min(run.changed_s + limit_s, math.inf if deadline_s is None else deadline_s)


def status_of(run: RunRecord, world: World) -> Status:
    """Return the run's status, for people; its reason is the exception if the strategy raises."""
    try:
        return run.strategy.status(run.job, run.value, world.under(run.numerics))
    except Exception as error:
        return Status(run.ended or RunPhase.RUNNING, "", Raised.by(error))


def shown_status_of(run: RunRecord, world: World) -> Status:
    """Return the run's status as readers get it: without clients that were sampled in secret."""
    status = status_of(run, world)
    return shown_status(status) if draws_in_secret(run.job) else status


def why_waiting(run: RunRecord, world: World) -> str:
    """Return a sentence that says what a run without workers waits for; "" for other runs."""
    status = status_of(run, world)
    is_waiting = status.phase in (RunPhase.PLACING, RunPhase.RECOVERING) and not status.members
    return status.reason if is_waiting else ""


def parties_of(run: RunRecord) -> Mapping[Party, PartyView]:
    """Return the parties of a run whose members exchange tensors, keyed by party."""
    if run.ended is not None:
        return {}
    try:
        return run.strategy.parties(run.value)
    except Exception:  # no party forms; its segments run into their deadlines
        return {}


def value_of(run: RunRecord, party: Party) -> Any:
    """Return the run value of the strategy that runs a party; None if there is none."""
    strategy, value = run.strategy, run.value
    try:
        while True:
            inside = [
                child
                for child in strategy.children(value)
                if party == child.party or party.startswith(f"{child.party}/")
            ]
            if not inside:
                return value
            strategy, value = inside[0].strategy, inside[0].value
    except Exception:  # as with its parties
        return None


def reject_reason_of(run: RunRecord, fact: Fact) -> str | Raised:
    """Return the reason why a reported fact is stale; "" if it is not."""
    try:
        return run.strategy.reject_reason(run.job, run.value, fact)
    except Exception as error:
        return Raised.by(error)


def deaths_of(run: RunRecord, member: Member) -> tuple[Fact, ...]:
    """Return the deaths to count for a member whose process ended although nobody asked it to."""
    try:
        return run.strategy.deaths_to_charge(run.value, member)
    except Exception as error:
        return (RunFailed(reason=Raised.by(error)),)


def failure_of(run: RunRecord, fact: PartyFailed) -> Fact:
    """Return the fact that follows when the run's root party fails, most often RunFailed."""
    try:
        goes_on = run.strategy.own_failure(run.value, fact)
    except Exception as error:
        return RunFailed(reason=Raised.by(error))
    return goes_on or RunFailed(reason=fact.reason, error=fact.error)


def reform_of(run: RunRecord, party: Party, reason: str) -> Fact | None:
    """Return the fact that forms a party again after its members failed to exchange tensors."""
    try:
        return run.strategy.reform(run.job, run.value, party, reason)
    except Exception as error:
        return RunFailed(reason=Raised.by(error))


def _given_up(run: RunRecord, world: World, now_s: float) -> RunFailed | None:
    """Return the failure of a run that has waited for workers longer than its limit. The wait is
    measured from the newest fact, since a waiting run gets no facts."""
    limit_s = run.job.placement_timeout_s
    if limit_s is None or now_s < run.changed_s + limit_s:
        return None
    reason = why_waiting(run, world)
    return RunFailed(reason=f"without workers for {limit_s:g} s: {reason}") if reason else None


# ---- Secret draws ----
#
# Readers of a run whose clients are drawn in secret get nothing that reveals the draw.
#
# The privacy guarantee of such a run counts on the draw (`privacy`, unit client): whoever knows
# that a client was not drawn knows that the round contains nothing of that client. Therefore no
# reader gets the journal's facts about the clients of a round, nor the number of clients. Whoever
# reads the journal itself sees all facts; the journal lies beside the secret. The functions are
# pure.

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
"""The kinds of facts that reveal no sampled client once `without_draws` has removed the sampled
clients from them."""
WHY: Final = "its clients were drawn in secret"


def draws_in_secret(job: JobSpec) -> bool:
    """Return True if the clients of each round are sampled in secret."""
    spec, strategy = job.privacy, job.strategy
    if spec is None or spec.unit != "client" or spec.noise != "secret":
        return False
    return isinstance(strategy, Federated) and spec.sampling_rate(strategy) < 1


def hides_draws(run: RunRecord | EndedRun) -> bool:
    """Return True if readers do not get all facts of a run, as clients are sampled in secret."""
    return run.draws_in_secret if isinstance(run, EndedRun) else draws_in_secret(run.job)


def is_hidden(job: JobSpec, fact: Fact) -> bool:
    """Return True if readers do not get this fact of a run, as it reveals sampled clients."""
    return type(fact).__name__ not in SHOWN and draws_in_secret(job)


def without_draws(run: RunRecord | EndedRun | None, fact: Fact) -> Fact:
    """Return a fact without the clients that were sampled in secret, which readers may not learn;
    run: None for a fact of the cluster."""
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
    """Return the status of a run whose clients are sampled in secret, without the clients that
    train or are missing."""
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
