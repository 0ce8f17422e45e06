"""Deletes what no run needs any more: blobs that no state names, and updates of clients that a
committed round has folded in.

Blobs are collected together, with pauses: each collection looks at all of them. Blobs that backups
hold are kept, and so are those that are too new to be named.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stratagem.common.base.ids import Digest, RunId
from stratagem.coordinator.app.backups import Backups
from stratagem.coordinator.core.facts import (
    BlobsHeld,
    ClientEvaluated,
    CommitUploaded,
    Evaluated,
    Fact,
    ModelBuilt,
    RoundClosed,
    RunCompleted,
    RunDeleted,
    RunResumed,
    SegmentCommitted,
    UpdateReceived,
)
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import needed
from stratagem.coordinator.observe.event_feed import Feed
from stratagem.coordinator.runtime.loop import Loop
from stratagem.coordinator.runtime.tasks.chores import Chores
from stratagem.coordinator.runtime.tasks.throttle import Paced
from stratagem.coordinator.store.blobs.blob_store import BlobStore
from stratagem.coordinator.strategies.client_parties.regional import rounds_inside
from stratagem.coordinator.updates.spool import Spool
from stratagem.coordinator.updates.spool_keys import SpoolKey, SpoolRun

BLOB_GRACE_S = 600.0
"""Seconds for which a blob that no fact names yet is kept: a fact, or a job, may soon name it."""

COLLECT_PAUSE_S = 5.0
"""Seconds between two collections: each one looks at every blob, whatever was committed."""

KEEP_ROOM_S = 5.0
"""Seconds between two checks for free space: less than the coordinator waits on a full disk."""


class Collector:
    """Collects what the facts of one coordinator leave behind; used on the event loop."""

    def __init__(
        self,
        loop: Loop,
        blobs: BlobStore,
        spool: Spool,
        feed: Feed,
        chores: Chores,
        of_backups: Path,
    ) -> None:
        """of_backups: the folder of journals that are being sent."""
        self._loop, self._blobs, self._spool, self._feed = loop, blobs, spool, feed
        self._chores = chores
        self.backups = Backups(loop, blobs, of_backups, self.ask)
        self._named: list[Digest] = []
        """Blobs that facts have named since the last collection."""
        self._collecting = Paced(self.collect, COLLECT_PAUSE_S)

    def begin(self) -> None:
        """Collect what the coordinator before this one has left."""
        self.ask()
        self._do_in_thread(self._clean_spool, "clean the spool")

    def follow(self, run_id: RunId, fact: Fact) -> None:
        """Take in a fact, which is durable and applied."""
        self._named += _written_for(fact)
        match fact:
            case SegmentCommitted():
                self._empty_spool(run_id, fact)
                self.ask()
            case RunCompleted():
                self._delete_updates(self._spool_run(run_id))
            case RunResumed(from_segment=int()):
                of_run = self._spool_run(run_id)
                self._do_in_thread(
                    lambda: self._spool.delete_returned(of_run), f"go back in run {run_id}"
                )
                self.ask()
            case RunDeleted():
                self._delete_updates(SpoolRun(run_id, fact.submission))
                self.ask()

    def ask(self) -> None:
        """Have blobs that nothing names collected soon."""
        self._chores.do(self._collecting.ask(), "collect blobs")

    async def collect(self) -> None:
        """Collect the blobs that nothing names, now."""
        held = await self.backups.held()
        if self.backups.is_fixing:  # it asks for a collection at its end
            return
        # Together: what is named from now on is not in `live`, and must not be settled yet.
        live, named, self._named = needed(self._loop.state, held), self._named, []

        def collect() -> None:
            for digest in named:
                self._blobs.settle(digest)
            self._blobs.collect(live, BLOB_GRACE_S)

        await asyncio.to_thread(collect)

    async def keep_room(self) -> None:
        """Free disk space regularly: others fill the disk too, and a journal that waits cannot ask
        for it."""
        while True:
            await asyncio.sleep(KEEP_ROOM_S)
            await asyncio.to_thread(self._blobs.keep_room)

    def _empty_spool(self, run_id: RunId, fact: SegmentCommitted) -> None:
        """Delete the updates that made a round, and rounds for which no late update can arrive."""
        party, number, oldest = fact.party, fact.segment, fact.segment - fact.max_staleness
        of_run = self._spool_run(run_id)
        what = f"delete the updates of a round of run {run_id}"
        self._do_in_thread(lambda: self._spool.delete_round(of_run, party, oldest), what)
        run = self._loop.state.runs.get(run_id)
        for below, each in rounds_inside(run.job, run.value, number) if run and not party else ():
            self._do_in_thread(partial(self._spool.delete_round, of_run, below, each), what)
        if not fact.max_staleness:
            return
        # The committed state no longer says what made it; the newest closing of the round does.
        closed = self._feed.newest(
            run_id,
            lambda worker: (
                isinstance(worker, RoundClosed)
                and (worker.party, worker.round_num) == (party, number)
            ),
        )
        accepted = closed.accepted if isinstance(closed, RoundClosed) else ()
        folded = [SpoolKey(of_run, party, number - a.staleness, a.client) for a in accepted]
        self._do_in_thread(lambda: self._spool.delete_updates(folded), what)

    def _delete_updates(self, of_run: SpoolRun) -> None:
        what = f"delete the updates of run {of_run.run_id}"
        self._do_in_thread(lambda: self._spool.delete_run(of_run), what)

    def _spool_run(self, run_id: RunId) -> SpoolRun:
        run = self._loop.state.find(run_id)
        return SpoolRun(run_id) if run is None else SpoolRun.of(run)

    def _clean_spool(self) -> None:
        """Delete updates that a crash between a run's end and their deletion has left."""
        runs = self._loop.state.all_runs()
        self._spool.clean(SpoolRun.of(run) for run in runs if run.ended is not RunPhase.COMPLETED)

    def _do_in_thread(self, call: Callable[[], None], what: str) -> None:
        self._chores.do(asyncio.to_thread(call), what)


def _written_for(fact: Fact) -> tuple[Digest, ...]:
    """Return the blobs that were written to be named by this fact."""
    match fact:
        case ModelBuilt():
            return (fact.digest,)
        case SegmentCommitted():
            return (fact.digest, *fact.server_state, *((fact.average,) if fact.average else ()))
        case CommitUploaded():
            return (fact.digest,)
        case Evaluated():
            return (fact.predictions,) if fact.predictions else ()
        case BlobsHeld():
            return (fact.listed,)
        case UpdateReceived():
            return (fact.client_state,) if fact.client_state else ()
        case ClientEvaluated():
            return (fact.states,) if fact.states else ()
        case _:
            return ()
