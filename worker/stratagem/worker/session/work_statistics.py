"""What this worker has done so far, as plain numbers: one update per step, in the torch thread.

Read by `monitoring.py` when somebody scrapes, and by nobody otherwise.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from stratagem.common.observe.metric_definition import Durations
from stratagem.v1 import worker_pb2

if TYPE_CHECKING:  # the engine knows nothing of this
    from stratagem.worker.engine import StepReport

DEFECT: Final = "defect"
"""How an execution ended that no caller is to blame for."""
OUTCOMES: Final = (
    *(each.name for each in worker_pb2.ExecuteResult.DESCRIPTOR.oneofs_by_name["outcome"].fields),
    DEFECT,
)
STEP_BOUNDS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(slots=True)
class WorkStats:
    """`ended`: executions by outcome, see `ExecuteResult` in worker.proto."""

    step_seconds: Durations = field(default_factory=lambda: Durations(STEP_BOUNDS_S))
    num_steps: int = 0
    num_skipped_steps: int = 0
    num_rows: int = 0
    exchange_wait_s: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)

    def add_step(self, seconds: float, report: StepReport) -> None:
        """One training step is done."""
        self.num_steps += 1
        self.step_seconds.add(seconds)
        self.num_rows += report.num_rows
        self.num_skipped_steps += report.num_skipped
        self.exchange_wait_s += report.exchange_wait_s


class ClientSteps:
    """The local steps of one federated client, told apart by their beginnings."""

    def __init__(self, stats: WorkStats) -> None:
        self._stats = stats
        self._began_s: float | None = None

    def begin_step(self) -> None:
        """A step begins, and with it the one before has ended."""
        self._end_step()
        self._began_s = time.perf_counter()

    def end(self, num_rows: int) -> None:
        """The last step has ended; the client has trained on so many rows in all of them."""
        self._end_step()
        self._stats.num_rows += num_rows

    def _end_step(self) -> None:
        if self._began_s is None:
            return
        self._stats.num_steps += 1
        self._stats.step_seconds.add(time.perf_counter() - self._began_s)
        self._began_s = None
