"""Functions for a child: a party inside a strategy, run by a strategy of its own.

The enclosing strategy makes children, hands them the facts of their parties, collects their
decisions and effects, and lets each train up to its horizon, in segments. It also decides what
follows after the failure of a child, and after the horizon.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.base.ids import NO_DIGEST, Digest, Party, RunId, WorkerId, is_within
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated, describe
from stratagem.coordinator.core.effects import Base, Effect
from stratagem.coordinator.core.facts import (
    Fact,
    Member,
    PartyFailed,
    RunCompleted,
    RunFailed,
    RunResumed,
)
from stratagem.coordinator.core.strategy_contract import (
    Child,
    NestedProgress,
    Nesting,
    PartyView,
    Repeating,
    Strategies,
)
from stratagem.coordinator.core.world import World


def check(job: JobSpec, strategies: Strategies) -> list[Violation]:
    """Return the violations of a child's job; its strategy must support nesting."""
    try:
        strategy = strategies.require(job)
    except InvalidInputError as error:
        return list(error.violations)
    if strategy.nesting is None:
        text = f"{describe(job.strategy)} cannot run inside another one: it cannot go on from a "
        return [Violation("strategy", text + "state that it is given (nesting)")]
    if isinstance(job.strategy, Federated) and job.strategy.options.open_roster is not None:
        text = "inside another strategy a federation has all its clients from the start; leave it "
        return [Violation("strategy.options.roster.open", text + "out")]
    return strategy.check(job, strategies)


def check_inside(child_job: Callable[[], JobSpec], strategies: Strategies) -> list[Violation]:
    """Return the violations of the job of an `options.inner`, for the fields that the user has
    written.

    Errors in the job itself, beyond its strategy, are reported for `options.inner` as a whole.
    """
    try:
        violations = check(child_job(), strategies)
    except InvalidInputError as error:
        reasons = "; ".join(str(violation) for violation in error.violations)
        return [Violation("strategy.options.inner", f"its job would be invalid: {reasons}")]
    inner = "strategy.options.inner"
    return [replace(v, field=v.field.replace("strategy", inner, 1)) for v in violations]


def begin(party: Party, job: JobSpec, horizon: int, strategies: Strategies) -> Child:
    """Return a new child (a party inside a strategy), before any fact about it."""
    strategy = strategies.of(job)
    return Child(party, job, strategy, strategy.init(job, party, strategies), horizon)


def progress(child: Child) -> NestedProgress:
    """Return the progress of the child, as its strategy reports it."""
    return _nesting(child).progress(child.value)


def is_at_horizon(child: Child) -> bool:
    """Return True if all segments that the child may train for now are committed and evaluated."""
    latest = progress(child)
    return (
        latest.committed is not None
        and latest.committed.segment >= child.horizon
        and latest.is_idle
    )


def rebased(
    child: Child, job: JobSpec, base: Base, num_rows: Mapping[str, int], horizon: int
) -> Child:
    """Return the child after it was given another state, perhaps with another job."""
    value = _nesting(child).rebase(job, child.value, base, num_rows)
    return replace(child, job=job, value=value, horizon=horizon)


def returned(child: Child, base: Base, metrics: Mapping[str, float]) -> Child:
    """Return the child after a return to an earlier commit of its own, which had these metrics."""
    nesting = _nesting(child)
    if nesting.returned is None:
        return rebased(child, child.job, base, progress(child).num_rows, child.horizon)
    return replace(child, value=nesting.returned(child.job, child.value, base, metrics))


def restored(child: Child, earlier: Any) -> Child:
    """Return the child as it goes on from an earlier run value of this run, with no members and no
    failures counted."""
    value = _repeating(child).restored(child.job, child.value, earlier)
    return again(replace(child, value=value))


def committed(child: Child) -> Base | None:
    """Return the newest commit of the child; None while there is none."""
    return _repeating(child).committed(child.value)


def digest(child: Child) -> Digest:
    """Return a digest of all that the child's next segments follow from."""
    functions, base = _repeating(child), committed(child)
    if functions.digest is not None:
        return functions.digest(child.value)
    return NO_DIGEST if base is None else base.digest


def workers(child: Child) -> frozenset[WorkerId]:
    """Return the names of all workers that have work of the child."""
    return frozenset(member.worker_id for member in child.strategy.workers(child.value))


def decide(child: Child, world: World, now_s: float) -> Fact | None:
    """Return the child's next fact, with the completion of the run replaced by None, and its
    failure by that of the party."""
    fact = child.strategy.decide(child.job, child.value, world, now_s)
    match fact:
        case RunCompleted():
            return None
        case RunFailed():
            return PartyFailed(
                party=child.party, reason=fact.reason, error=fact.error, cause=fact.cause
            )
        case _:
            return fact


def has_ended(child: Child) -> bool:
    """Return True if all that the child's job asks for is committed: a run would be complete."""
    nobody = World({}, {})
    return isinstance(child.strategy.decide(child.job, child.value, nobody, 0.0), RunCompleted)


def transition(child: Child, fact: Fact, now_s: float) -> Child:
    """Return the child with a fact of its party, or of the whole run, folded in."""
    return replace(child, value=child.strategy.transition(child.job, child.value, fact, now_s))


def again(child: Child) -> Child:
    """Return the child ready to go on after a failure, as if resumed, with no failures counted."""
    return transition(child, RunResumed(), now_s=0.0)


def is_of(child: Child, fact: Fact) -> bool:
    """Return True if the fact is of the child's party or of one below."""
    party = getattr(fact, "party", None)
    return party is not None and is_within(party, child.party)


def reject_reason(child: Child, fact: Fact) -> str:
    """Return the reason why a reported fact is stale; "" if it is expected."""
    return child.strategy.reject_reason(child.job, child.value, fact)


def why_waiting(child: Child, world: World) -> str:
    """Return a sentence that says what a child without workers waits for; "" if it has workers."""
    status = child.strategy.status(child.job, child.value, world)
    return "" if status.members else status.reason


def pending(run_id: RunId, child: Child) -> frozenset[Effect]:
    """Return the effects that the child now needs performed."""
    return child.strategy.pending(run_id, child.job, child.value, child.horizon)


def members(children: Iterable[Child]) -> tuple[Member, ...]:
    """Return all workers that are members of the children's parties, sorted by name."""
    working = {member for view in _parties(children) for member in view.members}
    return tuple(sorted(working, key=lambda member: member.worker_id))


def world_beside(world: World, siblings: Iterable[Child]) -> World:
    """Return the world as a child should see it: with its siblings' work added to workers' load."""
    load: Counter[WorkerId] = Counter()
    for view in _parties(siblings):
        load.update(member.worker_id for member in view.members)
    total: Mapping[WorkerId, int] = {
        worker_id: world.load.get(worker_id, 0) + load[worker_id] for worker_id in world.workers
    }
    return World(world.workers, total, numerics=world.numerics)


def _parties(children: Iterable[Child]) -> Iterable[PartyView]:
    return chain.from_iterable(c.strategy.parties(c.value).values() for c in children)


def _repeating(child: Child) -> Repeating:
    assert child.strategy.repeating is not None, "the job was checked"
    return child.strategy.repeating


def _nesting(child: Child) -> Nesting:
    assert child.strategy.nesting is not None, "the job was checked"
    return child.strategy.nesting
