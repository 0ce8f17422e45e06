"""Serve WorkerService, the calls of the coordinator and of other workers: each is checked, passed
on, and its result translated.

The service has no state. `common.rpc.server` turns errors of Stratagem into status codes; errors of
the user's code are results.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

import grpc

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    RefusedBySiteError,
    SiteClosedError,
)
from stratagem.common.base.ids import check_party, check_run_id
from stratagem.common.identity.callers import Caller, Names, current_caller
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import check_numerics
from stratagem.common.privacy.noise import SECRET_BYTES
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.server import checks_what_is_named
from stratagem.common.rpc.tensor_transfer import (
    IDLE_TIMEOUT_S,
    receive_header,
    receive_upload,
    serve_get,
)
from stratagem.common.schema.document import MAX_COUNT
from stratagem.common.strategy.strategies import MAX_CLIENTS, MAX_REPLICAS
from stratagem.common.tensors.local_files import (
    MAX_COPY_BYTES,
    MemoryCopy,
    copy_of,
    is_near,
    offered,
    serve_copy,
)
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, Limits, from_proto
from stratagem.v1 import tensor_pb2, types_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.worker_pb2_grpc import WorkerServiceServicer
from stratagem.worker.host.blobs import BlobUpload
from stratagem.worker.host.states import SignedStream, fetch_state, received_list
from stratagem.worker.service.diagnosis import diagnosis
from stratagem.worker.service.sessions import Session, Sessions
from stratagem.worker.session.context import Host
from stratagem.worker.session.leaves import (
    FolderSink,
    LeafSink,
    ObjectSink,
    check_header,
    sent_pieces,
    write_leaves,
)
from stratagem.worker.session.states import Frozen, SentState, without_same

# ---- Worker service ----

Context = grpc.aio.ServicerContext[Any, Any]

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The limits of this service's calls.

    idle_timeout_s: maximum silence of a caller within a stream. wait_s: maximum wait of a call for
    the plan. The others are sizes of tensors.
    """

    tensors: Limits = DEFAULT_LIMITS
    idle_timeout_s: float = IDLE_TIMEOUT_S
    wait_s: float = 120.0


@lru_cache(maxsize=16)
def _parsed(job_json: str) -> JobSpec:
    """Parse a job; cached, since each round of each client sends the same job."""
    return JobSpec.from_json(job_json)


def _own_state(servicer: Any, request: pb.GetStateRequest, caller: Caller) -> None:
    """Check access to states: the coordinator may read all; members of a party may read its live
    state (to heal) and pieces of its snapshots (to write leaves)."""
    if not caller.is_worker:
        return
    is_piece = request.WhichOneof("which") == "snapshot" and request.HasField("pieces")
    if request.WhichOneof("which") != "live" and not is_piece:
        raise PermissionDeniedError(f"{caller.name} may ask for live states, and not for snapshots")
    servicer.sessions.check_member(request.session, caller)


@checks_what_is_named(
    pb.DESCRIPTOR.services_by_name["WorkerService"], {Names.OWN_STATE: _own_state}
)
class WorkerServicer(WorkerServiceServicer):
    """gRPC service for calls of the coordinator and of other workers."""

    def __init__(
        self, host: Host, sessions: Sessions, capability: types_pb2.Capability, limits: WorkerLimits
    ) -> None:
        self._host = host
        self.sessions = sessions
        self._capability = capability
        self._limits = limits

    async def Execute(
        self, request: pb.ExecuteRequest, context: Context
    ) -> AsyncIterator[pb.ExecuteResponse]:
        await self._pass(request.fence, request.session)
        job, site = self._job(request), self._host.site
        execution, admission = self.sessions.find_execution(request), None
        accepted = pb.Accepted(
            worker_id=self._host.worker_id,
            incarnation=self._host.incarnation,
            attached=execution is not None,
        )
        if execution is None and site is not None:
            try:
                admission = await asyncio.to_thread(site.admit, request, job)
            except RefusedBySiteError as error:
                yield pb.ExecuteResponse(accepted=accepted)
                yield pb.ExecuteResponse(result=self._refused(error))
                return
            # another call may have created it meanwhile
            execution = self.sessions.find_execution(request)
        if execution is None:
            execution = self.sessions.begin(request, job, admission)
        yield pb.ExecuteResponse(accepted=accepted)
        failpoint("worker.execute.accepted")
        async with aclosing(execution.follow()) as messages:
            async for message in messages:
                yield message

    def _refused(self, error: RefusedBySiteError) -> pb.ExecuteResult:
        refusal = types_pb2.UserError(
            type=type(error).__name__,
            message=str(error),
            worker_id=self._host.worker_id,
            activity="asking the site",
            opens_in_s=error.opens_in_s if isinstance(error, SiteClosedError) else 0.0,
        )
        return pb.ExecuteResult(error=refusal)

    async def GetState(
        self, request: pb.GetStateRequest, context: Context
    ) -> AsyncIterator[pb.GetStateResponse]:
        with (
            self.sessions.uploading(request),
            await self._state(request) as state,
            self._base(request) as base,
        ):
            if request.WhichOneof("which") == "snapshot":
                failpoint("worker.snapshot.asked")
                state = state.mirrored() if request.of_mirror else state
            sent = SentState(state.manifest, state.buffers)
            if request.HasField("pieces"):
                failpoint("worker.pieces.asked")
                sent = sent_pieces(state, request.pieces)
            elif base is not None:
                sent = await asyncio.to_thread(without_same, state, base)
                failpoint("worker.snapshot.compared")
            first = partial(pb.GetStateResponse, same=sent.same)
            if request.WhichOneof("which") == "snapshot":
                first = partial(first, name=state.name)
            copy, idle_timeout_s = await self._copy(request, sent), self._limits.idle_timeout_s
            is_counted = self._note_offer(request, state, has_copy=copy is not None)
            if copy is not None:
                num_bytes = 0 if is_counted else sent.num_bytes
                responses = serve_copy(first, sent.manifest, copy, num_bytes, idle_timeout_s)
            else:
                responses = serve_get(
                    first,
                    sent.manifest,
                    sent.buffers,
                    request.offset,
                    num_bytes=sent.num_bytes,
                    is_counted=is_counted,
                )
            async for response in responses:
                yield response

    def _note_offer(self, request: pb.GetStateRequest, state: Frozen, *, has_copy: bool) -> bool:
        """Note whether a snapshot is offered as a copy; return whether the caller could not read an
        earlier copy, whose bytes were counted as sent."""
        if request.WhichOneof("which") != "snapshot" or request.offset:
            return False
        states = self.sessions.get(request.session).states
        asks_again = state.copy is not None or not request.place
        was_offered = asks_again and states.end_offer(state)
        if has_copy:
            states.note_offered(state)
        return was_offered

    async def _copy(self, request: pb.GetStateRequest, sent: SentState) -> MemoryCopy | None:
        """Return a copy of the requested state for a coordinator on this machine, else None."""
        is_small = sent.num_bytes <= MAX_COPY_BYTES
        if not is_near(request.place) or request.offset or not is_small:
            return None
        if current_caller().is_worker:
            return None
        return await asyncio.to_thread(copy_of, sent.buffers)

    async def WriteLeaves(
        self, request_iterator: AsyncIterator[pb.WriteLeavesRequest], context: Context
    ) -> AsyncIterator[pb.WriteLeavesResponse]:
        idle_timeout_s, states = self._limits.idle_timeout_s, self._host.states
        header = (await receive_header(request_iterator, idle_timeout_s)).header
        check_header(header)
        session = await self._session(header.fence, header.session)
        stream = SignedStream(request_iterator, pb.WriteLeavesResponse, idle_timeout_s)
        sink: LeafSink
        if header.store_id:
            sink = FolderSink(None if states is None else states.folder, header)
        else:
            sink = ObjectSink(stream, self._host.signed_objects())
        with session.states.reading(header.snapshot) as state:
            proof = self._host.hub.proof
            work = write_leaves(stream, sink, state, header, proof, session.leaves)
            async with aclosing(stream.responses(work)) as responses:
                async for response in responses:
                    yield response

    async def FetchState(
        self, request_iterator: AsyncIterator[pb.FetchStateRequest], context: Context
    ) -> AsyncIterator[pb.FetchStateResponse]:
        idle_timeout_s, blobs = self._limits.idle_timeout_s, self._host.blobs
        header = (await receive_header(request_iterator, idle_timeout_s)).header
        run_id = check_run_id(header.run_id)
        if not _DIGEST.fullmatch(header.digest):
            raise InvalidInputError.at("header.digest", "must be 64 lower-case hex digits")
        await self.sessions.fences.check_term(header.fence.term)
        self.sessions.check_run(run_id)
        objects = self._host.signed_objects()
        if blobs.find(run_id, header.digest) is not None:
            yield pb.FetchStateResponse(committed=True)
            return
        limits = self._limits.tensors
        listed = await received_list(request_iterator, header, limits, idle_timeout_s)
        stream = SignedStream(request_iterator, pb.FetchStateResponse, idle_timeout_s)
        work = fetch_state(stream, objects, blobs, header, listed)
        async with aclosing(stream.responses(work)) as responses:
            async for response in responses:
                yield response

    async def SetState(
        self, request_iterator: AsyncIterator[pb.SetStateRequest], context: Context
    ) -> AsyncIterator[pb.SetStateResponse]:
        idle_timeout_s = self._limits.idle_timeout_s
        header = (await receive_header(request_iterator, idle_timeout_s)).header
        run_id = check_run_id(header.run_id)
        if not _DIGEST.fullmatch(header.digest):
            raise InvalidInputError.at("header.digest", "must be 64 lower-case hex digits")
        manifest = from_proto(header.manifest, self._limits.tensors)
        await self.sessions.fences.check_term(header.fence.term)
        self.sessions.check_run(run_id)
        if self._host.blobs.find(run_id, header.digest) is not None:
            yield pb.SetStateResponse(resume_offset=manifest.total_bytes)
            yield pb.SetStateResponse(committed=True)
            return
        upload = self._host.blobs.open_upload(run_id, header.digest, manifest, header.fence.term)

        async def commit() -> None:
            if upload.num_streams > 1:
                await self._check(run_id, upload)
            self._host.blobs.commit(run_id, upload)
            failpoint("worker.blob.committed")

        try:
            if (file := offered(header)) is not None:
                await self._read(run_id, upload, file)
            async for response in receive_upload(
                request_iterator, pb.SetStateResponse, upload.writer, commit, idle_timeout_s
            ):
                yield response
        finally:
            upload.is_open = False

    async def _read(self, run_id: str, upload: BlobUpload, file: tensor_pb2.OpenFile) -> None:
        # The caller would otherwise reach its limit for an answer.
        limit_s = min(self._limits.idle_timeout_s, IDLE_TIMEOUT_S) / 3
        try:
            await asyncio.to_thread(upload.read, file, limit_s)
        except asyncio.CancelledError:  # the thread continues, so no other stream may
            self._host.blobs.forget(run_id, upload)
            raise

    async def _check(self, run_id: str, upload: BlobUpload) -> None:
        try:
            await asyncio.to_thread(upload.check)
        except IntegrityError:
            self._host.blobs.forget(run_id, upload)
            raise

    async def GetGradients(
        self, request: pb.GetGradientsRequest, context: Context
    ) -> AsyncIterator[pb.GetGradientsResponse]:
        session = await self._session(request.fence, request.session)
        outgoing = session.gradients.outgoing(request.fence.membership, self._limits.wait_s)
        async with aclosing(outgoing) as messages:
            async for message in messages:
                yield message

    async def ApplyGradients(
        self, request_iterator: AsyncIterator[pb.ApplyGradientsRequest], context: Context
    ) -> pb.ApplyGradientsResponse:
        header = (await receive_header(request_iterator, self._limits.idle_timeout_s)).header
        session = await self._session(header.fence, header.session)
        step = await session.gradients.incoming(header, request_iterator, self._limits.wait_s)
        return pb.ApplyGradientsResponse(step=step)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        await self._pass(request.fence, request.session)
        self.sessions.abort(request.session)
        return pb.AbortResponse()

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        run_id = check_run_id(request.run_id)
        ref = request.session if request.HasField("session") else None
        if ref is not None and ref.run_id != run_id:
            raise InvalidInputError.at("session.run_id", "must be that of the request")
        # A run has no membership, so its closing is fenced by the term alone.
        await self.sessions.fences.check_term(request.fence.term)
        self.sessions.close(run_id, ref)
        return pb.CloseSessionResponse()

    async def SecureRound(
        self, request: pb.SecureRoundRequest, context: Context
    ) -> pb.SecureRoundResponse:
        # The keys of a round belong to its attempt, so its steps are fenced by the term alone.
        await self.sessions.fences.check_term(request.fence.term)
        answer = await asyncio.to_thread(self._host.secure.answer, request)
        failpoint("worker.secure.answered")
        return answer

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        described = pb.DescribeResponse(
            worker_id=self._host.worker_id,
            incarnation=self._host.incarnation,
            capability=self._capability,
            sessions=self.sessions.describe(),
            time_s=time.time(),
        )
        if request.with_environment:
            environment, probes = await diagnosis(self._host, request.probes)
            described.environment.CopyFrom(environment)
            described.probes.extend(probes)
        return described

    async def _pass(
        self, fence: types_pb2.Fence, session: types_pb2.SessionRef, *, is_order: bool = True
    ) -> None:
        """Check the fence (term, membership) of a session's call; remember it if this is an
        order."""
        run_id, party = check_run_id(session.run_id), check_party(session.party)
        await self.sessions.fences.check(fence, run_id, party, is_order=is_order)

    async def _session(self, fence: types_pb2.Fence, ref: types_pb2.SessionRef) -> Session:
        await self._pass(fence, ref, is_order=False)
        return self.sessions.get(ref)

    def _job(self, request: pb.ExecuteRequest) -> JobSpec:
        check_plan(request)
        job = _parsed(request.job_json)
        local = job.data.worker_local
        is_ours = self._host.site is None  # otherwise the site's file lists the data
        if is_ours and local is not None and local not in self._host.local_data:
            names = ", ".join(sorted(self._host.local_data)) or "none"
            raise NotFoundError(f"this worker has no local data {local!r}; it has: {names}")
        return job

    def _base(self, request: pb.GetStateRequest) -> AbstractContextManager[Frozen | None]:
        """Return a context manager that provides the snapshot which the caller already has."""
        if not request.base or request.WhichOneof("which") != "snapshot":
            return nullcontext()
        return self.sessions.get(request.session).states.reading_base(request.base)

    async def _state(self, request: pb.GetStateRequest) -> AbstractContextManager[Frozen]:
        """Return a context manager that provides the requested state."""
        if request.WhichOneof("which") == "kept" and self._host.site is None:
            # Only the session's name is checked, as the process that wrote the state may have
            # ended.
            await self._pass(request.fence, request.session, is_order=False)
            run_id = check_run_id(request.session.run_id)
            frozen = await asyncio.to_thread(self._host.kept.frozen, run_id, request.kept)
            return nullcontext(frozen)
        session = await self._session(request.fence, request.session)
        is_update = request.WhichOneof("which") == "snapshot" and not request.HasField("pieces")
        if self._host.site is not None and not is_update:
            raise RefusedBySiteError("which: a site gives the updates of its rounds and no more")
        match request.WhichOneof("which"):
            case "snapshot":
                return session.states.reading(request.snapshot)
            case "outputs":
                return nullcontext(session.states.outputs(request.outputs))
            case "live":
                state = await session.states.live(request.fence.membership, self._limits.wait_s)
                # The party may have been re-formed meanwhile, without the caller.
                self.sessions.check_member(request.session, current_caller())
                return nullcontext(state)
            case _:
                raise InvalidInputError.at("which", "name a snapshot, outputs or the live state")


# ---- Checks of a plan ----
#
# The ranges of a plan's fields are checked before a session is made for it. Plans of our
# coordinator pass. Others are refused with the name of the wrong field, before the torch thread
# fails or memory fills up.

MAX_MEMBERS: Final = 16_384
MAX_SPLITS: Final = 64
MAX_NAME_CHARS: Final = 4096


def check_plan(request: pb.ExecuteRequest) -> None:
    """Raise InvalidInputError for the first field of a plan that is out of range."""
    _within("segment", request.segment, 0, MAX_COUNT)
    check_numerics(request.numerics)
    match request.WhichOneof("plan"):
        case "train":
            _check_train(request.train)
        case "client_round":
            plan = request.client_round
            _within("client_round.num_clients", plan.num_clients, 1, MAX_CLIENTS)
            _within("client_round.client", plan.client, 0, plan.num_clients - 1)
            _within("client_round.local_epochs", plan.local_epochs, 1, MAX_CLIENTS)
            _check_rows(plan.rows)
        case "evaluate":
            size = max(request.evaluate.size, 1)
            _within("evaluate.size", size, 1, MAX_MEMBERS)
            _within("evaluate.rank", request.evaluate.rank, 0, size - 1)
            _within("evaluate.splits", len(request.evaluate.splits), 0, MAX_SPLITS)
        case "measure":
            _within("measure.splits", len(request.measure.splits), 0, MAX_SPLITS)
        case "show":
            _within("show.step", request.show.step, 0, MAX_COUNT)
        case None:
            raise InvalidInputError.at("plan", "is missing")


def _check_rows(rows: pb.RowPrivacy) -> None:
    _within("client_round.rows.name", len(rows.name), 0, MAX_NAME_CHARS)
    _within("client_round.rows.num_rounds", rows.num_rounds, 0, MAX_CLIENTS)
    if rows.secret and len(rows.secret) != SECRET_BYTES:
        text = f"has {len(rows.secret)} bytes and must have {SECRET_BYTES}"
        raise InvalidInputError.at("client_round.rows.secret", text)


def _check_train(plan: pb.TrainPlan) -> None:
    num_members = len(plan.view.members)
    _within("train.view.members", num_members, 1, MAX_MEMBERS)
    _within("train.view.rank", plan.view.rank, 0, num_members - 1)
    _within("train.to_step", plan.to_step, 0, MAX_COUNT)
    _within("train.base.step", plan.base.step, 0, MAX_COUNT)
    _within("train.num_shards", plan.num_shards, 1, MAX_REPLICAS)
    _within("train.evaluate_splits", len(plan.evaluate_splits), 0, MAX_SPLITS)
    _within("train.ranks", len(plan.ranks), 0, MAX_MEMBERS)
    if plan.exchange not in pb.ExchangeMethod.values():
        names = ", ".join(pb.ExchangeMethod.keys())
        raise InvalidInputError.at("train.exchange", f"{plan.exchange} is not one of {names}")
    for index, member in enumerate(plan.view.members):
        stop = member.first_shard + member.num_shards
        _within(f"train.view.members[{index}].num_shards", stop, 0, plan.num_shards)
    for index, rank in enumerate(plan.ranks):
        _within(f"train.ranks[{index}]", rank, 0, num_members - 1)


def _within(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidInputError.at(field, f"{value} is not in [{least}, {most}]")
