"""CoordinatorService decodes each request, makes one call, and encodes the answer.

coordinator.proto documents the meaning of the calls and their codes. At the server's boundary,
errors of common/base/errors.py become status codes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import grpc

from stratagem.common.base.errors import (
    LimitError,
    NotFoundError,
    PermissionDeniedError,
)
from stratagem.common.base.ids import (
    Party,
    RunId,
    WorkerId,
    check_digest,
    check_run_id,
    new_submission,
)
from stratagem.common.identity.callers import Caller, Names, current_caller
from stratagem.common.observe import tracing
from stratagem.common.rpc.server import Check, checks_what_is_named
from stratagem.common.rpc.streams import BEGUN
from stratagem.common.tensors.stream import CHUNK_BYTES
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.commands import (
    CancelRun,
    DeleteRun,
    DrainWorker,
    LeaveWorker,
    PinRun,
    RecordVerification,
    RegisterWorker,
    ReleaseWorker,
    ResumeRun,
    SubmitRun,
)
from stratagem.coordinator.core.facts import Capability, Member
from stratagem.coordinator.core.state import EndedRun, RunRecord
from stratagem.coordinator.core.strategy_calls import parties_of
from stratagem.coordinator.observe.feed import FeedEvent
from stratagem.coordinator.observe.logs import RunLogLine
from stratagem.coordinator.runtime.rendezvous import Arrival
from stratagem.coordinator.service import queries, streams
from stratagem.coordinator.service.limits import (
    Places,
    check_address,
    check_capability,
    check_endpoint,
    check_note,
    clipped_reason,
    previous_exit,
)
from stratagem.coordinator.service.queries import (
    HistoryQueries,
    Runs,
    follows_on,
    past_events,
    span_of,
    verification_of,
)
from stratagem.coordinator.service.queries import page as worker_page
from stratagem.coordinator.service.workers import (
    check_reachability,
    diagnose,
    dial_back,
    investigate,
    member_of,
    relay_connection,
    take_heartbeats,
)
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import coordinator_pb2_grpc

# ---- Resource ownership ----
#
# The coordinator checks that a caller may use the resources that a call names. The checks only
# read the state. If callers need not identify themselves, every caller may use everything.


def _own_run(servicer: Any, request: Any, caller: Caller) -> None:
    """Raise an error if the run belongs to another owner; an unknown run is left to the handler."""
    app: App = servicer.app
    run = app.loop.state.find(RunId(request.run_id))
    if run is not None:
        caller.must_own(request.run_id, run.owner)


def _coordinator(_servicer: Any, request: pb.DiagnoseRequest, caller: Caller) -> None:
    if caller.is_worker and not request.without_workers:
        raise PermissionDeniedError(
            f"Diagnose: {caller.name} may ask for the coordinator alone (without_workers)"
        )


def _check_member(app: App, request: Any, caller: Caller, rank: int | None = None) -> None:
    """Raise an error if the calling worker is not a member of the party, or not of this rank."""
    session = request.session
    run = app.loop.state.runs.get(RunId(session.run_id))
    view = None if run is None else parties_of(run).get(Party(session.party))
    if view is None or view.membership != request.fence.membership:
        return  # the handler deals with a stale membership
    members = view.members if rank is None else view.members[rank : rank + 1]
    if not caller.is_one_of(member.worker_id for member in members):
        where = f"{session.run_id}/{session.party}".rstrip("/")
        which = "no member" if rank is None else f"not member {rank}"
        raise PermissionDeniedError(f"{caller.name} is {which} of {where}")


CHECKS: Final[Mapping[Names, Check]] = {
    Names.OWN_RUN: _own_run,
    Names.OWN_DATA: lambda servicer, request, caller: servicer.check_submit(request, caller),
    Names.COORDINATOR: _coordinator,
    Names.ITSELF: lambda _servicer, request, caller: caller.must_be_worker(request.worker_id),
    Names.OWN_PARTY: lambda servicer, request, caller: _check_member(servicer.app, request, caller),
    Names.OWN_RANK: lambda servicer, request, caller: _check_member(
        servicer.app, request, caller, request.rank
    ),
}


# ---- Service ----

Context = grpc.aio.ServicerContext[Any, Any]

MEETINGS_AT_ONCE = 128
"""The most workers dialled back at once: without a bound, thousands of simultaneous registrations
would all time out, and start again."""


@checks_what_is_named(pb.DESCRIPTOR.services_by_name["CoordinatorService"], CHECKS)
class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    def __init__(self, app: App) -> None:
        self._app = app
        self._runs = Runs(app)
        self._history = HistoryQueries(app)
        self._uploads = streams.Uploads(app)
        settings = app.settings
        self._watchers = Places("max_watchers", settings.max_watchers, settings.max_watchers_each)
        self._diagnosis = asyncio.Lock()
        self._met: tuple[tuple[Arrival, ...], bytes] = ((), b"")
        """The arrivals of the latest rendezvous, and the encoded answer to all members."""
        self._meetings = asyncio.Semaphore(MEETINGS_AT_ONCE)

    @property
    def app(self) -> App:
        """Return the app that this service serves."""
        return self._app

    # ---- clients ----

    async def SubmitRun(
        self, request: pb.SubmitRunRequest, context: Context
    ) -> pb.SubmitRunResponse:
        run_id = RunId(request.run_id)
        caller, trace = current_caller(), tracing.traceparent()
        command = SubmitRun(
            run_id,
            request.job_json,
            time.time(),
            by=caller.name,
            traceparent=trace,
            owner=caller.owner,
            submission=new_submission(),
        )
        entries = await self._app.loop.submit(command)
        if entries and request.note:
            self._app.logs.add(run_id, RunLogLine(time.time(), "", "INFO", request.note))
        return pb.SubmitRunResponse(run_id=run_id, created=bool(entries))

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=await self._runs.info(request.run_id))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        return await self._runs.page(request.page_token)

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: Context
    ) -> AsyncIterator[pb.WatchRunResponse]:
        run = self._run(request.run_id)
        run_id, num_events = run.run_id, 0
        span = span_of(request, run.num_shown)
        feed = self._app.feed
        with self._watchers.place(current_caller()):
            if not follows_on(request):
                async for response in past_events(feed, run_id, span, request):
                    yield response
                return
            await context.send_initial_metadata(BEGUN)
            async for item in feed.watch(run_id, span, run.num_shown):
                if isinstance(item, FeedEvent):
                    num_events += 1
                    yield pb.WatchRunResponse(event=queries.event(item))
                    if num_events == request.limit:
                        return
                elif (active := self._app.loop.state.runs.get(run_id)) is not None:
                    world = self._app.loop.world
                    progress = queries.progress(self._app.paces, world, active, item)
                    yield pb.WatchRunResponse(progress=progress)

    async def WatchRuns(
        self, request: pb.WatchRunsRequest, context: Context
    ) -> AsyncIterator[pb.WatchRunsResponse]:
        with self._watchers.place(current_caller()):
            async for response in self._runs.watch():
                yield response

    async def GetHistory(
        self, request: pb.GetHistoryRequest, context: Context
    ) -> AsyncIterator[pb.GetHistoryResponse]:
        view = await self._runs.view(request.run_id)
        with self._watchers.place(current_caller()):
            async for block in self._history.blocks(request, view.segment):
                yield pb.GetHistoryResponse(block=block)

    async def CancelRun(
        self, request: pb.CancelRunRequest, context: Context
    ) -> pb.CancelRunResponse:
        await self._app.loop.submit(CancelRun(RunId(request.run_id), current_caller().name))
        return pb.CancelRunResponse()

    async def ResumeRun(
        self, request: pb.ResumeRunRequest, context: Context
    ) -> pb.ResumeRunResponse:
        segment = request.from_segment if request.HasField("from_segment") else None
        resume = ResumeRun(RunId(request.run_id), current_caller().name, segment)
        await self._app.loop.submit(resume)
        return pb.ResumeRunResponse()

    async def DeleteRun(
        self, request: pb.DeleteRunRequest, context: Context
    ) -> pb.DeleteRunResponse:
        await self._app.loop.submit(DeleteRun(RunId(request.run_id), current_caller().name))
        return pb.DeleteRunResponse()

    async def PinRun(self, request: pb.PinRunRequest, context: Context) -> pb.PinRunResponse:
        by = current_caller().name
        await self._app.loop.submit(PinRun(RunId(request.run_id), request.pinned, by))
        return pb.PinRunResponse()

    async def RecordVerification(
        self, request: pb.RecordVerificationRequest, context: Context
    ) -> pb.RecordVerificationResponse:
        result = verification_of(request, current_caller().name)
        await self._app.loop.submit(RecordVerification(result))
        return pb.RecordVerificationResponse()

    async def BackUp(
        self, request: pb.BackUpRequest, context: Context
    ) -> AsyncIterator[pb.BackUpResponse]:
        async for response in streams.back_up(self._app.backups, current_caller().name):
            yield response

    async def DownloadBlob(
        self, request: pb.DownloadBlobRequest, context: Context
    ) -> AsyncIterator[pb.DownloadBlobResponse]:
        digest = check_digest(request.digest)
        async for response in streams.download_of_any(self._app, digest, request.offset):
            yield response

    async def DownloadState(
        self, request: pb.DownloadStateRequest, context: Context
    ) -> AsyncIterator[pb.DownloadStateResponse]:
        digest = streams.which(await self._runs.view(request.run_id), request.which)
        make = pb.DownloadStateResponse
        async for response in streams.download(self._app.blobs, digest, request.offset, make):
            yield response

    async def DownloadProfile(
        self, request: pb.DownloadProfileRequest, context: Context
    ) -> AsyncIterator[pb.DownloadProfileResponse]:
        run_id = self._run(request.run_id).run_id
        pieces = await asyncio.to_thread(self._app.profiles.trace, run_id)
        while piece := await asyncio.to_thread(next, pieces, b""):
            for start in range(0, len(piece), CHUNK_BYTES):
                yield pb.DownloadProfileResponse(data=piece[start : start + CHUNK_BYTES])

    async def UploadData(
        self, request_iterator: AsyncIterator[pb.UploadDataRequest], context: Context
    ) -> AsyncIterator[pb.UploadDataResponse]:
        async for response in self._uploads.receive(request_iterator):
            yield response

    async def TailLogs(
        self, request: pb.TailLogsRequest, context: Context
    ) -> AsyncIterator[pb.TailLogsResponse]:
        run_id = self._run(request.run_id).run_id
        lines = self._app.logs.tail(
            run_id, request.from_line, follow=request.follow, is_over=self._app.is_over
        )
        with self._watchers.place(current_caller()):
            await context.send_initial_metadata(BEGUN)
            async for number, line in lines:
                if request.worker_id in ("", line.worker_id):
                    yield pb.TailLogsResponse(
                        time_s=line.time_s,
                        worker_id=line.worker_id,
                        level=line.level,
                        text=line.text,
                        line=number,
                    )

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Context
    ) -> pb.ListWorkersResponse:
        return worker_page(self._app, request.page_token, request.page_size)

    async def ReleaseWorker(
        self, request: pb.ReleaseWorkerRequest, context: Context
    ) -> pb.ReleaseWorkerResponse:
        by = current_caller().name
        await self._app.loop.submit(ReleaseWorker(WorkerId(request.worker_id), by))
        return pb.ReleaseWorkerResponse()

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Context) -> pb.DiagnoseResponse:
        async with self._diagnosis:
            return await diagnose(self._app, with_workers=not request.without_workers)

    # ---- workers ----

    async def RegisterWorker(
        self, request: pb.RegisterWorkerRequest, context: Context
    ) -> pb.RegisterWorkerResponse:
        member = member_of(request)
        check_capability(request.capability)
        check_reachability(self._app.relay, request)
        self._check_room(member)
        async with self._meetings:
            await dial_back(self._app, member, request.address)
        capability = Capability.model_validate(request.capability, from_attributes=True)
        ending = previous_exit(request)
        await self._app.loop.submit(RegisterWorker(member, request.address, capability, ending))
        self._app.refusals.forget(member.worker_id)  # a repeated registration makes no fact
        # Workers that send single heartbeats keep to the pace of a few; see Heartbeat.
        pace = self._app.leases.rule
        self._app.leases.grant([member], pace.ttl_s)
        return pb.RegisterWorkerResponse(
            term=self._app.loop.term,
            heartbeat_interval_s=pace.shortest_s,
            lease_ttl_s=pace.ttl_s,
            store_id=self._app.store_id,
        )

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        member, leases = member_of(request), self._app.leases
        if not leases.renew(member, leases.rule.ttl_s):
            raise NotFoundError(f"worker {member.worker_id!r} is not registered (any more)")
        if request.draining:
            await self._app.loop.submit(DrainWorker(member))
        released = bool(request.for_run) and self._app.is_over(RunId(request.for_run))
        return pb.HeartbeatResponse(term=self._app.loop.term, time_s=time.time(), released=released)

    async def HeartbeatStream(  # type: ignore[override]  # it writes by itself, also unasked
        self, request_iterator: AsyncIterator[pb.HeartbeatStreamRequest], context: Context
    ) -> None:
        idle_s = self._app.settings.stream_idle_timeout_s
        await take_heartbeats(self._app.heartbeats, request_iterator, context, idle_s)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        member = member_of(request)
        await self._app.loop.submit(LeaveWorker(member, clipped_reason(request.reason)))
        return pb.LeaveResponse()

    async def Rendezvous(  # type: ignore[override]  # serialized once for all members
        self, request: pb.RendezvousRequest, context: Context
    ) -> pb.RendezvousResponse | bytes:
        applied = request.applied_step if request.HasField("applied_step") else None
        slices = request.slices if request.HasField("slices") else None
        check_endpoint(request.endpoint)
        if request.address:
            check_address(request.address)
        arrivals = await streams.rendezvous(
            self._app,
            RunId(request.session.run_id),
            Party(request.session.party),
            request.fence.membership,
            request.rank,
            Arrival(request.endpoint, applied, request.address, slices),
        )
        if self._met[0] is not arrivals:
            self._met = (arrivals, queries.rendezvous_response(arrivals).SerializeToString())
        return self._met[1]

    async def Suspect(self, request: pb.SuspectRequest, context: Context) -> pb.SuspectResponse:
        run_id, party = RunId(request.session.run_id), Party(request.session.party)
        reason = clipped_reason(request.reason)
        await investigate(self._app, run_id, party, request.fence.membership, reason)
        return pb.SuspectResponse()

    async def Relay(  # type: ignore[override]  # it writes by itself, as bytes come
        self, request_iterator: AsyncIterator[pb.RelayRequest], context: Context
    ) -> None:
        idle_s = self._app.settings.stream_idle_timeout_s
        await relay_connection(self._app.relay, request_iterator, context, idle_s)

    # ---- shared ----

    def _run(self, run_id: str) -> RunRecord | EndedRun:
        run = self._app.loop.state.find(RunId(run_id))
        if run is None:
            raise NotFoundError(f"run {run_id!r} is not known")
        return run

    def _check_room(self, member: Member) -> None:
        workers, limit = self._app.loop.state.workers, self._app.settings.max_workers
        known = workers.get(member.worker_id)
        if len(workers) < limit or (known is not None and known.is_alive):
            return
        num_alive = sum(worker.is_alive for worker in workers.values())
        if num_alive >= limit:
            raise LimitError(f"max_workers: {num_alive} workers are alive, the limit is {limit}")

    async def check_submit(self, request: pb.SubmitRunRequest, caller: Caller) -> None:
        """Raise an error if a job is too large, or names blobs of other callers."""
        run_id = check_run_id(request.run_id)
        settings = self._app.settings
        check_note(request.note)
        size = len(request.job_json.encode())
        if size > settings.max_job_bytes:
            raise LimitError(f"job_json: {size} bytes, the limit is {settings.max_job_bytes}")
        active = sum(run.ended is None for run in self._app.loop.state.runs.values())
        is_new = self._app.loop.state.find(run_id) is None
        if is_new and active >= settings.max_active_runs:
            raise LimitError(f"{active} runs are active, the limit is {settings.max_active_runs}")
        await streams.check_job(self._app, request.job_json, caller, is_new=is_new)
