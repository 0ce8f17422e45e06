"""Walks through the whole table of calls: every call of every service, by every kind of caller,
about something that belongs to somebody. A call without a row here fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from structlog.testing import capture_logs

from stratagem.common.base.ids import Party, RunId
from stratagem.common.identity.callers import TABLE, Authorizer
from stratagem.common.identity.certificates import Authority, make_authority
from stratagem.common.identity.tls import Role
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.server import bind_tls, make_server
from stratagem.coordinator.core.facts import ROOT
from stratagem.coordinator.core.strategy_calls import parties_of
from stratagem.coordinator.service import service as resource_ownership
from stratagem.v1 import (
    coordinator_pb2,
    peer_pb2,
    peer_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from stratagem.worker.mesh.peers import Group, PeerHub, PeerServicer
from stratagem.worker.service.service import WorkerLimits, WorkerServicer
from stratagem.worker.service.sessions import Sessions, key_from
from stratagem.worker.session.control import MemberView, Peer
from stratagem.worker.session.states import StateStore
from tests.coordinator.core.jobs import DATA_PARALLEL, job_text
from tests.identity.deployment import Deployment, deployed, worker

Code = grpc.StatusCode
OUT = (Code.PERMISSION_DENIED, Code.UNAUTHENTICATED)
SERVICES = (
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
    peer_pb2.DESCRIPTOR.services_by_name["PeerService"],
)

FENCE = types_pb2.Fence(term=1, membership=1)
PARTY = types_pb2.SessionRef(run_id="r")

PEOPLE = ("read", "other", "owner", "admin", "client-alice")
WORKERS = {
    "worker-w2": "a member of another run",
    "worker-w3": "a member of another party of the run",
    "worker-w4": "a member of nothing",
    "worker-w0": "the first member of the run's party",
    "worker-w1": "the second one",
}
"""Those come last who may have the party formed anew."""
CALLERS = (*WORKERS, "coordinator", *PEOPLE)
"""Those come last who may stop the run and delete it."""
READERS = frozenset(PEOPLE)
SUBMITTERS = READERS - {"read"}
OWNERS = frozenset({"owner", "admin", "client-alice"})
"""Of the run r, which belongs to `owner`; certificates of clients have all scopes."""
ADMINS = frozenset({"admin", "client-alice"})
MEMBERS = frozenset({"worker-w0", "worker-w1"})
COORDINATOR = frozenset({"coordinator"})


@dataclass(frozen=True)
class Row:
    """What is asked, and who is heard; all others are refused."""

    request: Any
    heard: frozenset[str]


def _of_run(kind: Any, heard: frozenset[str]) -> Row:
    return Row(kind(run_id="r"), heard)


def _itself(kind: Any) -> Row:
    return Row(kind(worker_id="w1", incarnation="w1"), frozenset({"worker-w1"}))


C, W, P = coordinator_pb2, worker_pb2, peer_pb2
ROWS: Mapping[str, tuple[Row, ...]] = {
    "SubmitRun": (Row(C.SubmitRunRequest(run_id="new", job_json="{}"), SUBMITTERS),),
    "UploadData": (Row(C.UploadDataRequest(header=C.UploadDataHeader()), SUBMITTERS),),
    "CancelRun": (_of_run(C.CancelRunRequest, OWNERS),),
    "ResumeRun": (_of_run(C.ResumeRunRequest, OWNERS),),
    "DeleteRun": (_of_run(C.DeleteRunRequest, OWNERS),),
    "PinRun": (_of_run(C.PinRunRequest, OWNERS),),
    "RecordVerification": (_of_run(C.RecordVerificationRequest, OWNERS),),
    "BackUp": (Row(C.BackUpRequest(), ADMINS),),
    "DownloadBlob": (Row(C.DownloadBlobRequest(digest="ab" * 32), ADMINS),),
    "ReleaseWorker": (Row(C.ReleaseWorkerRequest(worker_id="w1"), ADMINS),),
    "GetRun": (_of_run(C.GetRunRequest, READERS),),
    "ListRuns": (Row(C.ListRunsRequest(), READERS),),
    "WatchRun": (Row(C.WatchRunRequest(run_id="r", from_index=2**40), READERS),),
    "WatchRuns": (Row(C.WatchRunsRequest(), READERS),),
    "GetHistory": (_of_run(C.GetHistoryRequest, READERS),),
    "DownloadState": (_of_run(C.DownloadStateRequest, READERS),),
    "DownloadProfile": (_of_run(C.DownloadProfileRequest, READERS),),
    "TailLogs": (_of_run(C.TailLogsRequest, READERS),),
    "ListWorkers": (Row(C.ListWorkersRequest(), READERS),),
    "Diagnose": (
        Row(C.DiagnoseRequest(without_workers=True), READERS | set(WORKERS)),
        Row(C.DiagnoseRequest(), READERS),
    ),
    "RegisterWorker": (_itself(C.RegisterWorkerRequest),),
    "Heartbeat": (_itself(C.HeartbeatRequest),),
    "HeartbeatStream": (_itself(C.HeartbeatStreamRequest),),
    "Relay": (_itself(C.RelayRequest),),
    "Leave": (_itself(C.LeaveRequest),),
    "Rendezvous": (
        Row(
            C.RendezvousRequest(fence=FENCE, session=PARTY, rank=1, endpoint=bytes(2**17)),
            frozenset({"worker-w1"}),
        ),
    ),
    "Suspect": (
        Row(
            C.SuspectRequest(fence=FENCE, session=types_pb2.SessionRef(run_id="r", party="silo1")),
            frozenset({"worker-w3"}),
        ),
        Row(C.SuspectRequest(fence=FENCE, session=PARTY), MEMBERS),
    ),
    "Execute": (Row(W.ExecuteRequest(fence=FENCE, session=PARTY), COORDINATOR),),
    "WriteLeaves": (
        Row(W.WriteLeavesRequest(header=W.WriteLeavesHeader(fence=FENCE)), COORDINATOR),
    ),
    "FetchState": (Row(W.FetchStateRequest(header=W.FetchStateHeader()), COORDINATOR),),
    "SetState": (Row(W.SetStateRequest(header=W.SetStateHeader()), COORDINATOR),),
    "GetGradients": (Row(W.GetGradientsRequest(fence=FENCE), COORDINATOR),),
    "ApplyGradients": (Row(W.ApplyGradientsRequest(header=W.ApplyGradientsHeader()), COORDINATOR),),
    "Abort": (Row(W.AbortRequest(fence=FENCE), COORDINATOR),),
    "CloseSession": (Row(W.CloseSessionRequest(fence=FENCE), COORDINATOR),),
    "SecureRound": (Row(W.SecureRoundRequest(fence=FENCE, run_id="r"), COORDINATOR),),
    "Describe": (Row(W.DescribeRequest(), COORDINATOR),),
    "GetState": (
        Row(W.GetStateRequest(fence=FENCE, session=PARTY, live=True), COORDINATOR | MEMBERS),
        Row(W.GetStateRequest(fence=FENCE, session=PARTY, snapshot=1), COORDINATOR),
        Row(
            W.GetStateRequest(
                fence=FENCE, session=PARTY, snapshot=1, pieces=W.SnapshotPieces(name="n")
            ),
            COORDINATOR | MEMBERS,
        ),
        Row(
            W.GetStateRequest(
                fence=FENCE, session=PARTY, outputs=1, pieces=W.SnapshotPieces(name="n")
            ),
            COORDINATOR,
        ),
        Row(
            W.GetStateRequest(
                fence=FENCE, session=types_pb2.SessionRef(run_id="r", party="client3"), live=True
            ),
            COORDINATOR,
        ),
    ),
    "Send": (
        Row(
            P.SendRequest(header=P.PeerHeader(fence=FENCE, run_id="r", source=1, destination=0)),
            frozenset({"worker-w1"}),
        ),
    ),
}


def methods() -> Iterator[MethodDescriptor]:
    for service in SERVICES:
        yield from service.methods


def test_every_call_has_a_row_here() -> None:
    assert {method.name for method in methods()} == set(ROWS)
    ours = {f"/{each.containing_service.full_name}/{each.name}" for each in methods()}
    assert ours == {path for path in TABLE if path.startswith("/stratagem.")}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = make_authority(tmp_path_factory.mktemp("authority") / "certs")
    made.issue(Role.COORDINATOR, "coordinator", ["localhost", "127.0.0.1", "::1"])
    for name in WORKERS:
        made.issue(Role.WORKER, name.removeprefix("worker-"))
    made.issue(Role.CLIENT, "alice")
    return made


@asynccontextmanager
async def worker_of_members(authority: Authority) -> AsyncIterator[str]:
    """The port of w0, which trains the party of r together with w1."""
    peers = tuple(Peer(name, "127.0.0.1:1", range(1)) for name in ("w0", "w1"))
    control = SimpleNamespace(view=MemberView(term=1, membership=1, rank=0, members=peers))
    execution = SimpleNamespace(work=SimpleNamespace(control=control))
    host: Any = SimpleNamespace(worker_id="w0", incarnation="w0", blobs=None)
    sessions = Sessions(host)
    held: Any = SimpleNamespace(executions={"train": execution}, states=StateStore())
    sessions._sessions[key_from(PARTY)] = held
    sessions.describe = lambda: iter(())  # type: ignore[method-assign]
    sessions.fences.see_term(1)
    hub = PeerHub("127.0.0.1:1")
    hub.join(Group("r", "", 1, 1, 0, 2, ("w0", "w1")))
    server = make_server(gate=Authorizer("stratagem"))
    limits = WorkerLimits(idle_timeout_s=5.0, wait_s=0.01)
    servicer = WorkerServicer(host, sessions, types_pb2.Capability(), limits)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    peer_pb2_grpc.add_PeerServiceServicer_to_server(PeerServicer(hub), server)
    port = bind_tls(server, "127.0.0.1", 0, authority.files("worker-w0"))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await hub.stop()
        await server.stop(0)


async def form_parties(
    deployment: Deployment, open_: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """w0 and w1 train r, which belongs to `owner`, w3 a silo of it; w2 trains another run."""
    owner = await deployment.stub("owner")
    for name in ("w2", "w0", "w1"):
        at = await open_.enter_async_context(worker(deployment.authority, name))
        capability = types_pb2.Capability(device="cpu", num_threads=1, numerics_rules=CURRENT)
        stub = await deployment.stub(f"worker-{name}")
        await stub.RegisterWorker(
            C.RegisterWorkerRequest(
                worker_id=name, incarnation=name, address=at, capability=capability
            )
        )
        if name == "w2":
            await submit(owner, "s", {**DATA_PARALLEL, "num_replicas": 1})
    await submit(owner, "r", {**DATA_PARALLEL, "num_replicas": 2})
    state = deployment.app.loop.state
    found = {run_id: parties_of(run) for run_id, run in state.runs.items()}
    assert [each.worker_id for each in found[RunId("r")][ROOT].members] == ["w0", "w1"]
    assert [each.worker_id for each in found[RunId("s")][ROOT].members] == ["w2"]
    silo = SimpleNamespace(membership=1, members=[SimpleNamespace(worker_id="w3")])

    def with_a_silo(run: Any) -> Any:
        return {**parties_of(run), Party("silo1"): silo}

    monkeypatch.setattr(resource_ownership, "parties_of", with_a_silo)


async def submit(stub: Any, run_id: str, strategy: dict[str, Any]) -> None:
    await stub.SubmitRun(C.SubmitRunRequest(run_id=run_id, job_json=job_text(strategy)))
    events = stub.WatchRun(C.WatchRunRequest(run_id=run_id))
    async for message in events:
        if message.event.kind == "MembersFormed":
            events.cancel()
            return


LOST_REASON = "Internal error from Core"
"""What gRPC says of a write that met the end of its call, instead of the peer's reason."""


async def answer(channel: grpc.aio.Channel, method: MethodDescriptor, request: Any) -> Any:
    """The code of a call with one request, and the sentence; OK at its first answer."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kinds: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    serialize = request.SerializeToString
    make = kinds[method.client_streaming, method.server_streaming](
        path, request_serializer=lambda _: serialize()
    )
    while True:
        call = make(iter([request])) if method.client_streaming else make(request)
        try:
            if method.server_streaming:
                await call.read()
                call.cancel()
            else:
                await call
        except grpc.aio.AioRpcError as error:
            if error.details() == LOST_REASON:
                continue
            return error.code(), error.details()
        return Code.OK, ""


async def test_every_caller_is_heard_about_what_is_its_own(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[str] = []
    async with (
        deployed(authority, tmp_path) as deployment,
        worker_of_members(authority) as at_w0,
        AsyncExitStack() as open_,
    ):
        open_.enter_context(capture_logs())  # to draw a traceback takes as long as ten calls
        await form_parties(deployment, open_, monkeypatch)
        for caller in CALLERS:
            opened: dict[str, grpc.aio.Channel] = {}
            for method in methods():
                at, to_worker = deployment.address(caller), None
                if method.containing_service is not SERVICES[0]:
                    if caller in PEOPLE and caller != "client-alice":
                        continue  # a worker asks everybody for a certificate
                    at, to_worker = at_w0, "w0"
                if at not in opened:
                    made = open_channel(at, deployment.proof(caller), to_worker=to_worker)
                    opened[at] = await open_.enter_async_context(made)
                for number, row in enumerate(ROWS[method.name]):
                    code, said = await answer(opened[at], method, row.request)
                    if (code not in OUT) is not (caller in row.heard):
                        wrong.append(f"{caller} {method.name}[{number}]: {code} {said}")
    assert not wrong, "\n".join(wrong)
