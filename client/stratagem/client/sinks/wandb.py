"""Log a run to Weights & Biases, as a run of a project, also offline (WANDB_MODE=offline).

Needs the extra `wandb`. Each value is logged with its step as the axis, because the count of steps
that W&B keeps must not go back.
"""

import os
from pathlib import Path
from typing import Any, Final

import wandb

from stratagem.client.course.views import Event
from stratagem.client.sinks.sink import (
    Cursor,
    RowBlock,
    SinkRun,
    cursor_path,
    read_cursor,
    values_of,
    write_cursor,
)

STEP: Final = "step"


class WandbSink:
    """A sink that logs each row's last value under the name of its series."""

    def __init__(self, target: str) -> None:
        self._project = target
        self._run: Any = None
        self._cursor_path = Path()

    def open(self, run: SinkRun) -> Cursor:
        folder = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
        self._run = wandb.init(
            project=self._project, id=run.run_id, name=run.run_id, group=run.name, resume="allow"
        )
        self._run.config.update({"job": dict(run.job)}, allow_val_change=True)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        folder.mkdir(parents=True, exist_ok=True)
        self._cursor_path = cursor_path(folder / self._project, run.run_id)
        return read_cursor(self._cursor_path) or Cursor()

    def restart(self) -> Cursor:
        """Keep what W&B has, so that steps that are trained again are not logged twice."""
        return read_cursor(self._cursor_path) or Cursor()

    def rows(self, block: RowBlock) -> None:
        columns = block.columns
        for step, value in zip(columns.step.tolist(), columns.last.tolist(), strict=True):
            self._run.log({block.name: value, STEP: step})

    def fact(self, event: Event) -> None:
        step, values = values_of(event)
        if values:
            self._run.log({**values, STEP: step})

    def keep(self, cursor: Cursor) -> None:
        write_cursor(self._cursor_path, cursor)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
