"""Counts of this worker's work so far, updated once per step in the torch thread.

Read only by `worker_metrics.py`, when the worker is scraped.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from stratagem.common.observe.metrics import Durations
from stratagem.v1 import worker_pb2

if TYPE_CHECKING:  # the engine knows nothing of this
    from stratagem.worker.engine import StepReport

DEFECT: Final = "defect"
"""The outcome of an execution that ended by a defect of ours."""
OUTCOMES: Final = (
    *(
        outcome.name
        for outcome in worker_pb2.ExecuteResult.DESCRIPTOR.oneofs_by_name["outcome"].fields
    ),
    DEFECT,
)
STEP_BOUNDS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(slots=True)
class WorkStats:
    """Counts and durations of one worker's work.

    ended: executions by outcome, see `ExecuteResult` in worker.proto. stalled_s: for how long the
    torch thread has been at one thing, where that is reported.
    """

    step_seconds: Durations = field(default_factory=lambda: Durations(STEP_BOUNDS_S))
    snapshot_stall_seconds: Durations = field(default_factory=lambda: Durations(STEP_BOUNDS_S))
    num_steps: int = 0
    num_skipped_steps: int = 0
    num_rows: int = 0
    exchange_wait_s: float = 0.0
    stalled_s: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)

    def add_step(self, seconds: float, report: "StepReport") -> None:
        """Count one training step."""
        self.num_steps += 1
        self.step_seconds.add(seconds)
        self.num_rows += report.num_rows
        self.num_skipped_steps += report.num_skipped
        self.exchange_wait_s += report.exchange_wait_s


class ClientSteps:
    """Times the local steps of one federated client, each until the next one begins."""

    def __init__(self, stats: WorkStats) -> None:
        self._stats = stats
        self._began_s: float | None = None

    def begin_step(self) -> None:
        """Begin a step, which ends the one before."""
        self._end_step()
        self._began_s = time.perf_counter()

    def end(self, num_rows: int) -> None:
        """End the last step; the client has trained on so many rows in all of them."""
        self._end_step()
        self._stats.num_rows += num_rows

    def _end_step(self) -> None:
        if self._began_s is None:
            return
        self._stats.num_steps += 1
        self._stats.step_seconds.add(time.perf_counter() - self._began_s)
        self._began_s = None
