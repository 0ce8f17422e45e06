"""The strategy of one synchronous party, made from its rules and its check of the job."""

from collections.abc import Callable, Iterable

from stratagem.common.base.errors import Violation
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.strategy_contract import VERSION, Nesting, Repeating, Strategy
from stratagem.coordinator.strategies.synchronous import decisions
from stratagem.coordinator.strategies.synchronous import party as run
from stratagem.coordinator.strategies.synchronous.party import PartyRun, SegmentRules


def synchronous(
    shape: Callable[[JobSpec], SegmentRules],
    check: Callable[[JobSpec], Iterable[Violation]] = lambda _: (),
) -> Strategy:
    """Return the strategy of a party that trains segment after segment.

    shape: returns the rules of the job's party: how it is made up and what its members hold. check:
    returns the violations of a job.
    """
    return Strategy(
        version=VERSION,
        check=lambda job, _strategies: [*check(job)],
        init=lambda _job, party, _strategies: PartyRun(party),
        decide=lambda job, value, world, now_s: decisions.decide(
            job, value, shape(job), world, now_s
        ),
        own_deadline=decisions.deadline,
        transition=lambda job, value, fact, now_s: run.transition(
            job, value, fact, shape(job), now_s
        ),
        reject_reason=lambda _job, value, fact: run.reject_reason(value, fact),
        pending=lambda run_id, job, value, horizon: decisions.pending(
            run_id, job, value, shape(job), horizon
        ),
        status=lambda job, value, world: decisions.status(job, value, shape(job), world),
        own_parties=decisions.parties,
        own_deaths=decisions.deaths,
        own_reform=decisions.reform,
        own_setback=lambda job, value: decisions.setback(job, value, shape(job)),
        own_blobs=decisions.blobs,
        nesting=Nesting(decisions.progress, run.rebase, run.returned),
        repeating=Repeating(lambda value: value.committed, run.restored),
    )
