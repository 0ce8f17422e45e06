"""WorkerService: each handler checks, makes one call, and translates.

Owns nothing. Errors of our tree become status codes in `common.rpc.server`; errors of the user's
code are results and never come past here.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import lru_cache
from typing import Any, Final

import grpc

from stratagem.common.errors import InvalidInputError, NotFoundError
from stratagem.common.failpoints import failpoint
from stratagem.common.ids import check_run_id
from stratagem.common.job import JobSpec
from stratagem.common.tensors.manifest import Limits, from_proto
from stratagem.common.tensors.transfer import receive_header, receive_upload, serve_get
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.worker_pb2_grpc import WorkerServiceServicer
from stratagem.worker.sessions import Session, Sessions
from stratagem.worker.state_store import Frozen
from stratagem.worker.work import Host

Context = grpc.aio.ServicerContext[Any, Any]

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_PARTY: Final = re.compile(r"[A-Za-z0-9._/-]{0,256}")


@lru_cache(maxsize=16)
def _parsed(job_json: str) -> JobSpec:
    """A job comes again with every round of every client."""
    return JobSpec.from_json(job_json)


class WorkerServicer(WorkerServiceServicer):
    """What the coordinator and fellow workers may ask of this worker."""

    def __init__(
        self, host: Host, sessions: Sessions, capability: types_pb2.Capability, limits: Limits
    ) -> None:
        self._host = host
        self._sessions = sessions
        self._capability = capability
        self._limits = limits

    async def Execute(
        self, request: pb.ExecuteRequest, context: Context
    ) -> AsyncIterator[pb.ExecuteResponse]:
        self._pass(request.fence, request.session)
        job = self._job(request)
        execution, attached = self._sessions.execute(request, job)
        yield pb.ExecuteResponse(
            accepted=pb.Accepted(
                worker_id=self._host.worker_id,
                incarnation=self._host.incarnation,
                attached=attached,
            )
        )
        failpoint("worker.execute.accepted")
        async with aclosing(execution.follow()) as messages:
            async for message in messages:
                yield message

    async def GetState(
        self, request: pb.GetStateRequest, context: Context
    ) -> AsyncIterator[pb.GetStateResponse]:
        state = await self._state(request)
        async for response in serve_get(
            pb.GetStateResponse, state.manifest, state.buffers, request.offset
        ):
            yield response

    async def SetState(
        self, request_iterator: AsyncIterator[pb.SetStateRequest], context: Context
    ) -> AsyncIterator[pb.SetStateResponse]:
        header = (await receive_header(request_iterator)).header
        self._sessions.fences.check_term(header.fence.term)
        run_id = check_run_id(header.run_id)
        manifest = from_proto(header.manifest, self._limits)
        if not _DIGEST.fullmatch(header.digest):
            raise InvalidInputError.at("header.digest", "must be 64 lower-case hex digits")
        if self._host.blobs.find(run_id, header.digest) is not None:
            yield pb.SetStateResponse(resume_offset=manifest.total_bytes)
            yield pb.SetStateResponse(committed=True)
            return
        upload = self._host.blobs.open_upload(run_id, header.digest, manifest)

        async def commit() -> None:
            self._host.blobs.commit(run_id, upload)
            failpoint("worker.blob.committed")

        try:
            async for response in receive_upload(
                request_iterator, pb.SetStateResponse, upload.writer, commit
            ):
                yield response
        finally:
            upload.is_open = False

    async def GetGradients(
        self, request: pb.GetGradientsRequest, context: Context
    ) -> AsyncIterator[pb.GetGradientsResponse]:
        session = self._session(request.fence, request.session)
        async with aclosing(session.gradients.outgoing(request.fence.membership)) as messages:
            async for message in messages:
                yield message

    async def ApplyGradients(
        self, request_iterator: AsyncIterator[pb.ApplyGradientsRequest], context: Context
    ) -> pb.ApplyGradientsResponse:
        header = (await receive_header(request_iterator)).header
        session = self._session(header.fence, header.session)
        return pb.ApplyGradientsResponse(
            step=await session.gradients.incoming(header, request_iterator)
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        self._pass(request.fence, request.session)
        self._sessions.abort(request.session)
        return pb.AbortResponse()

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        # A run has no membership of its own, so closing one is fenced by the term alone.
        self._sessions.fences.check_term(request.fence.term)
        ref = request.session if request.HasField("session") else None
        if ref is not None and ref.run_id != request.run_id:
            raise InvalidInputError.at("session.run_id", "must be that of the request")
        self._sessions.close(request.run_id, ref)
        return pb.CloseSessionResponse()

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            worker_id=self._host.worker_id,
            incarnation=self._host.incarnation,
            capability=self._capability,
            sessions=self._sessions.describe(),
        )

    def _pass(self, fence: types_pb2.Fence, session: types_pb2.SessionRef) -> None:
        """The one fence of calls about a session."""
        run_id = check_run_id(session.run_id)
        if not _PARTY.fullmatch(session.party):
            raise InvalidInputError.at("session.party", f"{session.party!r} is no path")
        self._sessions.fences.check(fence, run_id, session.party)

    def _session(self, fence: types_pb2.Fence, ref: types_pb2.SessionRef) -> Session:
        self._pass(fence, ref)
        return self._sessions.get(ref)

    def _job(self, request: pb.ExecuteRequest) -> JobSpec:
        if request.WhichOneof("plan") is None:
            raise InvalidInputError.at("plan", "is missing")
        view = request.train.view
        if request.HasField("train") and view.rank >= len(view.members):
            raise InvalidInputError.at("train.view.rank", f"{view.rank} names no member")
        job = _parsed(request.job_json)
        local = job.data.worker_local
        if local is not None and local not in self._host.local_data:
            known = ", ".join(sorted(self._host.local_data)) or "none"
            raise NotFoundError(f"this worker has no local data {local!r}; it has: {known}")
        return job

    async def _state(self, request: pb.GetStateRequest) -> Frozen:
        session = self._session(request.fence, request.session)
        match request.WhichOneof("which"):
            case "snapshot":
                return session.states.snapshot(request.snapshot)
            case "live":
                return await session.states.live(request.fence.membership)
            case _:
                raise InvalidInputError.at("which", "name a snapshot or the live state")
