"""Measure how long the stages of one rank compute and wait in each step, and record a timeline.

The times are always measured, so measuring must cost almost nothing: the clock is read before and
after the computation of each micro-batch. On a GPU, which works asynchronously, events are recorded
in its stream instead and read when the step has ended, without waiting in between. The module does
not know what a stage computes.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from stratagem.common.history.recording import NONE, StageAction, StageReport, party_of_stage, told
from stratagem.common.pipeline.schedules import Action
from stratagem.worker.engine.reports import PartReport
from stratagem.worker.host.clock import clock_number

Moment: TypeAlias = float | torch.cuda.Event
"""A point in time: seconds by the host's clock, or an event in a CUDA stream."""


class TimedPiece(NamedTuple):
    """One measured piece of work of a stage."""

    stage: int
    kind: str
    micro_batch: int
    began: Moment
    ended: Moment
    wait_s: float


@dataclass(slots=True)
class StageTimes:
    """The times of one step of a rank, per stage."""

    device: torch.device
    rank: int
    """The number of this rank in its pipeline."""
    sources: Mapping[int, Sequence[int]]
    """The stages from which each stage of this rank receives activations, in order."""
    busy_s: dict[int, float] = field(default_factory=dict)
    wait_s: dict[int, float] = field(default_factory=dict)
    """Seconds that each stage waited for messages from others."""
    span_s: float = 0.0
    """Seconds from the first piece of work to the end of the last one."""
    _origin: Moment = 0.0
    """The beginning of the step."""
    _began_s: float = 0.0
    """The beginning of the step by the host's clock."""
    _pass_ended: Moment = 0.0
    _pieces: list[TimedPiece] = field(default_factory=list)
    _waited_s: float = 0.0
    """Seconds of the latest wait, which is charged to the next piece of work."""
    _num_micro_batches: int = 0
    """Number of micro-batches in the finished passes of this step."""

    def begin(self) -> None:
        """Begin a step, with all times at zero."""
        self.busy_s = dict.fromkeys(self.sources, 0.0)
        self.wait_s = dict.fromkeys(self.sources, 0.0)
        self.span_s = self._waited_s = 0.0
        self._num_micro_batches = 0
        self._pieces = []  # a report may have those of the step before
        self._origin = self._pass_ended = self._now()
        # Where both are of one clock they are one reading: a process may lose its core in between.
        origin = self._origin
        self._began_s = origin if isinstance(origin, float) else time.perf_counter()

    @contextmanager
    def computing(self, action: Action) -> Iterator[None]:
        """Context manager that measures the computation of one action of the schedule."""
        number, waited_s = self._num_micro_batches + action.micro_batch, self._waited_s
        self._waited_s = 0.0
        began = self._now()
        yield
        kind = action.kind.name.lower()
        self._pieces.append(TimedPiece(action.stage, kind, number, began, self._now(), waited_s))

    def exchanged(self) -> None:
        """Record the time since the last pass as the exchange of gradients over stages and
        replicas."""
        self._add_once("exchange", self._pass_ended)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context manager that measures the optimizer's step."""
        began = self._now()
        yield
        self._add_once("optimizer", began)

    def _add_once(self, kind: str, began: Moment) -> None:
        """Record work that is done once per step; it is attributed to the first stage."""
        first = next(iter(self.sources))
        self._pieces.append(TimedPiece(first, kind, NONE, began, self._now(), 0.0))

    @contextmanager
    def waiting(self, stage: int) -> Iterator[None]:
        """Context manager that measures a stage's wait for a message."""
        began_s = time.perf_counter()
        yield
        self._waited_s = time.perf_counter() - began_s
        self.wait_s[stage] += self._waited_s

    @contextmanager
    def working(self, num_micro_batches: int) -> Iterator[None]:
        """Context manager around a whole pass, which measures its span."""
        began_s = time.perf_counter()
        yield
        self.span_s += time.perf_counter() - began_s
        self._num_micro_batches += num_micro_batches
        self._pass_ended = self._now()

    def _now(self) -> Moment:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reports(self) -> list[PartReport]:
        """Return the step's times per stage, once the step has ended; the rank's span is reported
        with its first stage."""
        for piece in self._pieces:
            if piece.micro_batch != NONE:
                self.busy_s[piece.stage] += _seconds(piece.began, piece.ended)
        first = next(iter(self.sources), None)
        return [
            PartReport(
                f"stage/{stage}",
                observed={
                    "busy_s": self.busy_s[stage],
                    "wait_s": self.wait_s[stage],
                    **({"span_s": self.span_s} if stage == first else {}),
                },
            )
            for stage in self.sources
        ]

    def actions(self) -> Callable[[], list[PartReport]]:
        """Return a function that computes the timeline of the step on demand, since that costs more
        than measuring and is needed for one step per segment only."""
        return partial(self._reported, self._origin, self._began_s, self._pieces)

    def _reported(
        self, origin: Moment, began_s: float, pieces: Sequence[TimedPiece]
    ) -> list[PartReport]:
        """Return the timelines of the stages. origin, began_s: the beginning of the step."""
        by_stage: dict[int, list[StageAction]] = {stage: [] for stage in self.sources}
        for stage, kind, number, began, ended, wait_s in pieces:
            times = _seconds(origin, began), _seconds(origin, ended)
            by_stage[stage].append(StageAction(kind, number, *times, wait_s))
        clock = clock_number()
        reports = {
            stage: StageReport(self.rank, self.sources[stage], told(its), began_s, clock)
            for stage, its in by_stage.items()
        }
        return [
            PartReport(party_of_stage(stage), observed=report.values)
            for stage, report in reports.items()
        ]


def _seconds(began: Moment, ended: Moment) -> float:
    if isinstance(began, float) or isinstance(ended, float):
        return float(ended) - float(began)  # type: ignore[arg-type]  # of one clock both
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
