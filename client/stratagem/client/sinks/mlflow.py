"""Log a run to MLflow, as a run of the experiment that has the name of the job.

Needs the extra `mlflow`. A tag of the MLflow run records how far it has been logged.
"""

import json
import time
from collections.abc import Iterable
from typing import Any, Final

from mlflow import MlflowClient
from mlflow.entities import Metric

from stratagem.client.course.views import Event
from stratagem.client.sinks.sink import Cursor, RowBlock, SinkRun, values_of

MAX_METRICS: Final = 1000
"""The largest number of metrics per call, a limit of MLflow's servers."""
RUN_TAG: Final = "stratagem.run"
CURSOR_TAG: Final = "stratagem.cursor"


class MlflowSink:
    """A sink that logs each row's last value as a metric, under the name of its series."""

    def __init__(self, target: str) -> None:
        self._client: Any = MlflowClient(tracking_uri=target)
        self._run_id = ""

    def open(self, run: SinkRun) -> Cursor:
        experiment = self._client.get_experiment_by_name(run.name)
        experiment_id = experiment.experiment_id if experiment else None
        if experiment_id is None:
            experiment_id = self._client.create_experiment(run.name)
        wanted = f"tags.`{RUN_TAG}` = '{run.run_id}'"
        runs = self._client.search_runs([experiment_id], wanted)
        if runs:
            self._run_id = runs[0].info.run_id
            return _cursor(runs[0].data.tags.get(CURSOR_TAG, ""))
        tags = {RUN_TAG: run.run_id, "stratagem.strategy": run.strategy}
        made = self._client.create_run(experiment_id, tags=tags, run_name=run.run_id)
        self._run_id = made.info.run_id
        return Cursor()

    def restart(self) -> Cursor:
        """Keep what MLflow has, so that steps that are trained again are not logged twice."""
        return _cursor(self._client.get_run(self._run_id).data.tags.get(CURSOR_TAG, ""))

    def rows(self, block: RowBlock) -> None:
        columns, now_ms = block.columns, int(time.time() * 1000)
        pairs = zip(columns.step.tolist(), columns.last.tolist(), strict=True)
        self._log(Metric(block.name, value, now_ms, step) for step, value in pairs)

    def fact(self, event: Event) -> None:
        step, values = values_of(event)
        when_ms = int(event.time_s * 1000)
        self._log(Metric(name, value, when_ms, step) for name, value in values.items())
        ended = {"RunCompleted": "FINISHED", "StoppedEarly": "FINISHED", "RunFailed": "FAILED"}
        status = {**ended, "RunCancelled": "KILLED", "RunResumed": "RUNNING"}.get(event.kind)
        if status is not None:
            self._client.update_run(self._run_id, status=status)

    def keep(self, cursor: Cursor) -> None:
        text = json.dumps({"event_index": cursor.event_index, "steps": dict(cursor.steps)})
        self._client.set_tag(self._run_id, CURSOR_TAG, text)

    def close(self) -> None:
        pass  # nothing is open between calls

    def _log(self, metrics: Iterable[Any]) -> None:
        logged = list(metrics)
        for start in range(0, len(logged), MAX_METRICS):
            some = logged[start : start + MAX_METRICS]
            self._client.log_batch(self._run_id, metrics=some)


def _cursor(text: str) -> Cursor:
    saved = json.loads(text or "{}")
    return Cursor(saved.get("event_index", -1), saved.get("steps", {}))
