"""Runs that real clusters have journaled, as reports take them."""

from dataclasses import replace
from typing import Any

import numpy as np

from stratagem.client.course.step_history import StepSeries
from stratagem.client.course.views import Commit, Phase, RunStatus
from stratagem.client.report.run import ReportedRun
from stratagem.common.history import Columns
from stratagem.common.job import JobSpec
from stratagem.common.strategy import describe
from tests.client.course.recorded import golden, job_of


def reported(run_id: str, **changes: Any) -> ReportedRun:
    """The run of a golden journal, with changes of its status."""
    events = golden(run_id)
    job = job_of(events)
    commits = [
        Commit(
            *(event.payload["segment"], event.payload["step"], event.payload["digest"]),
            is_best=False,
            is_final=False,
            metrics=event.payload["metrics"],
            path="",
        )
        for event in events
        if event.kind == "SegmentCommitted" and not event.payload["party"]
    ]
    status = RunStatus(
        run_id=run_id,
        name=job["name"],
        phase=Phase.COMPLETED,
        reason=events[-2].sentence,
        strategy_phase="",
        strategy=describe(JobSpec.parse(job).strategy),
        step=12,
        num_steps=12,
        segment=3,
        num_segments=3,
        submitted_at_s=events[0].time_s,
        ended_at_s=events[-1].time_s,
        commits=tuple(commits),
        metrics={"test.loss": 0.25},
        worker_ids=("worker-1",),
        error=None,
        job=job,
        event_index=len(events) - 1,
        engine="solo",
        reproducible=True,
        submitted_by="client alice",
    )
    return ReportedRun.of(replace(status, **changes), events)


def recorded(stride: int, values: list[float], certain: int) -> StepSeries:
    """A series with rows of this stride, of which the first ones are certain."""
    last = np.array(values)
    step = stride * np.arange(1, len(values) + 1)
    count, nonfinite = np.isfinite(last).astype(int), (~np.isfinite(last)).astype(int)
    columns = Columns(step, last, last / 2, last * 2, count, nonfinite)
    provisional = np.arange(len(values)) >= certain
    return StepSeries("train.loss", "", stride, False, columns, provisional)
