"""A server that says who calls, behind TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from stratagem.client.local.cluster import LocalCluster
from stratagem.common.identity import certificates as authorities
from stratagem.common.identity.callers import Authorizer, TokenBook, current_caller
from stratagem.common.identity.certificates import Authority, make_authority
from stratagem.common.identity.tls import Role, TlsFiles
from stratagem.common.rpc.channel import Proof, open_channel
from stratagem.common.rpc.server import bind_tls, make_server
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import coordinator_pb2_grpc, worker_pb2, worker_pb2_grpc
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.jobs import ALLOW
from tests.patience import PATIENCE_S
from tests.repository import ROOT


class Listing(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers every listing with who asks."""

    async def ListRuns(self, request: Any, context: Any) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(
            runs=[pb.RunInfo(name=current_caller().name, phase=pb.RUN_PHASE_RUNNING)]
        )

    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        yield pb.WatchRunResponse(event=pb.RunEvent(sentence=current_caller().name))

    async def UploadData(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[pb.UploadDataResponse]:
        """Answers each message until its caller ends the stream."""
        async for _ in request_iterator:
            yield pb.UploadDataResponse()

    async def Heartbeat(self, request: Any, context: Any) -> pb.HeartbeatResponse:
        current_caller().must_be_worker(request.worker_id)
        return pb.HeartbeatResponse()


class Described(worker_pb2_grpc.WorkerServiceServicer):
    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(incarnation=current_caller().name)


@dataclass(frozen=True, slots=True)
class Ports:
    certificates: str
    """host:port where callers are asked for a certificate."""
    tokens: str


@asynccontextmanager
async def serving(
    files: TlsFiles, tokens_file: Path | None = None, port: int = 0
) -> AsyncIterator[Ports]:
    book = None if tokens_file is None else TokenBook(tokens_file)
    server = make_server(gate=Authorizer(files.identity().trust_domain, book))
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(Listing(), server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Described(), server)
    strict = bind_tls(server, "127.0.0.1", port, files)
    lenient = bind_tls(server, "127.0.0.1", 0, files, asks_for_certificate=False)
    await server.start()
    try:
        yield Ports(f"127.0.0.1:{strict}", f"127.0.0.1:{lenient}")
    finally:
        await server.stop(None)


async def who_am_i(address: str, proof: Proof) -> str:
    """The caller's name as the server sees it, by a unary call and a stream."""
    async with open_channel(address, proof) as channel:
        return await asked(channel)


async def asked(channel: grpc.aio.Channel) -> str:
    stub = CoordinatorServiceStub(channel)
    unary = (await stub.ListRuns(pb.ListRunsRequest(), timeout=PATIENCE_S)).runs[0].name
    async for message in stub.WatchRun(pb.WatchRunRequest(), timeout=PATIENCE_S):
        assert message.event.sentence == unary
    return str(unary)


async def refused(address: str, proof: Proof) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await who_am_i(address, proof)
    return caught.value.code(), caught.value.details() or ""


WORKERS = ("worker-0", "worker-1")


def authority_of_cluster(folder: Path, workers: Sequence[str] = WORKERS) -> Authority:
    """An authority that has signed for a coordinator, these workers and a client."""
    made = make_authority(folder)
    made.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"])
    for name in workers:
        made.issue(Role.WORKER, name)
    made.issue(Role.CLIENT, "alice")
    return made


def cluster_of(
    authority: Authority, data_dir: Path, workers: Sequence[str] = WORKERS
) -> LocalCluster:
    """A cluster of these workers, in which all have certificates of `authority_of_cluster`."""
    coordinator = authority.files("coordinator")
    return LocalCluster(
        workers=len(workers),
        threads=1,
        data_dir=data_dir,
        import_path=[ROOT],
        allow=[ALLOW],
        environment={
            "STRATAGEM_COORDINATOR_TLS_CA": str(coordinator.ca),
            "STRATAGEM_COORDINATOR_TLS_CERT": str(coordinator.cert),
            "STRATAGEM_COORDINATOR_TLS_KEY": str(coordinator.key),
        },
        worker_arguments={name: flags(authority.files(f"worker-{name}")) for name in workers},
    )


def flags(files: TlsFiles) -> list[str]:
    return ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]


def expire(authority: Authority, ago: timedelta = timedelta(hours=1)) -> None:
    """Let the authority itself be over, and nothing that it has signed."""
    old, key = authorities.signer(authority.folder)
    ended = authorities.certificate_of(key, old.subject, -ago)
    path = authority.folder / authorities.CA_FILE
    authorities.write(path, ended.public_bytes(Encoding.PEM), 0o644, replace=True)
