"""A worker under somebody else's control, and a coordinator that has to do with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from stratagem.common.numerics.rules import CURRENT
from stratagem.common.rpc.server import bind, make_server
from stratagem.v1 import coordinator_pb2 as cpb
from stratagem.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.service.serving import coordinator

Script = Callable[[worker_pb2.ExecuteRequest], Iterable[worker_pb2.ExecuteResponse]]

ENDED = ("RunCompleted", "RunFailed", "RunCancelled")


class Liar(worker_pb2_grpc.WorkerServiceServicer):
    """Says to every plan what the script says."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.brought: list[str] = []

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(incarnation="liar")

    async def Execute(self, request: Any, context: Any) -> AsyncIterator[Any]:
        accepted = worker_pb2.Accepted(worker_id="liar", incarnation="liar")
        yield worker_pb2.ExecuteResponse(accepted=accepted)
        for response in self._script(request):
            yield response

    async def SetState(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        header = (await anext(aiter(requests))).header
        self.brought.append(header.digest)
        yield worker_pb2.SetStateResponse(resume_offset=header.manifest.total_bytes)
        yield worker_pb2.SetStateResponse(committed=True)

    async def CloseSession(self, request: Any, context: Any) -> worker_pb2.CloseSessionResponse:
        return worker_pb2.CloseSessionResponse()


def says(**message: Any) -> worker_pb2.ExecuteResponse:
    """One message of an Execute stream."""
    return worker_pb2.ExecuteResponse(**message)


def raises(text: str = "enough") -> worker_pb2.ExecuteResponse:
    """The end of a plan by an exception of user code."""
    error = types_pb2.UserError(type="ValueError", message=text, traceback="...", activity="lying")
    return says(result=worker_pb2.ExecuteResult(error=error))


@asynccontextmanager
async def lied_to(folder: Path, script: Script, **settings: Any) -> AsyncIterator[tuple[Any, Liar]]:
    """The stub of a coordinator whose only worker follows the script, and that worker."""
    liar, server = Liar(script), make_server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(liar, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with coordinator(folder, **settings) as stub:
            capability = types_pb2.Capability(device="cpu", num_threads=1, numerics_rules=CURRENT)
            await stub.RegisterWorker(
                cpb.RegisterWorkerRequest(
                    worker_id="liar",
                    incarnation="liar",
                    address=f"127.0.0.1:{port}",
                    capability=capability,
                )
            )
            yield stub, liar
    finally:
        await server.stop(0)


async def run_to_its_end(stub: Any, run_id: str = "r", **changes: Any) -> list[cpb.RunEvent]:
    """Submit a job for one worker, and all that happens to it."""
    await stub.SubmitRun(cpb.SubmitRunRequest(run_id=run_id, job_json=job_text(LOCAL, **changes)))
    events = []
    async for message in stub.WatchRun(cpb.WatchRunRequest(run_id=run_id)):
        if message.WhichOneof("message") == "event":
            events.append(message.event)
            if message.event.kind in ENDED:
                break
    return events
