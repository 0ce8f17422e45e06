"""Verify a run while it trains: other workers execute a sample of its segments again.

The run's own party trains as without verification, and waits for nothing. A second party, the
verifier, is given the states that precede the chosen segments and trains these segments under the
same job, like a member of a population that copies a state. If it ends with another state, a third
execution and probes of single workers follow (verdict.py). A run that was wrong returns to the last
state that is trusted, by the same fact as when a user resumes it from a commit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from stratagem.common.base.errors import Violation
from stratagem.common.base.ids import NO_DIGEST, Digest, RunId, WorkerId
from stratagem.common.job import JobSpec
from stratagem.common.numerics.verification import VERIFIER, Conclusion
from stratagem.common.strategy import describe
from stratagem.coordinator.core.effects import Base, Effect
from stratagem.coordinator.core.facts import (
    ROOT,
    Fact,
    MembersFormed,
    PartyFailed,
    ReplicasDiffer,
    RunCompleted,
    RunFailed,
    RunResumed,
    SegmentRefuted,
)
from stratagem.coordinator.core.strategy_contract import (
    VERSION,
    Child,
    Nesting,
    Status,
    Strategies,
    Strategy,
)
from stratagem.coordinator.core.world import RunPhase, World
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.placement import eligible
from stratagem.coordinator.strategies.verdict import (
    Check,
    Point,
    Workers,
    blame_of,
    penalties,
)
from stratagem.coordinator.strategies.verified_run import (
    VerifiedRun,
    begin,
    missed,
    needed_tags,
    spec_of,
    trained_job,
    transition,
)

MAX_RETURNS = 3
"""The most returns in succession because of one segment, if nobody is quarantined for it."""


def check(job: JobSpec, strategies: Strategies) -> list[Violation]:
    """Return the violations of the job without its verification, whose section has rules of its
    own."""
    own_job = trained_job(job)
    strategy = strategies.require(own_job)
    if strategy.repeating is None:
        text = f"is not possible under {describe(job.strategy)}, which cannot train a segment again"
        return [Violation("verification", f"{text} (repeating); see stratagem verify")]
    return strategy.check(own_job, strategies)


# ---- Decisions ----


def decide(job: JobSpec, value: VerifiedRun, world: World, now_s: float) -> Fact | None:
    """Return the next fact: what a verification has found, else that of the run's own party, else
    that of the verifier. The run completes after the last verification, unless nobody can do it."""
    if value.verified is not None:
        return value.verified
    for penalty in penalties(value.blame, world.workers, now_s) if value.blame else ():
        return penalty
    if value.return_to is not None:
        return _return_to(value.return_to.base)
    if fact := _verdict(value, world, now_s):
        return fact
    main = value.main
    fact = main.strategy.decide(main.job, main.value, _trainers(value, world), now_s)
    if isinstance(fact, RunFailed):
        fact = _again_after(value, fact.reason) or fact
    is_end = isinstance(fact, RunCompleted)
    if not value.checks or (fact is not None and not is_end):
        return fact
    moved = nested.decide(value.verifier, _place(job, value, world), now_s)
    if isinstance(moved, MembersFormed):
        return moved.model_copy(update={"reason": _purpose(value.checks[0], moved)})
    moved = moved or _stuck(value)
    return _completed(value, fact) if moved is None else moved


def _completed(value: VerifiedRun, fact: Fact | None) -> Fact | None:
    """Return what follows while the verifier does not move: the completion of the run (fact), if
    there is one and nobody executes a check, or the end of a check that nobody can execute."""
    is_idle, has_differed = not nested.workers(value.verifier), bool(value.checks[0].executions)
    if is_idle and value.checks[1:] and not has_differed:
        reason = f"nobody can verify segment {value.checks[0].points[0].segment}"
        return PartyFailed(party=VERIFIER, reason=f"{reason}, and others wait")
    if not isinstance(fact, RunCompleted):
        return fact
    if not is_idle:
        return None  # the run ends after this verification
    if has_differed:
        return _refuted(value.checks[0], Conclusion.OPEN)
    text = _text(missed(value, *value.checks))
    why = "" if value.counts.verified else ", as verification.on found no worker for them"
    return fact.model_copy(update={"reason": f"{fact.reason}; {text}{why}"})


def _stuck(value: VerifiedRun) -> PartyFailed | None:
    """Return the failure of a verifier that has nothing more to do although the check goes on."""
    verifier = value.verifier
    if not nested.workers(verifier) or nested.pending(RunId(""), verifier):
        return None
    text = f"it does not come to segment {value.checks[0].points[0].segment} as the run did"
    return PartyFailed(party=VERIFIER, reason=f"{text}: their metrics differ")


def _return_to(base: Base, reason: str = "") -> RunResumed:
    return RunResumed(
        by="verification",
        from_segment=base.segment,
        step=base.step,
        digest=base.digest,
        streams=base.streams,
        average=base.average,
        reason=reason,
    )


def _purpose(check: Check, formed: MembersFormed) -> str:
    """Return a sentence on why the verifier has these members."""
    segment = f"segment {check.points[0].segment}"
    if not formed.members:
        return f"nobody can verify {segment} now"
    purposes = ("verifies", "decides who is wrong about")
    number = len(check.executions)
    return f"{purposes[number] if number < len(purposes) else 'is tested with'} {segment}"


def _verdict(value: VerifiedRun, world: World, now_s: float) -> Fact | None:
    """Return the next penalty, or the end of a check in which a state differed; None if there is no
    such check, or a suspect can still be probed."""
    if not value.checks:
        return None
    check = _examined(value, world)
    if (conclusion := check.conclusion) is None:
        return None
    if _probed(value, world) is not None:
        return None
    blame = blame_of(check, world.workers)
    is_cleared = check.are_cleared and not blame.wrong
    is_hopeless = is_cleared and _is_hopeless(value, world)
    is_repeated = not blame.wrong and value.setbacks.refuted == (
        check.points[0].segment,
        MAX_RETURNS,
    )
    if conclusion is Conclusion.RUN and (is_hopeless or is_repeated):
        return _refuted(check, Conclusion.OPEN)
    for penalty in penalties(blame, world.workers, now_s):
        return penalty
    return _refuted(check, conclusion, blame.wrong, blame.marked)


def _examined(value: VerifiedRun, world: World) -> Check:
    """Return the check under way; given up if it is not decided, and no worker is left that could
    decide it."""
    check = value.checks[0]
    if check.conclusion is not None or len(check.executions) < 2:
        return check
    can_decide = any(_can_train(value, world, name) for name in world.workers.keys() - check.tried)
    return check if can_decide else replace(check, is_given_up=True)


def _is_hopeless(value: VerifiedRun, world: World) -> bool:
    """Return True if the run would be wrong again after another return: it has been, and no other
    workers can train it, or others have been wrong as well."""
    base, point = value.checks[0].base, value.checks[0].points[0]
    unexplained = value.setbacks.unexplained
    if unexplained is None or unexplained.segment != point.segment:
        return False
    main = nested.restored(value.main, base.value)
    return bool(value.setbacks.avoided) or not _can_form(main, _without(world, point.workers))


def _refuted(
    check: Check,
    conclusion: Conclusion,
    wrong: Workers = frozenset(),
    marked: Workers = frozenset(),
) -> SegmentRefuted:
    point, executions = check.points[0], check.executions
    return SegmentRefuted(
        party=ROOT,
        segment=point.segment,
        step=point.base.step,
        conclusion=conclusion,
        digests=(point.digest, *(execution.digest for execution in executions)),
        workers=tuple(tuple(sorted(names)) for names in _workers_of(check)),
        quarantined=tuple(sorted(wrong)),
        marked=tuple(sorted(marked)),
    )


def _workers_of(check: Check) -> Iterator[Workers]:
    yield check.points[0].workers
    yield from (execution.workers for execution in check.executions)


# ---- Places ----


def _trainers(value: VerifiedRun, world: World) -> World:
    """Return the world that the run's own party sees: without the workers that it has to avoid, as
    long as others can train it."""
    if not value.setbacks.avoided:
        return world
    others = _without(world, value.setbacks.avoided)
    return others if _can_form(value.main, others) else world


def _can_form(child: Child, world: World) -> bool:
    """Return True if the child has, or could have, members in this world."""
    fact = nested.decide(child, world, 0.0)
    return bool(fact.members if isinstance(fact, MembersFormed) else nested.workers(child))


def _without(world: World, names: Workers) -> World:
    others = {name: record for name, record in world.workers.items() if name not in names}
    return World(others, world.load, numerics=world.numerics)


def _place(job: JobSpec, value: VerifiedRun, world: World) -> World:
    """Return the world that the verifier sees: one worker that may execute the check, if possible
    one that it has or had; nobody if there is none."""
    present, members = nested.workers(value.verifier), nested.workers(value.main)
    had = {member.worker_id for member in value.held} - present - members
    for may_execute in _rules(job, value, world, members):
        for name in (*sorted(present), *sorted(had)):
            if may_execute(name) and _can_train(value, world, name):
                return _only(value, world, name)
        for record in eligible(value.verifier.job, world, value.fingerprint):
            if may_execute(record.member.worker_id):  # the least loaded one
                return _only(value, world, record.member.worker_id)
    return World({}, world.load, numerics=world.numerics)


def _can_train(value: VerifiedRun, world: World, name: WorkerId) -> bool:
    if name not in world.workers:
        return False
    return bool(eligible(value.verifier.job, _only(value, world, name), value.fingerprint))


def _rules(
    job: JobSpec, value: VerifiedRun, world: World, members: Workers
) -> Iterator[Callable[[WorkerId], bool]]:
    """Yield functions that tell whether a worker may execute the check; if the first one allows
    nobody, the next one decides."""
    check = value.checks[0]
    trainers = check.points[0].workers

    def is_other(name: WorkerId) -> bool:
        return name not in trainers

    if check.conclusion is not None:
        probed = _probed(value, world)
        yield lambda name: name == probed
    elif len(check.executions) >= 2:
        yield lambda name: name not in check.tried and is_other(name)
        yield lambda name: name not in check.tried
    elif check.executions:  # best by others than the first two, else by the run's own
        first = check.executions[0].workers
        yield lambda name: name not in first and is_other(name)
        yield (trainers - first).__contains__
        yield trainers.__contains__
    elif (on := spec_of(job).on) == "any":
        yield is_other
    elif on == "members":
        yield lambda name: name in members and is_other(name)
        yield members.__contains__
    else:
        yield (
            lambda name: not _is_busy(value, world, name) and name not in members and is_other(name)
        )


def _is_busy(value: VerifiedRun, world: World, name: WorkerId) -> bool:
    """Return True if a run other than this one has the worker."""
    load, record = world.load.get(name, 0), world.workers.get(name)
    return load > 1 or (load == 1 and record is not None and record.member not in value.held)


def _probed(value: VerifiedRun, world: World) -> WorkerId | None:
    """Return the next suspect that can execute the segment alone; None if there is none."""
    names = value.checks[0].unprobed
    return next((name for name in names if _can_train(value, world, name)), None)


def _only(value: VerifiedRun, world: World, name: WorkerId) -> World:
    """Return a world of this worker alone, tagged so that it takes every stage and client."""
    record = world.workers[name]
    tags = (*record.capability.tags, VERIFIER, *needed_tags(value.verifier.job.strategy))
    capability = record.capability.model_copy(update={"tags": tags})
    workers = {name: replace(record, capability=capability)}
    return World(workers, world.load, numerics=world.numerics)


# ---- Queries ----


def reject_reason(_job: JobSpec, value: VerifiedRun, fact: Fact) -> str:
    """Return the reason why a reported fact is stale; "" if it is expected."""
    if not nested.is_of(value.verifier, fact):
        return nested.reject_reason(value.main, fact)
    return nested.reject_reason(value.verifier, fact) if value.checks else "nothing is verified now"


def pending(
    run_id: RunId, _job: JobSpec, value: VerifiedRun, horizon: int | None
) -> frozenset[Effect]:
    """Return the effects due for the training, and for the check under way."""
    main = value.main
    effects = main.strategy.pending(run_id, main.job, main.value, horizon)
    return effects | nested.pending(run_id, value.verifier) if value.checks else effects


def status(_job: JobSpec, value: VerifiedRun, world: World) -> Status:
    """Return the status of the training, with the state of the verification."""
    main = value.main
    status = main.strategy.status(main.job, main.value, world)
    extra = {**status.extra, "verification": _text(value)}
    if not value.checks or not nested.has_ended(main):
        return replace(status, extra=extra)
    last = value.checks[-1].points[-1].segment
    reason = f"all is trained; the run ends when segment {last} is verified"
    phase = RunPhase.RUNNING
    return replace(status, phase=phase, strategy_phase="VERIFYING", reason=reason, extra=extra)


def own_failure(value: VerifiedRun, failed: PartyFailed) -> Fact | None:
    """Return the fact that a segment was computed wrongly, if replicas differ after it; the return
    to a trusted state, after another failure. None if neither helps any more: replicas differ the
    third time without a majority."""
    if not isinstance(failed, ReplicasDiffer):
        return _again_after(value, failed.reason)
    if value.latest is None or (not failed.minority and value.setbacks.num_ties > 1):
        return None
    return SegmentRefuted(
        party=ROOT,
        segment=failed.segment,
        step=failed.step,
        conclusion=Conclusion.RUN,
        workers=(tuple(sorted(nested.workers(value.main))),),
        marked=tuple(sorted(failed.minority)),
    )


def _again_after(value: VerifiedRun, reason: str) -> RunResumed | None:
    """Return the return to a trusted state after a failure, of which a wrong bit may be the cause;
    None if there is no such state, or the run has failed again after that, and with others, too."""
    if value.latest is None:
        return None
    base, setbacks = _trusted(value).base, value.setbacks
    is_last = base == setbacks.retried and setbacks.avoided
    return None if is_last else _return_to(base, reason)


def _trusted(value: VerifiedRun) -> Point:
    """Return the newest commit that no check doubts."""
    assert value.latest is not None
    return value.checks[0].base if value.checks else value.latest


def _text(value: VerifiedRun) -> str:
    return (
        f"{value.counts}; ended, as the bits do not repeat" if value.is_off else f"{value.counts}"
    )


def _parties(value: VerifiedRun) -> tuple[Child, ...]:
    """Return the parties with work; the verifier comes first, as all parties are within the
    root."""
    return (value.verifier, value.main) if value.checks else (value.main,)


def _blobs(value: VerifiedRun) -> frozenset[Digest]:
    """Return the states from which checks begin, or may begin."""
    bases = (base for check in value.checks for base in (check.base, *check.points[:1]))
    points = (point for point in (*bases, value.latest, value.return_to) if point is not None)
    strategy = value.main.strategy
    states = (strategy.blobs(point.value) | {point.base.digest} for point in points)
    return frozenset[Digest]().union(*states) - {NO_DIGEST}


def _returned(
    _job: JobSpec, value: VerifiedRun, base: Base, metrics: Mapping[str, float]
) -> VerifiedRun:
    trusted = value.return_to or _trusted(value)
    checks = tuple(c for c in value.checks if c.points[-1].segment <= base.segment)
    value = replace(value, checks=checks)
    if trusted.base == base:
        return replace(value, main=nested.restored(value.main, trusted.value), latest=trusted)
    return replace(value, main=nested.returned(value.main, base, metrics), latest=None)


STRATEGY = Strategy(
    version=VERSION,
    check=check,
    init=begin,
    decide=decide,
    transition=transition,
    reject_reason=reject_reason,
    pending=pending,
    status=status,
    own_failure=own_failure,
    own_blobs=_blobs,
    num_repeats=lambda value: value.num_repeats,
    children=_parties,
    nesting=Nesting(
        progress=lambda value: nested.progress(value.main),
        rebase=lambda job, value, base, _num_rows: _returned(job, value, base, {}),
        returned=_returned,
    ),
)
