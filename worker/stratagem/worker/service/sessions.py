"""Keep the table of all sessions of this worker, and find the execution for a coordinator's call.

Every call is checked: an older leadership term or membership is refused. Closing a run or a session
frees its resources. The table is used on the event loop; the torch thread sees only single
sessions.
"""

import asyncio
import contextvars
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from stratagem.common.base.errors import (
    LimitError,
    NotFoundError,
    PermissionDeniedError,
    StaleError,
    UnavailableError,
)
from stratagem.common.identity.callers import Caller
from stratagem.common.job import JobSpec
from stratagem.common.observe import tracing
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.exchange.gradient_streams import GradientPort
from stratagem.worker.plans.execution import ExecutionPhase, Key, PlanExecution, key_of, view_of
from stratagem.worker.session.context import (
    ExecutionContext,
    Host,
    RunCache,
    SessionKey,
    SessionState,
)
from stratagem.worker.session.control import Control, Outbox
from stratagem.worker.session.states import KnownLeaves, StateStore
from stratagem.worker.site.gate import SiteAdmission

# ---- Session table ----

RETRY_AFTER_S: Final = 1.0
NUM_RESULTS: Final = 2


@dataclass(slots=True)
class Session:
    """One session on this worker, with its plans and states."""

    key: SessionKey
    run_cache: RunCache
    holding: SessionState = field(default_factory=SessionState)
    states: StateStore = field(default_factory=StateStore)
    gradients: GradientPort = field(default_factory=GradientPort)
    executions: OrderedDict[Key, PlanExecution] = field(default_factory=OrderedDict)
    leaves: KnownLeaves = field(init=False)
    """The digests of the last written leaves."""

    def __post_init__(self) -> None:
        self.leaves = KnownLeaves(self.states.glimpsing)

    @property
    def latest(self) -> PlanExecution:
        return next(reversed(self.executions.values()))

    def find(self, key: Key) -> PlanExecution | None:
        """Return the execution with this key; None if there is none, or a bug has ended it."""
        execution = self.executions.get(key)
        return None if execution is None or execution.phase is ExecutionPhase.FAILED else execution

    def add(self, execution: PlanExecution) -> None:
        """Add a plan, which replaces older ones of its kind and their results."""
        for other in self.executions.values():
            if other.key.kind == execution.key.kind:
                other.abort()
                other.forget_outputs()
        self.executions.pop(execution.key, None)
        self.executions[execution.key] = execution
        finished = [
            key for key, held in self.executions.items() if held.phase is not ExecutionPhase.ACTIVE
        ]
        for key in finished[: max(0, len(self.executions) - NUM_RESULTS)]:
            del self.executions[key]

    def refuse_older(self, key: Key) -> None:
        """Raise StaleError if a plan is older than the newest of its kind, as of a delayed call."""
        newest = max((k for k in self.executions if k.kind == key.kind), default=key)
        if key < newest:
            raise StaleError(
                f"segment {key.segment} of lineage {key.lineage} is older than "
                f"segment {newest.segment} of lineage {newest.lineage} here"
            )


class Sessions:
    """All sessions of this worker, and their resources."""

    def __init__(self, host: Host, max_sessions: int = 16_384) -> None:
        self._host, self._max_sessions = host, max_sessions
        self._sessions: dict[SessionKey, Session] = {}
        self._run_caches: dict[str, RunCache] = {}
        self._is_draining = False
        self._num_uploads, self._uploads_changed = 0, asyncio.Event()
        self.fences = FenceGuard()

    def find_execution(self, request: pb.ExecuteRequest) -> PlanExecution | None:
        """Attach a request to its execution, and return the execution; None if there is none."""
        session = self._sessions.get(key_from(request.session))
        execution = session.find(key_of(request)) if session is not None else None
        if execution is not None:
            execution.attach(request)
        return execution

    def begin(
        self, request: pb.ExecuteRequest, job: JobSpec, admission: SiteAdmission | None = None
    ) -> PlanExecution:
        """Start the execution of a new request. admission: the site's, if there is one."""
        key, plan_key = key_from(request.session), key_of(request)
        session = self._sessions.get(key)
        if self._is_draining:
            raise UnavailableError(f"worker {self._host.worker_id} is draining")
        if session is None:
            self._check_room()
            cache = self._run_caches.setdefault(key.run_id, RunCache())
            session = self._sessions[key] = Session(key, cache)
        session.refuse_older(plan_key)
        execution = PlanExecution(self._work(session, request, job, admission))
        session.add(execution)
        execution.start()
        return execution

    def _work(
        self,
        session: Session,
        request: pb.ExecuteRequest,
        job: JobSpec,
        admission: SiteAdmission | None,
    ) -> ExecutionContext:
        return ExecutionContext(
            host=self._host,
            key=session.key,
            holding=session.holding,
            run_cache=session.run_cache,
            states=session.states,
            gradients=session.gradients,
            control=Control(self._host.loop, view_of(request)),
            outbox=Outbox(
                self._host.worker_id, None if admission is None else admission.disclosure
            ),
            job=job,
            segment=request.segment,
            request=request,
            admission=admission,
            traceparent=tracing.traceparent(),
        )

    def _check_room(self) -> None:
        if len(self._sessions) >= self._max_sessions:
            raise LimitError(
                f"max_sessions: {len(self._sessions)} sessions are open on this worker, the limit "
                f"is {self._max_sessions}",
                retry_after_s=RETRY_AFTER_S,
            )

    def holds_run(self, run_id: str) -> bool:
        """Return whether anything of a run is here, in which case the run may not be over."""
        return run_id in self._run_caches

    def check_run(self, run_id: str) -> None:
        """Raise NotFoundError if this worker holds no session of the run."""
        if not self.holds_run(run_id):
            raise NotFoundError(f"this worker holds no session of run {run_id!r}")

    def get(self, ref: types_pb2.SessionRef) -> Session:
        session = self._sessions.get(key_from(ref))
        if session is None:
            raise NotFoundError(f"no session {ref.run_id}/{ref.party}:{ref.member} here")
        return session

    def check_member(self, ref: types_pb2.SessionRef, caller: Caller) -> None:
        """Raise unless the calling worker is a member of the session's present party."""
        session = self._sessions.get(key_from(ref))
        views = (
            [execution.work.control.view for execution in session.executions.values()]
            if session
            else []
        )
        parties = [view for view in views if view.members]
        newest = max(parties, key=lambda view: view.membership, default=None)
        ids = [member.worker_id for member in newest.members] if newest is not None else []
        if caller.is_worker and not caller.is_one_of(ids):
            where = f"{ref.run_id}/{ref.party}".rstrip("/")
            raise PermissionDeniedError(f"{caller.name} is no member of {where}")

    def abort(self, ref: types_pb2.SessionRef) -> None:
        """End a session's plans and withdraw its offers; do nothing if there is no such session."""
        session = self._sessions.get(key_from(ref))
        if session is None:
            return
        for execution in session.executions.values():
            execution.abort()
        session.states.drop_copies()

    def close(self, run_id: str, ref: types_pb2.SessionRef | None) -> None:
        """Free a session, or all sessions of a run and its blobs."""
        keys = [
            key
            for key in self._sessions
            if key.run_id == run_id and (ref is None or key == key_from(ref))
        ]
        for key in keys:
            self._close(self._sessions.pop(key))
        if ref is None:
            self._run_caches.pop(run_id, None)
            self._host.blobs.drop_run(run_id)
            self._host.secure.forget_run(run_id)
            self._host.kept.unsent.discard(run_id)
            self._uploads_changed.set()
            self._host.thread.submit(lambda: self._host.kept.drop_run(run_id))
            self._host.thread.submit(lambda: self._host.readers.close(run_id))
            self._host.thread.submit(lambda: self._host.user_code.bundles.drop_run(run_id))
            # This runs after the sessions have left their parties, in the same thread.
            context = contextvars.copy_context()
            self._host.thread.submit(lambda: context.run(self._host.activations.clear_run, run_id))
            # Models are full of cycles (compiled code, the user's objects): few objects with much
            # memory, for which the collector would not run for a long time.
            self._host.thread.submit(_collect)

    def _close(self, session: Session) -> None:
        for execution in session.executions.values():
            execution.abort()
            execution.work.outbox.close()
        session.gradients.close()
        self._host.thread.submit(session.holding.drop)

    def drain(self) -> None:
        """Accept no new work; running plans end after their present step."""
        self._is_draining = True
        for execution in self._executions():
            execution.drain()

    async def idle(self) -> None:
        """Wait until no plan of any session runs."""
        for execution in list(self._executions()):
            await execution.work.outbox.ended()

    async def until_reported(self) -> None:
        """Wait until no plan runs and every caller has received the outcome."""
        for execution in list(self._executions()):
            await execution.work.outbox.until_reported()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def num_executions(self) -> tuple[int, int]:
        """Return (number of queued or running executions, number of parked ones)."""
        active = [
            execution
            for execution in self._executions()
            if execution.phase is ExecutionPhase.ACTIVE
        ]
        num_parked = sum(execution.is_parked for execution in active)
        return len(active) - num_parked, num_parked

    @contextmanager
    def uploading(self, request: pb.GetStateRequest) -> Iterator[None]:
        """Context manager around sending a state of which this worker may have the only copy."""
        if request.WhichOneof("which") != "kept":
            yield
            return
        self._num_uploads += 1
        self._uploads_changed.set()
        try:
            yield
            self._host.kept.unsent.discard(request.session.run_id)
        finally:
            self._num_uploads -= 1
            self._uploads_changed.set()

    async def until_uploaded(self, begins_s: float) -> None:
        """Wait until the states that only this worker has are uploaded; give up after begins_s if
        nobody requests them."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        while self._host.kept.unsent:
            left_s = None if self._num_uploads else asked_s + begins_s - loop.time()
            self._uploads_changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._uploads_changed.wait()
            except TimeoutError:
                return

    def describe(self) -> Iterator[pb.SessionInfo]:
        for session in self._sessions.values():
            work = session.latest.work
            yield pb.SessionInfo(
                session=types_pb2.SessionRef(
                    run_id=session.key.run_id, party=session.key.party, member=session.key.member
                ),
                segment=session.latest.key.segment,
                step=work.outbox.step,
                membership=work.control.view.membership,
                activity=work.outbox.activity,
            )

    def awaiting_thread(self) -> Iterator[PlanExecution]:
        """Yield the plans that run in the torch thread or wait for it."""
        for execution in self._executions():
            if execution.phase is ExecutionPhase.ACTIVE and not execution.is_parked:
                yield execution

    def _executions(self) -> Iterator[PlanExecution]:
        for session in list(self._sessions.values()):
            yield from list(session.executions.values())


def _collect() -> None:
    gc.collect()


def key_from(ref: types_pb2.SessionRef) -> SessionKey:
    return SessionKey(ref.run_id, ref.party, ref.member)


# ---- Fence ----
#
# The fence refuses orders of coordinators and groups that no longer exist. It has the highest term,
# and the highest membership of each party, that this process has seen. Nothing is kept over a
# restart: a new incarnation has no session that an old order could harm.
#
# A new term counts once the coordinator has sent it in answer to this worker's call. Otherwise a
# single call with a high number, from any caller, would make the worker refuse its coordinator.

# Parties of closed runs, except the oldest, are remembered too, so that late orders stay harmless.
MAX_PARTIES: Final = 16_384

ASK_TIMEOUT_S: Final = 0.9
"""Maximum wait for the coordinator to confirm a leadership term; a call waits at most twice."""


class FenceGuard:
    """Refuses calls of an older leadership term or membership. Used on the event loop."""

    def __init__(self) -> None:
        self._term = 0
        self._said = asyncio.Event()
        self._ask: Callable[[], None] = lambda: None
        self._memberships: OrderedDict[tuple[str, str], int] = OrderedDict()

    @property
    def term(self) -> int:
        return self._term

    def ask_with(self, ask: Callable[[], None]) -> None:
        """Set the function that asks the coordinator to send its leadership term, for see_term."""
        self._ask = ask

    def see_term(self, term: int) -> None:
        """Note a leadership term that the coordinator has sent."""
        self._term = max(self._term, term)
        self._said.set()
        self._said = asyncio.Event()

    async def check_term(self, term: int) -> None:
        """Raise StaleError for a leadership term older than the coordinator's, UnavailableError for
        a later one that the coordinator does not confirm in time."""
        for _ in range(2):  # the first answer may be older than the question
            if term > self._term:
                await self._wait_for_answer()
        if term > self._term:
            raise UnavailableError(
                f"fence.term: {term}, but the coordinator's is {self._term} as far as it has said"
            )
        if term < self._term:
            raise StaleError(f"term {term} is older than {self._term}: another coordinator leads")

    async def check(
        self, fence: types_pb2.Fence, run_id: str, party: str, *, is_order: bool = True
    ) -> None:
        """Raise StaleError for a too old leadership term or membership; remember an order's
        membership."""
        await self.check_term(fence.term)
        key = (run_id, party)
        seen = self._memberships.get(key, 0)
        if fence.membership < seen:
            where = f"{run_id}/{party}".rstrip("/")
            raise StaleError(f"membership {fence.membership} of {where} is older than {seen}")
        if not is_order:
            return
        self._memberships[key] = fence.membership
        self._memberships.move_to_end(key)
        if len(self._memberships) > MAX_PARTIES:
            self._memberships.popitem(last=False)

    async def _wait_for_answer(self) -> None:
        said = self._said
        self._ask()
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await said.wait()
        except TimeoutError:
            return
