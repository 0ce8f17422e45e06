"""The step history of one segment on one member: what is recorded of each step, and its sending.

Every member records, so that any of them can go on with what another one has begun; the first one
of the party sends. What it sends begins with the segment's first step whenever a view begins: the
member before it may be gone, and with it what only that one had sent.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping
from typing import Final

from stratagem.common.history import Recorder, Series, SeriesRows
from stratagem.common.history.packing import packed_parts
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import StepReport
from stratagem.worker.engine.step.logged_sums import means
from stratagem.worker.phases import TrainingPhase
from stratagem.worker.session.context import ExecutionContext

SEND_INTERVAL_S: Final = 0.5

_LOSS: Final = Series("train.loss")
_PREDICTED: Final = Series("train.loss.predicted")
_GRAD_NORM: Final = Series("train.grad_norm")
_WALL: Final = Series("time.wall_s", observed=True)
_ROWS_PER_S: Final = Series("time.rows_per_s", observed=True)
_WAIT: Final = Series("time.exchange_wait_s", observed=True)


class StepHistory:
    """Records the steps of a segment under one view. Used by the torch thread."""

    def __init__(self, work: ExecutionContext, stride: int, step: int, *, sends: bool) -> None:
        """stride: 0 records nothing. step: steps applied. sends: whether this member sends."""
        self._work, self._sends = work, sends
        self._num_parts, self._sent_s = 0, time.monotonic()
        self._digest = hashlib.sha256()
        recording = work.job.recording
        self._observes = recording is None or recording.observed
        self._series: dict[str, Series] = {}
        held = work.holding.recorder
        if not stride:
            work.holding.recorder = None
        elif held is None or held.stride != stride:
            work.holding.recorder = Recorder(stride, step)
        else:
            held.rewind()
        if sends:
            work.post(work.outbox.restart_history)

    @property
    def _recorder(self) -> Recorder | None:
        return self._work.holding.recorder

    def add(self, report: StepReport, seconds: float) -> None:
        """Record an applied step that took so long; send what is complete, at intervals."""
        recorder = self._recorder
        if recorder is None:
            return
        if report.answered:
            recorder.add(self._shown_step(report), self._logged(report.answered))
        recorder.add(report.step, self._values(report, seconds))
        if self._sends and time.monotonic() - self._sent_s >= SEND_INTERVAL_S:
            self._sent_s = time.monotonic()
            self._send(recorder.take())

    def end(self) -> tuple[int, str]:
        """Send all that is left, also of rows that the next segment goes on with; return how many
        parts there are, and their digest."""
        recorder = self._recorder
        if recorder is None or not self._sends:
            return 0, ""
        holding = self._work.holding
        if holding.answer.logged:  # of the last step, of which the others have not learned
            recorder.add(holding.shown_step, self._logged(holding.answer.logged))
        self._send(recorder.end())
        if recorder.dropped:
            names = ", ".join(sorted(recorder.dropped)[:5])
            text = f"the step history leaves out {len(recorder.dropped)} series, such as {names}"
            self._work.warn([text])
            recorder.dropped.clear()
        return self._num_parts, self._digest.hexdigest()

    def _shown_step(self, report: StepReport) -> int:
        """Return the step that on_step was shown before this one: the last exact one."""
        latest = self._work.holding.tally.latest
        return int(latest["step"]) if latest else report.step - 1

    def _logged(self, logged: Mapping[str, float]) -> Iterator[tuple[Series, float]]:
        for name, value in logged.items():
            yield self._named(f"train.{name}"), value

    def _values(self, report: StepReport, seconds: float) -> Iterator[tuple[Series, float]]:
        is_predicted = report.phase == TrainingPhase.PREDICT
        yield _PREDICTED if is_predicted else _LOSS, report.loss
        yield _GRAD_NORM, report.grad_norm
        for name, rate in report.learning_rates.items():
            yield self._named(name), rate
        yield from self._logged(means(report.logged))
        if self._observes:
            yield _WALL, time.time()
            yield _ROWS_PER_S, report.num_rows / max(seconds, 1e-9)
            yield _WAIT, report.exchange_wait_s

    def _named(self, name: str) -> Series:
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = Series(name)
        return series

    def _send(self, rows: SeriesRows) -> None:
        recorder = self._recorder
        assert recorder is not None
        for packed in packed_parts(rows):
            part = pb.HistoryPart(number=self._num_parts, from_step=recorder.from_step, rows=packed)
            self._digest.update(packed)
            self._num_parts += 1
            self._work.post(self._work.outbox.add_history, part)
