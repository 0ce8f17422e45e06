"""Deletes what has expired (lost workers, ended runs, old logs) and merges what was recorded of
steps: chores of the leader that nothing waits for.

Owns when it is done; what may be forgotten of workers and runs is decided by the core.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final

import structlog

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.commands import ExpireRuns, ForgetWorkers
from stratagem.coordinator.core.state import CoordinatorState, EndedRun
from stratagem.coordinator.observe.profiles import Profiles
from stratagem.coordinator.observe.refused_workers import Refusals
from stratagem.coordinator.observe.run_logs import RunLogs
from stratagem.coordinator.runtime.loop import Loop
from stratagem.coordinator.runtime.settings import Settings

log = structlog.get_logger()

LONGEST_PAUSE_S: Final = 60.0
FORGET_EPHEMERAL_AFTER_S: Final = 600.0
"""For workers whose names do not come back; long enough to be seen as lost."""
RUNS_AT_ONCE: Final = 20
"""Runs that are deleted by one command, while other commands wait."""


@dataclass(frozen=True, slots=True)
class House:
    loop: Loop
    settings: Settings
    logs: RunLogs
    profiles: Profiles
    refusals: Refusals
    _merging: set[RunId] = field(default_factory=set)
    """Runs whose step history is being merged: two that merge the same rows undo each other's
    reading."""
    _unmerged: set[RunId] = field(default_factory=set)
    """Runs that the next pass looks at even if they have ended: those that have ended since the
    last one, and at first those that the leader before has left."""

    async def keep(self) -> None:
        """Delete what has expired, at regular intervals, until cancelled."""
        told = self.settings
        spans_s = (told.forget_workers_after, told.keep_runs_for, told.keep_logs_for)
        pause_s = min(LONGEST_PAUSE_S, min(spans_s) / 4)
        self._unmerged.update(await self.loop.recorded.unmerged_histories())
        while True:
            self.refusals.forget_old()
            await self.forget_workers()
            await self.expire_runs()
            await self.delete_logs()
            await self.merge_histories()
            await asyncio.sleep(pause_s)

    async def forget_workers(self) -> None:
        """Forget the workers that were lost long ago."""
        after_s, num_kept = self.settings.forget_workers_after, self.settings.max_workers
        ephemeral_s = min(after_s, FORGET_EPHEMERAL_AFTER_S)
        command = ForgetWorkers(self._before(after_s), num_kept, self._before(ephemeral_s))
        await self.loop.submit(command)

    async def expire_runs(self) -> None:
        """Delete the runs that ended long ago, and the oldest ones beyond the number that is
        kept."""
        num_kept, kept_for = self.settings.keep_runs, self.settings.keep_runs_for
        reason = f"kept are {num_kept} ended runs, for {kept_for / 86400:g} days"
        while True:
            before_s = self._before(kept_for)
            if not await self.loop.submit(ExpireRuns(before_s, num_kept, RUNS_AT_ONCE, reason)):
                return

    async def delete_logs(self) -> None:
        """Delete logs and profiles of runs that ended long ago, and those that a crash has left
        behind."""
        before_s = self._before(self.settings.keep_logs_for)
        for place in (self.logs, self.profiles):
            for run_id in await asyncio.to_thread(self._all_over, place, before_s):
                if self._is_over(self.loop.state, run_id, before_s):  # as before it was looked for
                    try:
                        place.delete(run_id)
                    except OSError as error:  # nothing waits for it, and it is tried again
                        reason = error.strerror
                        log.warning("a run's log is not deleted", run_id=run_id, reason=reason)

    async def merge_histories(self) -> None:
        """Merge rows of the step histories of the runs that can have some: those that are active,
        and those that have ended since this was done last."""
        active = {run_id for run_id, run in self.loop.state.runs.items() if run.ended is None}
        due = sorted(active | self._unmerged)
        self._unmerged.clear()
        for run_id in due:
            await self._merge_history(run_id)

    async def merge_history(self, run_id: RunId) -> None:
        """Merge the rows of the step history of a run that has ended; what does not succeed is
        tried again with the next chores."""
        self._unmerged.add(run_id)
        await self._merge_history(run_id)

    async def _merge_history(self, run_id: RunId) -> None:
        run = self.loop.state.find(run_id)
        if run is None:
            return
        if run_id in self._merging:
            self._unmerged.add(run_id)
            return
        self._merging.add(run_id)
        try:
            await self.loop.recorded.merge_history(run_id, has_ended=run.ended is not None)
        finally:
            self._merging.discard(run_id)

    def _all_over(self, place: RunLogs | Profiles, before_s: float) -> list[RunId]:
        state = self.loop.state
        return [run_id for run_id in place.run_ids() if self._is_over(state, run_id, before_s)]

    @staticmethod
    def _is_over(state: CoordinatorState, run_id: RunId, before_s: float) -> bool:
        run = state.find(run_id)
        if run_id in state.pinned:
            return False
        return run is None or (isinstance(run, EndedRun) and run.ended_s < before_s)

    def _before(self, span_s: float) -> float:
        return self.loop.clock.now() - span_s
