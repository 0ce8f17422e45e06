"""A run whose steps and facts come part by part, for sinks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from stratagem.client.course.step_history import History, StepSeries
from stratagem.client.course.views import Event, Phase, Progress, RunStatus
from stratagem.common.history.columns import Columns, coarsened, concatenated

STRIDE = 4


def columns_of(first: int, values: Sequence[float]) -> Columns:
    """Rows of one step each."""
    steps = np.arange(first, first + len(values), dtype=np.int64)
    array = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(array)
    low = np.where(finite, array, np.nan)
    return Columns(steps, low, low, low, finite.astype(np.int64), (~finite).astype(np.int64))


@dataclass
class PlayedRun:
    """Shows the first `shown` segments of a run of two parties, and what is in flight behind."""

    segments: Sequence[int]
    """Steps of each."""
    shown: int = 0
    phase: Phase = Phase.RUNNING
    events: list[Event] = field(default_factory=list)
    asked_from: list[int] = field(default_factory=list)

    def advance(self) -> None:
        """Finish a segment."""
        self.shown += 1
        step = sum(self.segments[: self.shown])
        metrics = {"test.accuracy": step / 1000, "train.grad_norm": 1.0}
        self.say("SegmentFinished", segment=self.shown, step=step, metrics=metrics)

    def end(self) -> None:
        self.say("RunCompleted", Phase.COMPLETED, reason="all")

    def say(self, kind: str, phase: Phase = Phase.RUNNING, **payload: object) -> None:
        self.phase = phase
        index = len(self.events)
        fact = {"party": "", **payload}
        self.events.append(Event(index, 100.0 + index, kind, f"{kind} {index}", fact, phase))

    # ---- what a RunHandle answers ----

    def status(self) -> RunStatus:
        return RunStatus(
            run_id="mine",
            name="digits",
            phase=self.phase,
            reason="",
            strategy_phase="",
            strategy="Local",
            step=0,
            num_steps=0,
            segment=0,
            num_segments=0,
            submitted_at_s=100.0,
            ended_at_s=None,
            commits=(),
            metrics={},
            worker_ids=(),
            error=None,
            job={"name": "digits"},
            event_index=len(self.events) - 1,
            engine="",
            reproducible=True,
        )

    def watch(
        self, from_index: int = 0, *, kinds: Iterable[str] = (), follow: bool | None = None
    ) -> Iterator[Event | Progress]:
        assert follow is False
        return (event for event in list(self.events[from_index:]) if event.kind in kinds)

    def history(
        self,
        series: str | Sequence[str] = (),
        parties: str | Sequence[str] = (),
        *,
        from_step: int = 1,
    ) -> History:
        assert parties == ("*",)
        self.asked_from.append(from_step)
        done = sum(self.segments[: self.shown])
        in_flight = 0 if self.phase.is_final else 3
        found = [
            _series("train.loss", "", done, in_flight, STRIDE, from_step),
            _series("train.lr", "", done, in_flight, STRIDE, from_step),
            _series("train.loss", "member1", done // 2, 0, 1, from_step),
        ]
        return History(each for each in found if len(each))


def _series(
    name: str, party: str, done: int, in_flight: int, stride: int, from_step: int
) -> StepSeries:
    values = [
        float("nan") if step % 7 == 0 else 10.0 / step for step in range(1, done + in_flight + 1)
    ]
    certain = coarsened(columns_of(1, values[:done]), stride)
    flying = coarsened(columns_of(done + 1, values[done:]), stride)
    all_rows = coarsened(concatenated([certain, flying]), stride)
    kept = all_rows.step >= from_step
    columns = Columns(*(column[kept] for column in all_rows.arrays))
    return StepSeries(name, party, stride, False, columns, columns.step > done)
