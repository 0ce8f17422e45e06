"""Seconds that the stages of one rank compute and wait in a training step.

Always measured, so it has to cost next to nothing: two looks at a clock around what is computed for
a micro-batch. On a GPU, which works while the host goes on, events in its stream take their place
and are read when the step has ended; nothing is waited for in between. Must not know what a stage
computes.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from stratagem.worker.engine.step.step_report import PartReport


@dataclass(slots=True)
class StageTimes:
    """The times of one step. stages: of this rank, in order."""

    device: torch.device
    stages: Sequence[int]
    busy_s: dict[int, float] = field(default_factory=dict)
    wait_s: dict[int, float] = field(default_factory=dict)
    """By stage: for what others had to send it."""
    span_s: float = 0.0
    """From the first piece of work to the end of the last one."""
    _events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a step."""
        self.busy_s = dict.fromkeys(self.stages, 0.0)
        self.wait_s = dict.fromkeys(self.stages, 0.0)
        self.span_s = 0.0
        self._events.clear()

    @contextmanager
    def computing(self, stage: int) -> Iterator[None]:
        """Around what a stage computes."""
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((stage, start, end))
            return
        began_s = time.perf_counter()
        yield
        self.busy_s[stage] += time.perf_counter() - began_s

    @contextmanager
    def waiting(self, stage: int) -> Iterator[None]:
        """Around the wait for a message to a stage."""
        began_s = time.perf_counter()
        yield
        self.wait_s[stage] += time.perf_counter() - began_s

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around all pieces of work of a pass."""
        began_s = time.perf_counter()
        yield
        self.span_s += time.perf_counter() - began_s

    def reports(self) -> list[PartReport]:
        """Return the step's times by stage, once it has ended; the span is the rank's, and stands
        with its first stage."""
        for stage, start, end in self._events:
            end.synchronize()
            self.busy_s[stage] += start.elapsed_time(end) / 1e3
        self._events.clear()
        spans = {stage: {"span_s": self.span_s} for stage in self.stages[:1]}
        return [
            PartReport(
                f"stage/{stage}",
                observed={
                    "busy_s": self.busy_s[stage],
                    "wait_s": self.wait_s[stage],
                    **spans.get(stage, {}),
                },
            )
            for stage in self.stages
        ]
