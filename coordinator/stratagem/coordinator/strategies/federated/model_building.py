"""The choice of the worker that builds a federation's model; where each has rows of its own, any
that can.

A site whose data or code raises when the model is built would otherwise end the federation before
its first round. All its workers are tried, and the run fails when none can; so, too, where a worker
lacks a file, a package or memory, whatever the data are.
"""

from dataclasses import replace
from typing import Final

from stratagem.common.base.ids import Digest
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.coordinator.core.crash_loops import why
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import (
    BuildFailed,
    ErrorRecord,
    Member,
    ModelBuilt,
    RunFailed,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.metric_course import course_of, resumed_metrics
from stratagem.coordinator.core.state import WorkerRecord, World
from stratagem.coordinator.strategies.federated.client_crashes import BUILD
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun
from stratagem.coordinator.strategies.federated.update_rejections import (
    FAIL,
    MAX_NAMED,
    cause_of,
)
from stratagem.coordinator.strategies.scheduling.placement import is_site_of

_OF_THE_PLACE: Final = frozenset(
    {
        *("NotFoundError", "FileNotFoundError", "PermissionError", "OSError"),
        *("ImportError", "ModuleNotFoundError"),
    }
)
"""Types of errors that say what is not there."""
_UNWILLING: Final = (Cause.REFUSED_BY_SITE, Cause.OUTSIDE_WINDOW, Cause.BUDGET)


def may_move(job: JobSpec, error: ErrorRecord | None = None) -> bool:
    """Return True when a build that fails on one worker may succeed on another one. error: by which
    it has failed, unless its process has ended."""
    if not isinstance(job.strategy, Federated):
        return False
    if job.data.worker_local is None:
        return error is not None and _is_of_the_place(error)
    return job.strategy.options.on_client_error != FAIL


def _is_of_the_place(error: ErrorRecord) -> bool:
    """Return True for a file, a package, memory or a permission that only this worker may lack."""
    name = error.type.rpartition(".")[2]
    return name in _OF_THE_PLACE or cause_of(error) in (Cause.MEMORY, *_UNWILLING)


def build_failed(
    job: JobSpec, value: FederatedRun, workers: list[WorkerRecord]
) -> BuildFailed | RunFailed | None:
    """Give up on a worker whose processes the build ends one after the other; fail the run when
    none is left."""
    deaths = value.deaths.get(BUILD)
    if deaths is not None and deaths.latest and deaths.are_too_many and may_move(job):
        reason = why("it", deaths)
        return BuildFailed(party=value.party, member=deaths.latest.member, reason=reason)
    if not value.unfit or not workers or fit(value, workers):
        return None
    said = [f"{name}: {fact.reason}" for name, fact in sorted(value.unfit.items())]
    more = [f"{len(said) - MAX_NAMED} more"] if len(said) > MAX_NAMED else []
    errors = [fact.error for _, fact in sorted(value.unfit.items()) if fact.error is not None]
    text = f"no worker can build the model: {'; '.join(said[:MAX_NAMED] + more)}"
    return RunFailed(reason=text, error=errors[0] if errors else None)


def only_one_to_build(job: JobSpec, value: FederatedRun, world: World, member: Member) -> bool:
    """Return True when no other worker is left that may build the model: one whose site is closed
    is waited for then."""
    workers = [w for w in world.usable() if is_site_of(job, w)]
    return all(worker.member == member for worker in fit(value, workers))


def with_build(job: JobSpec, value: FederatedRun, fact: ModelBuilt | BuildFailed) -> FederatedRun:
    """Fold the outcome of a build: the first state, or a worker that cannot build it."""
    if isinstance(fact, ModelBuilt):
        metrics = resumed_metrics(job)
        return replace(
            value,
            committed=Base(fact.segment, fact.step, fact.digest, average=_resumed_average(job)),
            round_num=fact.segment + 1,
            num_rows=fact.num_rows,
            trained={name: n for name, n in metrics.items() if name not in course_of(metrics)},
            metrics=course_of(metrics),
            left={},
            deaths={},
        )
    name = fact.member.worker_id
    return replace(
        value,
        helper=tuple(member for member in value.helper if member.worker_id != name),
        unfit={**value.unfit, name: fact},
        deaths={task: count for task, count in value.deaths.items() if task != BUILD},
    )


def _resumed_average(job: JobSpec) -> Digest:
    """Return the average that a run goes on from which resumes a commit of another one."""
    initial = job.initial
    return Digest((initial and initial.average) or "")


def fit(value: FederatedRun, workers: list[WorkerRecord]) -> list[WorkerRecord]:
    """Return the workers that have not failed to build, while there is no model."""
    if value.committed is not None:
        return workers
    return [worker for worker in workers if worker.member.worker_id not in value.unfit]
