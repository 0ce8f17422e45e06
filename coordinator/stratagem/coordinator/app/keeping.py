"""Delete data that no run needs any more, and keep data that jobs or backups name.

All blobs are collected together, with pauses, since each collection looks at all of them. Blobs
that backups hold are kept, and so are those too new to be named.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from stratagem.common.base.errors import InProgressError, WrongStateError
from stratagem.common.base.ids import Digest, RunId, is_within
from stratagem.common.numerics.verification import VERIFIER
from stratagem.common.tensors.files import header_bytes, header_of
from stratagem.common.tensors.manifest import Purpose, build_manifest
from stratagem.coordinator.core.commands import ExpireRuns, ForgetWorkers, HoldBlobs
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
from stratagem.coordinator.core.pending import live_blobs, needed
from stratagem.coordinator.core.state import CoordinatorState, EndedRun
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.observe.feed import Feed
from stratagem.coordinator.observe.logs import RunLogs
from stratagem.coordinator.observe.profiles import Profiles
from stratagem.coordinator.observe.troubles import Refusals
from stratagem.coordinator.runtime.loop import Loop
from stratagem.coordinator.runtime.settings import Settings
from stratagem.coordinator.runtime.supervisor import Chores, Paced
from stratagem.coordinator.store.blobs import BlobStore, MissingBlobError
from stratagem.coordinator.store.snapshot import Snapshot
from stratagem.coordinator.strategies.federated.regions import rounds_inside
from stratagem.coordinator.updates.spool import Spool, SpoolKey, SpoolRun

# ---- Collection ----
#
# The collector deletes blobs that no state names, and updates that a committed round has folded.

BLOB_GRACE_S = 600.0
"""Seconds for which a blob that nothing names is kept, because a fact or a job may soon name it."""

COLLECT_PAUSE_S = 5.0
"""Seconds between two collections, each of which looks at every blob."""

KEEP_ROOM_S = 5.0
"""Seconds between two checks for free space; on a full disk the coordinator waits longer."""


class Collector:
    """The garbage collector of blobs and spooled updates; used on the event loop."""

    def __init__(
        self,
        loop: Loop,
        blobs: BlobStore,
        spool: Spool,
        feed: Feed,
        chores: Chores,
        of_backups: Path,
    ) -> None:
        """Begin without collections. of_backups: the folder for copies of the journal that are
        being sent."""
        self._loop, self._blobs, self._spool, self._feed = loop, blobs, spool, feed
        self._chores = chores
        self.backups = Backups(loop, blobs, of_backups, self.ask)
        self._named: list[Digest] = []
        """Blobs that facts have named since the last collection."""
        self._collecting = Paced(self.collect, COLLECT_PAUSE_S)

    def begin(self) -> None:
        """Start to delete the files that the previous coordinator has left."""
        self.ask()
        self._do_in_thread(self._clean_spool, "clean the spool")

    def follow(self, run_id: RunId, fact: Fact) -> None:
        """Delete the files that a fact makes obsolete, once it is durable and folded in."""
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
        """Schedule a collection of the blobs that nothing needs, soon."""
        self._chores.do(self._collecting.ask(), "collect blobs")

    async def collect(self) -> None:
        """Delete the blobs that nothing needs."""
        held = await self.backups.held_blobs()
        if self.backups.is_fixing:  # at its end the backup asks for a collection
            return
        # At once: blobs named from now on are not in `live`, and must not be settled yet.
        live, named, self._named = needed(self._loop.state, held), self._named, []

        def collect() -> None:
            for digest in named:
                self._blobs.settle(digest)
            self._blobs.collect(live, BLOB_GRACE_S)

        await asyncio.to_thread(collect)

    async def keep_room(self) -> None:
        """Free disk space periodically: other processes fill the disk too, and a journal that is
        waiting for space cannot ask for it."""
        while True:
            await asyncio.sleep(KEEP_ROOM_S)
            await asyncio.to_thread(self._blobs.keep_room)

    def _empty_spool(self, run_id: RunId, fact: SegmentCommitted) -> None:
        """Delete the updates of a committed round, and of rounds too old for any late update."""
        party, number, oldest = fact.party, fact.segment, fact.segment - fact.max_staleness
        of_run = self._spool_run(run_id)
        what = f"delete the updates of a round of run {run_id}"
        if is_within(party, VERIFIER):  # which may be training the round once more already
            self._do_in_thread(lambda: self._spool.delete_returned(of_run), what)
            return
        self._do_in_thread(lambda: self._spool.delete_round(of_run, party, oldest), what)
        run = self._loop.state.runs.get(run_id)
        for below, inner in rounds_inside(run.job, run.value, number) if run and not party else ():
            self._do_in_thread(partial(self._spool.delete_round, of_run, below, inner), what)
        if not fact.max_staleness:
            return
        # The newest closing of the round names its updates; the committed state does not.
        closed = self._feed.newest(
            run_id,
            lambda newer: (
                isinstance(newer, RoundClosed) and (newer.party, newer.round_num) == (party, number)
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
        """Delete the updates that a crash at the end of a run has left."""
        runs = self._loop.state.all_runs()
        self._spool.clean(SpoolRun.of(run) for run in runs if run.ended is not RunPhase.COMPLETED)

    def _do_in_thread(self, call: Callable[[], None], what: str) -> None:
        self._chores.do(asyncio.to_thread(call), what)


def _written_for(fact: Fact) -> tuple[Digest, ...]:
    """Return the blobs that were written so that this fact could name them."""
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


# ---- Housekeeping ----
#
# Housekeeping deletes expired data (lost workers, ended runs, old logs) and merges the recorded
# step history. Nothing waits for these chores of the leader. The core decides which workers and
# runs may be forgotten; this code decides when.

log = structlog.get_logger()

LONGEST_PAUSE_S: Final = 60.0
FORGET_EPHEMERAL_AFTER_S: Final = 600.0
"""Seconds after which lost workers whose names do not come back are forgotten; until then people
see that they are lost."""
RUNS_AT_ONCE: Final = 20
"""The most runs that one command deletes, as other commands wait meanwhile."""


@dataclass(frozen=True, slots=True)
class House:
    loop: Loop
    settings: Settings
    logs: RunLogs
    profiles: Profiles
    refusals: Refusals
    _merging: set[RunId] = field(default_factory=set)
    """Runs whose step history is being merged now, so that no second merge starts."""
    _unmerged: set[RunId] = field(default_factory=set)
    """Ended runs to merge in the next pass: those that ended since the last pass, and at first
    those that the previous leader has left."""

    async def keep(self) -> None:
        """Delete expired data at regular intervals, until cancelled."""
        settings = self.settings
        spans_s = (settings.forget_workers_after, settings.keep_runs_for, settings.keep_logs_for)
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
        """Delete the runs that ended long ago, and the oldest runs beyond the number to keep."""
        num_kept, kept_for = self.settings.keep_runs, self.settings.keep_runs_for
        reason = f"kept are {num_kept} ended runs, for {kept_for / 86400:g} days"
        while True:
            before_s = self._before(kept_for)
            if not await self.loop.submit(ExpireRuns(before_s, num_kept, RUNS_AT_ONCE, reason)):
                return

    async def delete_logs(self) -> None:
        """Delete the logs and profiles of runs that ended long ago, and those left by a crash."""
        before_s = self._before(self.settings.keep_logs_for)
        for place in (self.logs, self.profiles):
            for run_id in await asyncio.to_thread(self._all_over, place, before_s):
                if self._is_over(self.loop.state, run_id, before_s):  # it may be resumed meanwhile
                    try:
                        place.delete(run_id)
                    except OSError as error:  # nothing waits, and it is tried again
                        reason = error.strerror
                        log.warning("a run's log is not deleted", run_id=run_id, reason=reason)

    async def merge_histories(self) -> None:
        """Merge the step histories of active runs, and of runs that ended since the last pass."""
        active = {run_id for run_id, run in self.loop.state.runs.items() if run.ended is None}
        due = sorted(active | self._unmerged)
        self._unmerged.clear()
        for run_id in due:
            await self._merge_history(run_id)

    async def merge_history(self, run_id: RunId) -> None:
        """Merge rows of the step history of an ended run; after a failure the next pass retries."""
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


# ---- Blobs named by jobs ----
#
# The blobs that a job names are kept in the background, and the submitting client repeats its
# call until that is done.
#
# In an object store the blobs that an earlier term has written are copied first. That may take
# longer than a client waits for an answer, so each call is answered early, and the next one joins
# the copying. A refusal of the store reaches the client with one of these calls.

ANSWER_AFTER_S: Final = 5.0
"""Seconds until a call is answered in any case, before a client asks another coordinator."""
FORGET_AFTER_S: Final = 10.0
"""Seconds for which a finished result waits for the client's next call; clients call every 2 s."""
STAYS_S: Final = 300.0
"""Seconds for which a job may name a kept blob; the blob may be collected after twice the time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Keeping:
    """The task that keeps a blob from collection for one call, whose job will name the blob."""

    task: asyncio.Task[bool]
    began_s: float


class KeptBlobs:
    """The blobs that are being kept for jobs that will name them; used on the event loop."""

    def __init__(self, blobs: BlobStore, *, answer_after_s: float = ANSWER_AFTER_S) -> None:
        self._blobs, self.answer_after_s = blobs, answer_after_s
        self._under_way: dict[Digest, _Keeping] = {}

    async def keep(self, digest: Digest) -> bool:
        """Return True if the blob exists, and keep it for the fact that will name it. Raises
        InProgressError while the blob is being copied; a repeated call gets the result."""
        clock = asyncio.get_running_loop()
        until_s = clock.time() + self.answer_after_s
        while True:
            keeping = self._under_way.get(digest) or self._begin(digest)
            await asyncio.wait([keeping.task], timeout=until_s - clock.time())
            if not keeping.task.done():
                raise InProgressError(
                    f"{digest} is being made to stay in the store, which copies what an earlier "
                    "term has written; that goes on by itself, and the same call learns how it ends"
                )
            is_taken = self._under_way.get(digest) is not keeping
            self._forget(digest, keeping)
            if not keeping.task.result():
                return False
            if not is_taken and clock.time() - keeping.began_s < STAYS_S:
                return True
            # It was kept for another call, or will be collected soon: keep it for this one.

    async def close(self) -> None:
        """Cancel all tasks that keep blobs."""
        tasks = [keeping.task for keeping in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, digest: Digest) -> _Keeping:
        clock = asyncio.get_running_loop()
        thread = asyncio.to_thread(self._blobs.keep, digest)
        task = asyncio.create_task(thread, name=f"keep {digest}")
        keeping = self._under_way[digest] = _Keeping(task, clock.time())
        # The result waits for the next call, for a while.
        task.add_done_callback(
            lambda _: clock.call_later(FORGET_AFTER_S, self._forget, digest, keeping)
        )
        return keeping

    def _forget(self, digest: Digest, keeping: _Keeping) -> None:
        if self._under_way.get(digest) is keeping:
            del self._under_way[digest]


# ---- Backups ----
#
# A backup consists of a snapshot of the journal and a hold on all blobs that its facts need.
#
# Nothing is collected during the snapshot, so every blob that the copy of the journal names is in
# the list that the hold keeps. The list is itself a blob, durable before the fact that names it.
# The blobs of a backup then stay for a day, even if their runs are deleted meanwhile. Lists are in
# no backup: a coordinator that continues from the copied journal holds nothing for the backups of
# another.

HOLD_S: Final = 86_400.0
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class BackupSnapshot:
    """The data that a backup copies: the journal, and the blobs that its facts need."""

    journal: Path
    """A SQLite file, which is deleted once the caller has read it."""
    term: int
    digests: Sequence[Digest]
    """The blobs that the facts of the journal need."""


class Backups:
    """The backups of a coordinator, of which only one is taken at a time."""

    def __init__(
        self, loop: Loop, blobs: BlobStore, folder: Path, collect: Callable[[], None]
    ) -> None:
        """Begin without backups. folder: the folder for copies of the journal that are being sent.
        collect: requests a collection of blobs."""
        self._loop, self._blobs, self._folder, self._collect = loop, blobs, folder, collect
        self._held: dict[Digest, frozenset[Digest]] = {}
        self._is_busy = False
        self.is_fixing = False
        """True while a backup lists the blobs that it needs, and none may be collected."""

    async def held_blobs(self) -> Sequence[frozenset[Digest]]:
        """Return the blobs that are kept for backups of this coordinator, one set per backup."""
        now_s = self._loop.clock.now()
        present = [digest for digest, until_s in self._loop.state.holds.items() if until_s > now_s]
        for listed in present:
            if listed not in self._held:
                self._held[listed] = await asyncio.to_thread(_read, self._blobs, listed)
        self._held = {listed: self._held[listed] for listed in present}
        return tuple(self._held.values())

    @asynccontextmanager
    async def snapshot(self, by: str) -> AsyncIterator[BackupSnapshot]:
        """Context manager that takes a snapshot of the journal and holds its blobs; the copied
        journal is deleted at the end. Raises WrongStateError while another backup is being sent."""
        if self._is_busy:
            raise WrongStateError("another backup is being taken; try again when it is done")
        self._is_busy = True
        try:
            snapshot, digests = await self._fixed(by)
            path = self._folder / f"{secrets.token_hex(8)}.sqlite"
            try:
                await asyncio.to_thread(self._write, snapshot, path)
                yield BackupSnapshot(path, snapshot.term, digests)
            finally:
                await asyncio.to_thread(path.unlink, missing_ok=True)
        finally:
            self._is_busy = False

    async def _fixed(self, by: str) -> tuple[Snapshot, Sequence[Digest]]:
        self.is_fixing = True
        try:
            snapshot, state = await self._loop.snapshot()
            try:
                digests = await asyncio.to_thread(
                    lambda: sorted(live_blobs(state) - state.holds.keys())
                )
                listed = await asyncio.to_thread(_write, self._blobs, digests)
                until_s = self._loop.clock.now() + HOLD_S
                await self._loop.submit(HoldBlobs(listed, until_s, by))
            except BaseException:
                await asyncio.to_thread(snapshot.close)
                raise
        finally:
            self.is_fixing = False
            self._collect()
        return snapshot, digests

    def _write(self, snapshot: Snapshot, path: Path) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for leftover in self._folder.iterdir():  # files of a coordinator that was killed
                leftover.unlink()
            snapshot.write(path)
        finally:
            snapshot.close()


def _write(blobs: BlobStore, digests: Sequence[Digest]) -> Digest:
    """Store the list of these blobs as a blob of its own, and return the digest of that blob."""
    shape = (len(digests), _DIGEST_BYTES)
    header = header_bytes(build_manifest([("digests", "uint8", shape)], Purpose.STATE))
    content = header + b"".join(map(bytes.fromhex, digests))
    writer = blobs.writer(len(content))
    writer.write(content)
    return writer.commit()


def _read(blobs: BlobStore, listed: Digest) -> frozenset[Digest]:
    """Return the blobs in a stored list; none if the journal was restored without the list."""
    try:
        with blobs.open(listed) as file:
            _, start = header_of(file, listed)
            file.seek(start)
            content = file.read()
    except MissingBlobError:
        log.info("a hold is of a backup of another coordinator", listed=listed)
        return frozenset()
    places = range(0, len(content), _DIGEST_BYTES)
    return frozenset(Digest(content[at : at + _DIGEST_BYTES].hex()) for at in places)
