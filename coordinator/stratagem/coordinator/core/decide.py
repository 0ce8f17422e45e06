"""Answer a command with facts or with a refusal.

`decide` answers the command itself, and only reads the state. The agenda then asks the strategies
of the runs for the facts that follow from the state.
"""

from collections import Counter
from collections.abc import Callable, Set
from typing import assert_never

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import RunId, WorkerId, is_within
from stratagem.common.job import JobSpec
from stratagem.common.numerics import rules
from stratagem.common.numerics.verification import VERIFIER
from stratagem.coordinator.core.apply import CLUSTER
from stratagem.coordinator.core.commands import (
    AboutWorkers,
    CancelRun,
    ClaimData,
    Command,
    DeleteRun,
    DrainWorker,
    ExpireRuns,
    ForgetWorkers,
    HoldBlobs,
    JournalEntry,
    LeaveWorker,
    LoseWorker,
    PinRun,
    RecordVerification,
    Refusal,
    RefusalKind,
    RegisterWorker,
    ReleaseWorker,
    Report,
    ReportTrouble,
    ResumeRun,
    SubmitRun,
    Tick,
)
from stratagem.coordinator.core.facts import (
    ROOT,
    BlobsHeld,
    CommitUploaded,
    DataUploaded,
    Fact,
    Member,
    MembersFormed,
    PartyFailed,
    RunCancelled,
    RunDeleted,
    RunFailed,
    RunPinned,
    RunReleased,
    RunResumed,
    RunSubmitted,
    SoleCopiesLost,
    UpdateReceived,
    VerificationEnded,
    WorkerDraining,
    WorkerLeft,
    WorkerLost,
    WorkerMarked,
    WorkerQuarantined,
    WorkerRegistered,
    WorkerReleased,
)
from stratagem.coordinator.core.persistent import PersistentMap
from stratagem.coordinator.core.retention import (
    deaths_at_work,
    expire_runs,
    forget_workers,
    resumed_from,
)
from stratagem.coordinator.core.state import CoordinatorState, EndedRun, RunRecord
from stratagem.coordinator.core.strategy_calls import (
    Raised,
    ask,
    deadline_of,
    failure_of,
    objections_to,
    parties_of,
    reform_of,
    reject_reason_of,
)
from stratagem.coordinator.core.world import RunPhase, World

# ---- Answers to commands ----

MAX_DECISIONS = 10_000
"""The most facts that a strategy may add after one command; more are taken for an endless loop."""


def decide(state: CoordinatorState, command: Command) -> tuple[JournalEntry, ...] | Refusal:
    """Return the facts that follow directly from a command, or the reason why it changes nothing.

    An archived run that the command needs must have been recalled (`run_view.num_to_recall`).
    """
    match command:
        case SubmitRun():
            return _submit(state, command)
        case ClaimData() | HoldBlobs():
            return _claim(state, command)
        case CancelRun():
            return _cancel(state, command)
        case ResumeRun():
            return _resume(state, command)
        case DeleteRun():
            return _delete(state, command)
        case PinRun():
            return _pin(state, command)
        case RecordVerification():
            return _record_verification(state, command.result)
        case ExpireRuns():
            return expire_runs(state, command)
        case Report():
            return _report(state, command)
        case ReportTrouble():
            return _trouble(state, command)
        case Tick():
            return ()
        case _:
            return _decide_about_workers(state, command)


def _decide_about_workers(
    state: CoordinatorState, command: AboutWorkers
) -> tuple[JournalEntry, ...] | Refusal:
    match command:
        case RegisterWorker():
            return _register(state, command)
        case LoseWorker():
            return _lose(state, command)
        case DrainWorker():
            return _drain(state, command)
        case LeaveWorker():
            return _leave(state, command.member, command.reason)
        case ReleaseWorker():
            return _release(state, command)
        case ForgetWorkers():
            return forget_workers(state, command)
        case _:
            assert_never(command)


def limited(entry: JournalEntry, number: int) -> JournalEntry:
    """Return the number-th decision of a run after one command; beyond MAX_DECISIONS, return the
    failure of the run instead."""
    if number <= MAX_DECISIONS:
        return entry
    what = type(entry.fact).__name__
    reason = f"the strategy decides in a circle: {MAX_DECISIONS} facts, the next one {what}"
    return JournalEntry(entry.run_id, RunFailed(reason=reason))


def placed(entry: JournalEntry) -> JournalEntry:
    """Return a run's mark or quarantine of a worker as a fact of the cluster that names the run,
    and any other fact unchanged."""
    if not isinstance(entry.fact, WorkerMarked | WorkerQuarantined):
        return entry
    return JournalEntry(CLUSTER, entry.fact.model_copy(update={"run_id": entry.run_id}))


def world_of(state: CoordinatorState) -> World:
    """Return the world: the part of the state that strategies may read when they decide."""
    load = Counter[WorkerId]()
    now = {record.member for record in state.workers.values()}
    for run in state.runs.values():
        if run.ended is None:
            # Earlier starts of a worker carry no load.
            load.update({member.worker_id for member in run.touched & now})
    return World(state.workers, load)


def key_of(fact: Fact, run: RunRecord | None = None) -> str | None:
    """Return the idempotency key of a fact that may be journaled only once; None for other facts.
    run: the run that the fact is about, whose updates may come again after it has returned to an
    earlier commit; None: it does not exist yet."""
    match fact:
        case MembersFormed():
            return f"members/{fact.party}/{fact.membership}"
        case UpdateReceived():
            # A rejection has no key: a client that has failed may be asked again.
            again = f"/{run.num_returns}" if run is not None and run.num_returns else ""
            if run is not None and is_within(fact.party, VERIFIER):  # it trains rounds repeatedly
                again += f"/repeat-{run.strategy.num_repeats(run.value)}"
            if fact.attempt:  # a secure round, in which the client sends one under new masks
                again += f"/attempt-{fact.attempt}"
            return f"received/{fact.party}/{fact.round_num}/{fact.client}{again}"
        case RunSubmitted():
            return "submitted"
        case _:
            return None


def _unknown(run_id: RunId) -> Refusal:
    return Refusal(RefusalKind.NOT_FOUND, f"run {run_id!r} is not known")


def _not_yet(run_id: RunId) -> Refusal:
    reason = f"run {run_id!r} is still being stopped; try again in a moment"
    return Refusal(RefusalKind.NOT_YET, reason)


def _submit(state: CoordinatorState, command: SubmitRun) -> tuple[JournalEntry, ...] | Refusal:
    job = JobSpec.from_json(command.job_json)
    known = state.find(command.run_id)
    assert not isinstance(known, EndedRun), "its job has to be recalled first"
    if known is not None:
        if known.job == JobSpec.of_run(command.job_json, known.numerics):
            return ()
        return Refusal(RefusalKind.CONFLICT, f"run {command.run_id!r} exists with another job")
    violations = objections_to(job, state.strategies)
    if violations:
        raise InvalidInputError(violations=violations)
    fact = RunSubmitted(
        job_json=command.job_json,
        wall_s=command.wall_s,
        by=command.by,
        owner=command.owner,
        submission=command.submission,
        traceparent=command.traceparent,
        numerics=rules.CURRENT,
    )
    return (JournalEntry(command.run_id, fact, key_of(fact)),)


def _claim(state: CoordinatorState, command: ClaimData | HoldBlobs) -> tuple[JournalEntry, ...]:
    if isinstance(command, HoldBlobs):
        held = BlobsHeld(listed=command.listed, until_s=command.until_s, by=command.by)
        return (JournalEntry(CLUSTER, held),)
    if command.digest in state.uploads.get(command.owner, ()):
        return ()
    return (JournalEntry(CLUSTER, DataUploaded(owner=command.owner, digest=command.digest)),)


def _cancel(state: CoordinatorState, command: CancelRun) -> tuple[JournalEntry, ...] | Refusal:
    run = state.find(command.run_id)
    if run is None:
        return _unknown(command.run_id)
    if isinstance(run, EndedRun) or run.ended is not None:
        return ()
    whole = [commit.segment for commit in run.commits if not commit.is_partial]
    kept = f"commit {whole[-1]} is kept" if whole else "nothing was committed"
    if whole and run.commits[-1].is_partial:
        kept += f", and {run.commits[-1].segment} once its workers have uploaded their parts"
    fact = RunCancelled(reason=f"stopped by {command.by or 'request'}; {kept}", by=command.by)
    return (JournalEntry(command.run_id, fact),)


def _resume(state: CoordinatorState, command: ResumeRun) -> tuple[JournalEntry, ...] | Refusal:
    run = state.find(command.run_id)
    if run is None:
        return _unknown(command.run_id)
    if run.ended not in (RunPhase.CANCELLED, RunPhase.FAILED):
        if run.ended is None:
            what = "is active: it goes on by itself; stop it first to return to an earlier commit"
        else:
            what = "is completed; with more epochs, steps or rounds a new run goes on from it"
        return Refusal(RefusalKind.PRECONDITION, f"run {command.run_id!r} {what}")
    if not run.is_released:
        return _not_yet(command.run_id)
    if command.from_segment is None:
        return (JournalEntry(command.run_id, RunResumed(by=command.by)),)
    assert isinstance(run, RunRecord), "its facts have to be recalled first"
    fact = resumed_from(run, command.from_segment, command.by)
    if isinstance(fact, str):
        return Refusal(RefusalKind.PRECONDITION, fact)
    return (JournalEntry(command.run_id, fact),)


def _delete(state: CoordinatorState, command: DeleteRun) -> tuple[JournalEntry, ...] | Refusal:
    run = state.find(command.run_id)
    if run is None:
        return _unknown(command.run_id)
    if run.ended is None:
        return Refusal(RefusalKind.PRECONDITION, f"run {command.run_id!r} is active; stop it first")
    if not run.is_released:
        return _not_yet(command.run_id)
    if command.run_id in state.pinned:
        reason = f"run {command.run_id!r} is pinned; unpin it first"
        return Refusal(RefusalKind.PRECONDITION, reason)
    return (JournalEntry(command.run_id, RunDeleted(by=command.by, submission=run.submission)),)


def _pin(state: CoordinatorState, command: PinRun) -> tuple[JournalEntry, ...] | Refusal:
    if state.find(command.run_id) is None:
        return _unknown(command.run_id)
    if (command.run_id in state.pinned) == command.is_pinned:
        return ()
    fact = RunPinned(run_id=command.run_id, is_pinned=command.is_pinned, by=command.by)
    return (JournalEntry(CLUSTER, fact),)


def _record_verification(
    state: CoordinatorState, result: VerificationEnded
) -> tuple[JournalEntry, ...] | Refusal:
    run = state.find(result.run_id)
    if run is None:
        return _unknown(result.run_id)
    if run.ended is None:
        reason = f"run {result.run_id!r} is active; it is verified at its end"
        return Refusal(RefusalKind.PRECONDITION, reason)
    return (JournalEntry(CLUSTER, result),)


def _register(state: CoordinatorState, command: RegisterWorker) -> tuple[JournalEntry, ...]:
    known = state.workers.get(command.member.worker_id)
    fact = WorkerRegistered(
        member=command.member, address=command.address, capability=command.capability
    )
    if known is None:
        return (JournalEntry(CLUSTER, fact),)
    now = (command.member, command.address, command.capability)
    same = (known.member, known.address, known.capability) == now
    if same and known.is_alive and not known.is_draining:
        return ()
    is_new = known.member != command.member
    has_ended = is_new and not (known.is_draining or known.is_blameless or known.quarantine)
    deaths = deaths_at_work(state, known.member, command.ending) if has_ended else ()
    return (*deaths, JournalEntry(CLUSTER, fact))


def _lose(state: CoordinatorState, command: LoseWorker) -> tuple[JournalEntry, ...]:
    known = state.workers.get(command.member.worker_id)
    if known is None or known.member != command.member or not known.is_alive:
        return ()
    if known.is_draining:  # it was told to end, so its silence is no loss
        return _leave(state, command.member, command.reason)
    fact = WorkerLost(
        member=command.member,
        reason=command.reason,
        is_blameless=command.is_blameless,
        silent_s=command.silent_s,
    )
    return (JournalEntry(CLUSTER, fact),)


def _drain(state: CoordinatorState, command: DrainWorker) -> tuple[JournalEntry, ...]:
    known = state.workers.get(command.member.worker_id)
    if known is None or known.member != command.member or known.is_draining:
        return ()
    return (JournalEntry(CLUSTER, WorkerDraining(member=command.member)),)


def _leave(state: CoordinatorState, member: Member, reason: str) -> tuple[JournalEntry, ...]:
    known = state.workers.get(member.worker_id)
    if known is None or known.member != member or known.has_left:
        return ()
    return (JournalEntry(CLUSTER, WorkerLeft(member=member, reason=reason)),)


def _release(state: CoordinatorState, command: ReleaseWorker) -> tuple[JournalEntry, ...] | Refusal:
    known, name = state.workers.get(command.worker_id), command.worker_id
    if known is None:
        return Refusal(RefusalKind.NOT_FOUND, f"worker {name!r} is not known")
    if not known.quarantine:
        return Refusal(RefusalKind.PRECONDITION, f"worker {name!r} is not quarantined")
    return (JournalEntry(CLUSTER, WorkerReleased(worker_id=name, by=command.by)),)


def _report(state: CoordinatorState, command: Report) -> tuple[JournalEntry, ...] | Refusal:
    run = state.find(command.run_id)
    if run is None:
        return _unknown(command.run_id)
    if isinstance(command.fact, RunReleased):
        return () if run.is_released else (JournalEntry(command.run_id, command.fact),)
    if isinstance(run, EndedRun) or (run.ended is not None and not _is_last_upload(run, command)):
        return Refusal(RefusalKind.STALE, f"run {command.run_id!r} has ended")
    if isinstance(command.fact, RunFailed):
        return (JournalEntry(command.run_id, command.fact),)
    if isinstance(command.fact, PartyFailed) and command.fact.party == ROOT:
        return (JournalEntry(command.run_id, failure_of(run, command.fact)),)
    reason = reject_reason_of(run, command.fact)
    if isinstance(reason, Raised):
        return (JournalEntry(command.run_id, RunFailed(reason=reason)),)
    if reason:
        return Refusal(RefusalKind.STALE, reason)
    return (JournalEntry(command.run_id, command.fact, key_of(command.fact, run)),)


def _is_last_upload(run: RunRecord, command: Report) -> bool:
    """Return True if the fact says that the last commit's parts are uploaded or lost, which may
    still come after the end of a run, until its workers forget the run."""
    return not run.is_released and isinstance(command.fact, CommitUploaded | SoleCopiesLost)


def _trouble(state: CoordinatorState, command: ReportTrouble) -> tuple[JournalEntry, ...] | Refusal:
    run = state.find(command.run_id)
    if run is None:
        return _unknown(command.run_id)
    if isinstance(run, EndedRun):
        return ()
    view = parties_of(run).get(command.party)
    if view is None or view.membership != command.membership or not view.members:
        return ()
    fact = reform_of(run, command.party, command.reason)
    return () if fact is None else (JournalEntry(command.run_id, fact, key_of(fact)),)


# ---- Agenda ----
#
# The agenda is an index of the runs that must be asked for their next fact.
#
# A strategy decides by its run, by the workers with their load, and by the time, of which it
# names a deadline beforehand. A run that had nothing to add therefore has nothing to add until a
# fact has changed it, the workers or their load have changed, or its deadline has passed; only
# then is it asked again. The cost of following a fact does not depend on the number of runs.
# Asking all runs after every fact gives the same facts in the same order; the tests of the core
# compare the two.


class Agenda:
    """The runs whose strategies must be asked for their next fact; `note` must be called after
    every applied fact."""

    def __init__(self, state: CoordinatorState) -> None:
        self.world = World(state.workers, {})
        """The part of the state that strategies see when they decide, equal to
        `world_of(state)`."""
        self._workers = state.workers
        self._load = PersistentMap[WorkerId, int]()
        self._burdened: dict[RunId, frozenset[WorkerId]] = {}
        """The workers for which each run counts as load, keyed by active run."""
        self._touched: dict[RunId, frozenset[Member]] = {}
        """The members from which `_burdened` was computed: a fact changes only few of thousands."""
        self._deadlines: dict[RunId, float] = {}
        self._limited: set[RunId] = set()
        """Active runs with a placement timeout, whose deadline depends on the workers."""
        self._numbers: dict[RunId, int] = {}
        """A number per run, ascending in order of submission, which is the order of the state."""
        self._num_seen = 0
        self._due: set[RunId] = set()
        for run_id in state.runs:
            self.note(state, run_id)

    @property
    def next_deadline(self) -> float | None:
        """Return the leader-clock time of the next Tick; None if no run has a deadline."""
        return min(self._deadlines.values(), default=None)

    def note(self, state: CoordinatorState, run_id: RunId) -> None:
        """Update the agenda after a fact of this run, or of the cluster, was applied."""
        if run_id == CLUSTER:
            changed = state.workers.changed_since(self._workers)
            for burdened_id in list(self._burdened):
                self._carry(state, burdened_id, state.runs[burdened_id], changed)
            self._change_world(state)
            return
        run = state.runs.get(run_id)
        if self._carry(state, run_id, run):
            self._change_world(state)
        self._deadlines.pop(run_id, None)
        self._limited.discard(run_id)
        if run is None:
            self._numbers.pop(run_id, None)
        elif run_id not in self._numbers:
            self._num_seen += 1
            self._numbers[run_id] = self._num_seen
        if run is None or run.ended is not None:
            self._due.discard(run_id)
            return
        self._due.add(run_id)
        if run.job.placement_timeout_s is not None:
            self._limited.add(run_id)
        self._set_deadline(run)

    def settle(
        self, state: CoordinatorState, now_s: float, add: Callable[[JournalEntry], CoordinatorState]
    ) -> None:
        """Ask each due run for its next fact until it has none; add: applies and notes one fact."""
        self._due |= {
            run_id for run_id, deadline_s in self._deadlines.items() if deadline_s <= now_s
        }
        counts = Counter[RunId]()
        while (entry := self._next(state, now_s)) is not None:
            counts[entry.run_id] += 1
            state = add(placed(limited(entry, counts[entry.run_id])))

    def _next(self, state: CoordinatorState, now_s: float) -> JournalEntry | None:
        for run_id in sorted(self._due, key=self._numbers.__getitem__):
            fact = ask(state.runs[run_id], self.world, now_s)
            if fact is not None:
                return JournalEntry(run_id, fact, key_of(fact, state.runs[run_id]))
            self._due.discard(run_id)
        return None

    def _carry(
        self,
        state: CoordinatorState,
        run_id: RunId,
        run: RunRecord | None,
        changed: Set[WorkerId] = frozenset(),
    ) -> bool:
        """Update the set of workers for which an active run counts as load; return True if the set
        has changed. changed: the workers whose records are new."""
        before = self._burdened.pop(run_id, frozenset())
        known = self._touched.pop(run_id, frozenset())
        after = frozenset[WorkerId]()
        if run is not None and run.ended is None:
            if run.touched is not known:
                changed = changed | {member.worker_id for member in run.touched ^ known}
            now = {each: state.workers[each] for each in changed if each in state.workers}
            loaded = {each for each, worker in now.items() if worker.member in run.touched}
            after = before - changed | loaded if changed else before
            self._burdened[run_id], self._touched[run_id] = after, run.touched
        if after is before or after == before:
            return False
        for worker_id in after - before:
            self._load = self._load.with_item(worker_id, self._load.get(worker_id, 0) + 1)
        for worker_id in before - after:
            num = self._load[worker_id] - 1
            self._load = (
                self._load.with_item(worker_id, num) if num else self._load.without(worker_id)
            )
        return True

    def _change_world(self, state: CoordinatorState) -> None:
        self._workers = state.workers
        self.world = World(state.workers, self._load)
        self._due.update(self._burdened)
        for run_id in self._limited & state.runs.keys():
            self._set_deadline(state.runs[run_id])

    def _set_deadline(self, run: RunRecord) -> None:
        deadline_s = deadline_of(run, self.world)
        if deadline_s is None:
            self._deadlines.pop(run.run_id, None)
        else:
            self._deadlines[run.run_id] = deadline_s
