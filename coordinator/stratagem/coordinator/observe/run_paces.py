"""The paces of all active runs, by the clocks of this process: what progress says of the time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.state import RunPhase, RunRecord, World
from stratagem.coordinator.core.state_machine.strategy_boundary import shown_status_of
from stratagem.coordinator.core.strategy_contract import Status
from stratagem.coordinator.core.time_left import Pace, epoch_of
from stratagem.coordinator.observe.event_feed import SegmentProgress

LOOK_PAUSE_S: Final = 0.5
"""Seconds between two looks at one run, however often it has new progress."""
_BEFORE_TRAINING: Final = ("BUILDING", "WAITING")


@dataclass(frozen=True, slots=True)
class RunTime:
    """What is said of the time of a run."""

    epoch: float
    elapsed_s: float
    eta_s: float | None
    """None: nobody can say."""
    may_end_early: bool


class Paces:
    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._paces: dict[RunId, Pace] = {}
        self._looked_s: dict[RunId, float] = {}

    def look(
        self, world: World, run: RunRecord, shown: SegmentProgress | None, *, anew: bool = False
    ) -> None:
        """Take in what a run has done by now; shortly after the last look only with `anew`."""
        now_s, looked_s = self._monotonic(), self._looked_s.get(run.run_id)
        if not anew and looked_s is not None and now_s - looked_s < LOOK_PAUSE_S:
            return
        self._looked_s[run.run_id] = now_s
        status = shown_status_of(run, world)
        step = max(status.step, shown.step if shown else 0)
        trains = status.phase is RunPhase.RUNNING and status.strategy_phase not in _BEFORE_TRAINING
        pace = self._paces.get(run.run_id, Pace())
        done = step + status.counts.part_done
        self._paces[run.run_id] = pace.seen(now_s, done, trains=trains)

    def forget(self, run_id: RunId) -> None:
        """Drop a run that has ended."""
        self._paces.pop(run_id, None)
        self._looked_s.pop(run_id, None)

    def time_of(self, run: RunRecord, status: Status, step: int) -> RunTime:
        """Return what is said of the time of a run that has done so many steps."""
        pace, counts = self._paces.get(run.run_id), status.counts
        may_say = pace is not None and counts.is_even and status.phase is RunPhase.RUNNING
        evaluation = run.job.evaluation
        return RunTime(
            epoch=epoch_of(step, counts.steps_per_epoch),
            elapsed_s=max(self._wall() - run.submitted_wall_s, 0.0),
            eta_s=pace.eta_s(self._monotonic(), status.num_steps) if pace and may_say else None,
            may_end_early=evaluation is not None and evaluation.stop is not None,
        )
