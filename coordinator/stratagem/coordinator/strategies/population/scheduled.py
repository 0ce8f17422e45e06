"""Train a job whose hyperparameters and seed change by step, as those of a population's winner did.

One party, the run's own, is trained by the job's strategy. When a setting ends, the party goes on
from the state that it has just committed, under the job of the next setting, like a member that
copies a state. The result is that member's, to the bit. All this follows from the facts of the
party; the run has no other facts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.base.ids import Party, RunId
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec, check_optimizer, scheduled_job
from stratagem.common.job.schedules import HyperparameterSchedule
from stratagem.common.strategy import Federated
from stratagem.coordinator.core.effects import Base, Effect
from stratagem.coordinator.core.facts import Fact, RunCompleted
from stratagem.coordinator.core.strategy_contract import (
    VERSION,
    Child,
    Nesting,
    Repeating,
    Status,
    Strategies,
    Strategy,
)
from stratagem.coordinator.core.world import World
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.population.evolution import BY_DEFINITION
from stratagem.coordinator.strategies.population.strategy import check_name
from stratagem.coordinator.strategies.schedule import schedule_of

_SECTION = "hyperparameter_schedule"


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """The run value: the party, and the index of the setting that it trains with."""

    child: Child
    setting: int = 0


def _schedule(job: JobSpec) -> HyperparameterSchedule:
    assert job.hyperparameter_schedule is not None
    return job.hyperparameter_schedule


def check(job: JobSpec, strategies: Strategies) -> list[Violation]:
    """Return the violations of a schedule: settings that make no valid job, or under which a state
    cannot continue."""
    violations: list[Violation] = []
    first = _schedule(job).settings[0]
    for place, setting in enumerate(_schedule(job).settings):
        where = f"{_SECTION}.settings[{place}].params"
        for name, value in setting.params.items():
            violations += check_name(job, name, where)
            if name in BY_DEFINITION and value != first.params.get(name):
                text = "must be that of the first setting: it decides what the optimizer keeps"
                violations.append(Violation(f"{where}.{name}", text))
        if not violations:
            violations += _objections(job, place)
    return violations or nested.check(scheduled_job(job, first), strategies)


def _objections(job: JobSpec, place: int) -> Iterator[Violation]:
    """Yield the violations of the job that one setting of the schedule makes."""
    where = f"{_SECTION}.settings[{place}].params"
    try:
        setting_job = scheduled_job(job, _schedule(job).settings[place])
    except InvalidInputError as error:
        yield Violation(where, "; ".join(str(fault) for fault in error.violations) or str(error))
        return
    for spec in setting_job.optimizers().values():
        yield from (Violation(where, str(fault)) for fault in check_optimizer(spec))
        if spec.plateau is not None:
            yield Violation(where, "plateau is not allowed: it is followed under one setting only")


def begin(job: JobSpec, party: Party, strategies: Strategies) -> ScheduledRun:
    """Return the run value of a new run, before any fact."""
    setting_job = scheduled_job(job, _schedule(job).settings[0])
    return ScheduledRun(nested.begin(party, setting_job, _horizon(job, 0), strategies))


def decide(job: JobSpec, value: ScheduledRun, world: World, now_s: float) -> Fact | None:
    """Return the party's next fact, or the completion of the run after the last setting."""
    if nested.is_at_horizon(value.child):
        committed = nested.progress(value.child).committed
        assert committed is not None
        unit = "round" if isinstance(job.strategy, Federated) else "step"
        return RunCompleted(reason=f"{counted(committed.step, unit)} committed")
    child = value.child
    return child.strategy.decide(child.job, child.value, world, now_s)


def transition(job: JobSpec, value: ScheduledRun, fact: Fact, now_s: float) -> ScheduledRun:
    """Return the run value with a fact folded in, under the next setting if one has ended."""
    return _advanced(job, replace(value, child=nested.transition(value.child, fact, now_s)))


def _advanced(job: JobSpec, value: ScheduledRun) -> ScheduledRun:
    """Return the run value under the next setting if the current one has ended and is not last."""
    following = value.setting + 1
    if following == len(_schedule(job).settings) or not nested.is_at_horizon(value.child):
        return value
    setting_job = scheduled_job(job, _schedule(job).settings[following])
    latest = nested.progress(value.child)
    assert latest.committed is not None
    # Where rows come as a stream, the place in it is one of the seed before.
    base = replace(latest.committed, streams="")
    horizon = _horizon(job, following)
    child = nested.rebased(value.child, setting_job, base, latest.num_rows, horizon)
    return ScheduledRun(child, following)


def returned(
    job: JobSpec, value: ScheduledRun, base: Base, metrics: Mapping[str, float]
) -> ScheduledRun:
    """Return the run value after a return to one of its own commits: under the setting that trained
    the commit, or under the next one if the commit ends that setting."""
    horizons = (_horizon(job, place) for place in range(len(_schedule(job).settings)))
    setting = next(place for place, horizon in enumerate(horizons) if base.segment <= horizon)
    setting_job = scheduled_job(job, _schedule(job).settings[setting])
    child = replace(value.child, job=setting_job, horizon=_horizon(job, setting))
    return _advanced(job, ScheduledRun(nested.returned(child, base, metrics), setting))


def restored(job: JobSpec, value: ScheduledRun, earlier: ScheduledRun) -> ScheduledRun:
    """Return the run value as it goes on from the commit of an earlier one, under its setting."""
    setting_job = scheduled_job(job, _schedule(job).settings[earlier.setting])
    child = replace(value.child, job=setting_job, horizon=earlier.child.horizon)
    return ScheduledRun(nested.restored(child, earlier.child.value), earlier.setting)


def pending(
    run_id: RunId, _job: JobSpec, value: ScheduledRun, horizon: int | None
) -> frozenset[Effect]:
    """Return the effects due, up to the end of the current setting, or an earlier horizon."""
    child = value.child
    ends = child.horizon if horizon is None else min(horizon, child.horizon)
    return child.strategy.pending(run_id, child.job, child.value, ends)


def status(job: JobSpec, value: ScheduledRun, world: World) -> Status:
    """Return the party's status; the training ends where the schedule does."""
    child = value.child
    child_status = child.strategy.status(child.job, child.value, world)
    if not child_status.num_segments:
        return child_status
    last, ends = len(_schedule(job).settings) - 1, _schedule(job).ends(child_status.num_steps)
    return replace(child_status, num_steps=ends[-1], num_segments=_horizon(job, last))


def _horizon(job: JobSpec, setting: int) -> int:
    """Return the last segment of a setting, which follows from the job without counting rows."""
    plain = scheduled_job(job, _schedule(job).settings[setting])
    segments = schedule_of(plain, {"train": 0})
    return 1 + segments.ends().index(_schedule(job).ends(segments.num_steps)[setting])


STRATEGY = Strategy(
    version=VERSION,
    check=check,
    init=begin,
    decide=decide,
    transition=transition,
    reject_reason=lambda _job, value, fact: nested.reject_reason(value.child, fact),
    pending=pending,
    status=status,
    children=lambda value: (value.child,),
    nesting=Nesting(
        progress=lambda value: nested.progress(value.child),
        rebase=lambda job, value, base, _num_rows: returned(job, value, base, {}),
        returned=returned,
    ),
    repeating=Repeating(lambda value: nested.committed(value.child), restored),
)
