"""Resolve the `initial` of a job, an earlier run or a file, to the digest of a stored state, and
check jobs that resume runs.

This happens before the job is submitted, so the run records permanently what it began from.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from stratagem.client.course import views
from stratagem.client.course.views import Commit, RunStatus
from stratagem.client.sdk.connection import Connection
from stratagem.client.sdk.uploads import send
from stratagem.common.base.errors import InvalidInputError, NotFoundError, Violation
from stratagem.common.base.ids import Digest
from stratagem.common.job import InitialSpec, JobSpec
from stratagem.common.job.schedules import ScheduleSpec
from stratagem.common.job.sections import plateau_metric, stop_metric
from stratagem.common.schema.json import JSON, frozen
from stratagem.common.tensors.files import blob_digest, from_file, read_header
from stratagem.common.tensors.manifest import Purpose
from stratagem.v1 import coordinator_pb2 as pb

# ---- Initial state ----

_FINAL: Final = "final"


async def resolve_initial(connection: Connection, job: JobSpec) -> tuple[JobSpec, str]:
    """Return the job with its `initial` replaced by a digest, and a remark for the user or "".

    Raises NotFoundError for a run, a state or a file that does not exist, and InvalidInputError for
    a file that is not a safetensors file.
    """
    initial, note = job.initial, ""
    if initial is None or initial.digest is not None:
        return job, note
    if initial.run is not None:
        spec, note = await _of_run(connection, job, initial.run, initial.which or _FINAL)
    else:
        assert initial.file is not None  # exactly one of the three is set
        spec = InitialSpec(digest=await _upload(connection, Path(initial.file)))
    # Parse again, so that rules about several sections see the digest.
    return JobSpec.parse({**job.document(), "initial": spec.document()}), note


async def _of_run(
    connection: Connection, job: JobSpec, run_id: str, which: str
) -> tuple[InitialSpec, str]:
    response = await connection.call(connection.stub.GetRun, pb.GetRunRequest(run_id=run_id))
    status = views.run_status(response.run)
    commit = status.commit(which)
    if commit is None:
        segments = ", ".join(str(stored.segment) for stored in status.commits) or "nothing"
        text = f"initial.which: run {run_id} has no state {which!r}; kept is {segments}"
        raise NotFoundError(text)
    digest = Digest(commit.digest)
    if job.initial is not None and job.initial.resume:
        check_resumed_job(status.job, job)
        check_steps_left(status, commit, job)
        spec = InitialSpec(
            digest=digest,
            resume=True,
            step=commit.step,
            metrics=carried_metrics(commit.metrics, JobSpec.parse(status.job), job) or None,
            average=Digest(commit.average) if commit.average else None,
        )
        return spec, schedule_note(status, commit, job)
    return InitialSpec(digest=digest, trained_with=frozen(commit.hyperparameters) or None), ""


async def _upload(connection: Connection, path: Path) -> Digest:
    try:
        manifest, data_start = read_header(path)
    except OSError as error:
        raise InvalidInputError.at("initial.file", f"{path}: {error.strerror}") from error
    content = from_file(path, data_start, manifest.total_bytes)
    digest = await asyncio.to_thread(lambda: blob_digest(manifest, content(0)))
    await send(connection, replace(manifest, purpose=Purpose.DATA, digest=digest), content)
    return digest


# ---- Resumed jobs ----
#
# A job may continue from a commit of another run with its optimizer and its step.
#
# Everything that the state was trained with must stay the same: the model, the data and their
# order, and whatever decides the bits of a step. Settings that only say how the training goes on
# may differ.

MAY_CHANGE: Final = (
    *("name", "initial", "epochs", "steps", "strategy.rounds"),
    *("optimizer", "evaluation", "checkpoint", "callbacks"),
    *("retention", "recording", "verification", "placement_timeout_s"),
    *("strategy.options.partition_state", "strategy.options.mirror"),
    *("strategy.options.min_replicas", "strategy.options.upload_every"),
)
"""Fields that a resumed job may change, with all fields below them, unless in MUST_STAY."""
MUST_STAY: Final = {
    "optimizer.name": "the state holds what that optimizer keeps for each parameter",
    "optimizer.entrypoint": "the state holds what that optimizer keeps for each parameter",
    "model": "the state is that of this model",
    "data": "the step of the run is a place in these data",
    "batch_size": "the step of the run is a place in the data, counted in batches of this size",
    "seed": "the order of the rows and all random numbers follow from it",
    "strategy.type": "another strategy makes other steps",
    "strategy.num_replicas": "the shards of a batch decide the bits of a step",
    "strategy": "it decides the bits of the steps",
}
_MAPPINGS: Final = ("strategy.options",)
"""Fields that count as missing if all values in them are defaults."""
_COUNTED: Final = ("stop.", "plateau.", "train.skipped_steps")
_OVER_ALL: Final = ("linear", "cosine", "polynomial", "onecycle")
"""Learning-rate schedules that span the whole training, unless they have a length of their own."""
_OTHERS: Final = "it decides the bits of the steps"


def check_resumed_job(earlier: Mapping[str, Any], job: JobSpec) -> None:
    """Raise InvalidInputError with the fields that differ from the resumed run and may not."""
    before = JobSpec.parse(earlier)
    changed = _changed(before.document(), job.document())
    violations = [violation for violation in map(_violation, changed) if violation is not None]
    if _optimizers_of_groups(before) != _optimizers_of_groups(job):
        text = f"must stay as it was in the run: {MUST_STAY['optimizer.name']}"
        violations.append(Violation("optimizer.groups", text))
    if violations:
        raise InvalidInputError(violations=violations)


def check_steps_left(status: RunStatus, commit: Commit, job: JobSpec) -> None:
    """Raise InvalidInputError if the job's epochs end at or before the commit that it continues
    from.

    status: the status of the resumed run, whose epochs give the number of steps per epoch. If its
    job counted steps, only the worker can check this, because it knows the number of rows.
    """
    earlier = JobSpec.parse(dict(status.job)).epochs
    if job.steps is not None or not job.epochs or not earlier or not status.num_steps:
        return
    total = job.epochs * (status.num_steps // earlier)
    if total <= commit.step:
        text = (
            f"{job.epochs} is a training of {total} steps, and the state that is resumed has "
            f"{commit.step} already; give it more"
        )
        raise InvalidInputError.at("epochs", text)


def schedule_note(status: RunStatus, commit: Commit, job: JobSpec) -> str:
    """Return a remark if a learning-rate schedule spans the training, whose length has changed,
    else "".

    status: the status of the resumed run. A schedule that the job changed, too, needs no remark.
    """
    earlier = JobSpec.parse(dict(status.job))
    changes = [
        f"{name} {now} in place of {before or 'none'}"
        for name, before, now in (
            ("epochs", earlier.epochs, job.epochs),
            ("steps", earlier.steps, job.steps),
        )
        if now and now != before
    ]
    schedules = {path: optimizer.schedule for path, optimizer in earlier.optimizers().items()}
    same = {
        path: optimizer.schedule
        for path, optimizer in job.optimizers().items()
        if optimizer.schedule is not None and optimizer.schedule == schedules.get(path)
    }
    reading = {path: name for path, schedule in same.items() if (name := _ends_with_all(schedule))}
    if not changes or not reading:
        return ""
    length = status.num_steps or "N"  # its number of steps is not known before it begins
    which = ", ".join(f"{path}.schedule ({name})" for path, name in reading.items())
    keep = " and ".join(
        f"{'the last part of ' * (same[path].name == 'chain')}{path}.schedule" for path in reading
    )
    return (
        f"schedule: {which} spans the whole training, which now has "
        f"{' and '.join(changes)}: the learning rate continues at step {commit.step} of the "
        f"new curve, not at its old value; steps: {length} in {keep} keeps the old curve, which "
        "then stays at its end"
    )


def _ends_with_all(schedule: ScheduleSpec) -> str:
    """Return the name of the schedule's curve if that ends when the training ends; else ""."""
    if schedule.name == "chain" and schedule.parts:
        return _ends_with_all(schedule.parts[-1])
    return schedule.name or "" if schedule.name in _OVER_ALL and schedule.steps is None else ""


def _optimizers_of_groups(job: JobSpec) -> list[object]:
    """Return (rules for its parameters, optimizer) for each group with an optimizer of its own."""
    return [
        (group.match, group.max_dims, group.optimizer.label)
        for optimizer in job.optimizers().values()
        for group in optimizer.groups or ()
        if group.optimizer is not None
    ]


def carried_metrics(
    metrics: Mapping[str, float], earlier: JobSpec, job: JobSpec
) -> dict[str, float]:
    """Return the metrics of a commit with which the new run continues: skipped steps, and the
    counters of early stopping and of plateaus, if these watch the same metric as before."""
    dropped = {
        f"{prefix}{name}"
        for prefix, of_job in (("stop.", _stops_by), ("plateau.", _falls_by))
        if of_job(earlier) != of_job(job)
        for name in ("best", "evaluations_without_improvement")
    }
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith(_COUNTED) and name not in dropped and math.isfinite(value)
    }


def _stops_by(job: JobSpec) -> tuple[str, str] | None:
    evaluation = job.evaluation
    if evaluation is None or evaluation.stop is None:
        return None
    followed = stop_metric(evaluation, evaluation.stop)
    return followed.name, followed.mode


def _falls_by(job: JobSpec) -> tuple[str, str] | None:
    if job.evaluation is None or job.optimizer is None or job.optimizer.plateau is None:
        return None
    followed = plateau_metric(job.evaluation, job.optimizer.plateau)
    return followed.name, followed.mode


def _changed(
    before: Mapping[str, JSON], after: Mapping[str, JSON], path: str = ""
) -> Iterator[str]:
    """Yield the paths of fields that differ in two documents; a list is compared as one value."""
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        inner = f"{path}{key}"
        if inner in _MAPPINGS:
            old, new = old or {}, new or {}
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changed(old, new, f"{inner}.")
        else:
            yield inner


def _violation(path: str) -> Violation | None:
    """Return the error about a changed field, or None if it may change; the rule with the longest
    matching path decides."""
    parts = path.split(".")
    for prefix in (".".join(parts[:n]) for n in range(len(parts), 0, -1)):
        if prefix in MAY_CHANGE:
            return None
        if prefix in MUST_STAY:
            return Violation(path, f"must stay as it was in the run: {MUST_STAY[prefix]}")
    return Violation(path, f"must stay as it was in the run: {_OTHERS}")
