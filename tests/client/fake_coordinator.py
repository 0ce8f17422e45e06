"""A coordinator that plays scripted runs over real gRPC, and cuts connections where it is told."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import grpc
import numpy as np

from stratagem.client.course.views import Event
from stratagem.client.sdk.blocking import LoopThread
from stratagem.common.base.errors import (
    AlreadyExistsError,
    NotFoundError,
    UnavailableError,
    WrongStateError,
)
from stratagem.common.job import JobSpec
from stratagem.common.rpc.server import bind, make_server
from stratagem.common.rpc.streams import BEGUN
from stratagem.common.rpc.tensor_transfer import receive_header, receive_upload, serve_get
from stratagem.common.strategy import describe
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest, from_proto
from stratagem.common.tensors.stream import ChunkWriter
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2
from stratagem.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)

JOB: dict[str, Any] = {
    "name": "digits",
    "model": {"entrypoint": "examples.digits:build_model"},
    "data": {"entrypoint": "examples.digits:load"},
    "loss": "cross_entropy",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "epochs": 1,
    "batch_size": 64,
}
FINAL = (pb.RUN_PHASE_COMPLETED, pb.RUN_PHASE_FAILED, pb.RUN_PHASE_CANCELLED)


@cache
def make_state(num_floats: int = 1_000_000) -> tuple[Manifest, list[memoryview]]:
    """A state of about 4 MB: two tensors of a model and one of its optimizer."""
    weight = np.arange(num_floats, dtype=np.float32)
    arrays = {
        "model/weight": weight,
        "model/bias": np.array([1.5, -2.0], dtype=np.float32),
        "optimizer/weight/momentum": weight * 2,
    }
    manifest = build_manifest(
        ((name, "float32", array.shape) for name, array in arrays.items()),
        Purpose.STATE,
        metadata={"step": "20"},
    )
    buffers = [array.view(np.uint8).data for array in arrays.values()]
    return replace(manifest, digest=blob_digest(manifest, buffers)), buffers


@dataclass
class FakeRun:
    """What the fake tells about one run."""

    run_id: str
    job: JobSpec
    phase: pb.RunPhase.ValueType = pb.RUN_PHASE_PENDING
    reason: str = ""
    events: list[pb.RunEvent] = field(default_factory=list)
    error: types_pb2.UserError | None = None
    cuts: set[int] = field(default_factory=set)
    """A watch is cut, once, after each of these event indices."""
    folder: str = ""
    """Where its states are."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def say(
        self, kind: str, sentence: str, phase: pb.RunPhase.ValueType, **payload: object
    ) -> None:
        self.phase, self.reason = phase, sentence
        self.events.append(
            pb.RunEvent(
                index=len(self.events),
                time_s=100.0 + len(self.events),
                kind=kind,
                sentence=sentence,
                payload_json=json.dumps(payload),
                phase=phase,
            )
        )
        self.changed.set()

    def info(self) -> pb.RunInfo:
        return pb.RunInfo(
            run_id=self.run_id,
            name=self.job.name,
            phase=self.phase,
            reason=self.reason,
            strategy=describe(self.job.strategy),
            step=20,
            num_steps=20,
            submitted_at_s=100.0,
            ended_at_s=103.5 if self.phase in FINAL else 0.0,
            commits=[
                pb.CommitInfo(
                    segment=1, step=10, digest="b" * 64, is_best=True, path=f"{self.folder}/b"
                ),
                pb.CommitInfo(
                    segment=2, step=20, digest="f" * 64, is_final=True, path=f"{self.folder}/f"
                ),
            ],
            metrics={"test.accuracy": 0.97, "train.loss": 0.1},
            worker_ids=["worker-0"],
            error=self.error,
            job_json=self.job.canonical_json(),
            event_index=max(0, len(self.events) - 1),
            engine="solo",
            reproducible=True,
        )


class FakeCoordinator(CoordinatorServiceServicer):
    """Completes every run at once unless `ending` says otherwise."""

    def __init__(self) -> None:
        self.runs: dict[str, FakeRun] = {}
        self.ending = "completed"
        self.folder = ""
        self.cuts: set[int] = set()
        self.says_why = True
        """When it cuts; a process that ends by a defect does not."""
        self.says_begin = True
        """That it follows a run; one of 0.2.0 does not."""
        self.early_ends: set[int] = set()
        """After these events a stream ends as if there were no more of them."""
        self.watched_from: list[int] = []
        self.unwatched = threading.Event()
        """Set when somebody watches a run no longer."""
        self.downloaded_from: list[int] = []
        self.pins: list[tuple[str, bool]] = []
        self.quarantine = ""
        """Of worker-0."""
        self.download_cuts: list[int] = []
        self.log_cuts: list[int] = []
        self.state = make_state()
        self.uploads: dict[str, bytes] = {}
        self.upload_cut = False
        self.partial = bytearray()
        self.refusals = 0

    def _run(self, run_id: str) -> FakeRun:
        if self.refusals:
            self.refusals -= 1
            raise UnavailableError("shutting down")
        if run_id not in self.runs:
            raise NotFoundError(f"no run {run_id!r}")
        return self.runs[run_id]

    async def SubmitRun(self, request: pb.SubmitRunRequest, context: Any) -> pb.SubmitRunResponse:
        job = JobSpec.from_json(request.job_json)
        known = self.runs.get(request.run_id)
        if known is not None and known.job != job:
            raise AlreadyExistsError(f"run {request.run_id} has another job")
        if known is None:
            self.runs[request.run_id] = self._play(FakeRun(request.run_id, job))
        return pb.SubmitRunResponse(run_id=request.run_id, created=known is None)

    def _play(self, run: FakeRun) -> FakeRun:
        run.cuts, run.folder = set(self.cuts), self.folder
        run.say("RunSubmitted", "submitted", pb.RUN_PHASE_PENDING)
        run.say("ModelBuilt", "model built", pb.RUN_PHASE_RUNNING, num_rows={"train": 1437})
        trained = {"segment": 1, "step": 10, "metrics": {"test.accuracy": 0.97}}
        run.say("SegmentCommitted", "segment 1 committed", pb.RUN_PHASE_RUNNING, **trained)
        match self.ending:
            case "completed":
                run.say("RunCompleted", "1 epoch done", pb.RUN_PHASE_COMPLETED)
            case "failed":
                run.say("RunFailed", "worker-0 died three times", pb.RUN_PHASE_FAILED)
            case "user error":
                run.error = types_pb2.UserError(
                    type="ValueError",
                    message="bad hidden",
                    traceback='Traceback (most recent call last):\n  File "m.py", line 3, in f\n'
                    "ValueError: bad hidden\n",
                    worker_id="worker-1",
                    activity="build model",
                )
                run.say("RunFailed", "ValueError: bad hidden", pb.RUN_PHASE_FAILED)
        return run

    def tell(self, run_id: str, job: JobSpec, events: Iterable[Event]) -> None:
        """Make a run that goes on, in which these events have happened."""
        run = self.runs[run_id] = FakeRun(run_id, job)
        for event in events:
            run.say(event.kind, event.sentence, pb.RUN_PHASE_RUNNING, **event.payload)

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=self._run(request.run_id).info())

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=[run.info() for run in reversed(self.runs.values())])

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: Any
    ) -> AsyncIterator[pb.WatchRunResponse]:
        run, index = self._run(request.run_id), request.from_index
        self.watched_from.append(index)
        if self.says_begin:
            await context.send_initial_metadata(BEGUN)
        try:
            async for message in self._watched(run, request, index, context):
                yield message
        finally:
            self.unwatched.set()

    async def _watched(
        self, run: FakeRun, request: pb.WatchRunRequest, index: int, context: Any
    ) -> AsyncIterator[pb.WatchRunResponse]:
        while True:
            run.changed.clear()
            for event in run.events[index:]:
                index = event.index + 1
                if request.kinds and event.kind not in request.kinds:
                    continue
                yield pb.WatchRunResponse(event=event)
                progress = pb.RunProgress(
                    step=index,
                    num_steps=20,
                    loss=0.5,
                    rows_per_s=1000,
                    metrics={"train.neighbour_distance": 0.25},
                )
                yield pb.WatchRunResponse(progress=progress)
                if event.index in self.early_ends:
                    self.early_ends.remove(event.index)
                    return
                if event.index in run.cuts:
                    run.cuts.remove(event.index)
                    await self._cut(context)
            is_followed = request.follow or not request.HasField("follow")
            if run.phase in FINAL or not is_followed:
                return
            await run.changed.wait()

    async def _cut(self, context: Any) -> None:
        if self.says_why:
            raise UnavailableError("restarting")
        await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")  # as gRPC says it for us

    async def GetHistory(
        self, request: pb.GetHistoryRequest, context: Any
    ) -> AsyncIterator[pb.GetHistoryResponse]:
        """Nothing was recorded."""
        self._run(request.run_id)
        for _ in ():
            yield pb.GetHistoryResponse()

    async def CancelRun(self, request: pb.CancelRunRequest, context: Any) -> pb.CancelRunResponse:
        run = self._run(request.run_id)
        if run.phase not in FINAL:
            run.say("RunCancelled", "cancelled by a client", pb.RUN_PHASE_CANCELLED)
        return pb.CancelRunResponse()

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Any) -> pb.ResumeRunResponse:
        run = self._run(request.run_id)
        run.say("RunResumed", "resumed", pb.RUN_PHASE_PENDING)
        run.say("RunCompleted", "1 epoch done", pb.RUN_PHASE_COMPLETED)
        return pb.ResumeRunResponse()

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Any) -> pb.DeleteRunResponse:
        del self.runs[self._run(request.run_id).run_id]
        return pb.DeleteRunResponse()

    async def PinRun(self, request: pb.PinRunRequest, context: Any) -> pb.PinRunResponse:
        self._run(request.run_id)
        self.pins.append((request.run_id, request.pinned))
        return pb.PinRunResponse()

    async def DownloadState(
        self, request: pb.DownloadStateRequest, context: Any
    ) -> AsyncIterator[pb.DownloadStateResponse]:
        self._run(request.run_id)
        if request.which not in ("final", "best", "2"):
            raise NotFoundError(f"no state {request.which!r}")
        self.downloaded_from.append(request.offset)
        manifest, buffers = self.state
        async for part in serve_get(pb.DownloadStateResponse, manifest, buffers, request.offset):
            yield part
            # Parts with a chunk come as the bytes of their message.
            message = pb.DownloadStateResponse.FromString(part) if isinstance(part, bytes) else part
            if message.HasField("chunk") and message.chunk.offset in self.download_cuts:
                self.download_cuts.remove(message.chunk.offset)
                raise UnavailableError("restarting")

    async def UploadData(
        self, requests: AsyncIterator[pb.UploadDataRequest], context: Any
    ) -> AsyncIterator[pb.UploadDataResponse]:
        header = (await receive_header(requests)).header
        manifest = from_proto(header.manifest)

        def sink(_offset: int, data: bytes) -> None:
            self.partial += data
            if self.upload_cut:
                self.upload_cut = False
                raise UnavailableError("restarting")

        async def commit() -> None:
            self.uploads[header.digest] = bytes(self.partial)
            self.partial.clear()

        writer = ChunkWriter(manifest.total_bytes, sink, len(self.partial))
        async for answer in receive_upload(requests, pb.UploadDataResponse, writer, commit):
            yield answer

    async def TailLogs(
        self, request: pb.TailLogsRequest, context: Any
    ) -> AsyncIterator[pb.TailLogsResponse]:
        self._run(request.run_id)
        lines = [
            pb.TailLogsResponse(time_s=1.0, level="info", text="submitted"),
            pb.TailLogsResponse(time_s=2.0, worker_id="worker-0", level="info", text="hello"),
            pb.TailLogsResponse(time_s=2.0, worker_id="worker-0", level="info", text="hello"),
            pb.TailLogsResponse(time_s=1.5, worker_id="worker-1", level="info", text="late"),
        ]
        for index, line in enumerate(lines):
            if request.worker_id in ("", line.worker_id):
                yield line
            if index in self.log_cuts:
                self.log_cuts.remove(index)
                raise UnavailableError("restarting")

    async def ReleaseWorker(
        self, request: pb.ReleaseWorkerRequest, context: Any
    ) -> pb.ReleaseWorkerResponse:
        if request.worker_id != "worker-0" or not self.quarantine:
            raise WrongStateError(f"worker {request.worker_id!r} is not quarantined")
        self.quarantine = ""
        return pb.ReleaseWorkerResponse()

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Any
    ) -> pb.ListWorkersResponse:
        capability = types_pb2.Capability(
            device="cpu", device_name="a processor", num_threads=2, tags=["site-a"]
        )
        alive = pb.WorkerInfo(
            worker_id="worker-0",
            address="127.0.0.1:5001",
            is_alive=True,
            capability=capability,
            run_ids=["digits-1"],
            quarantine=self.quarantine,
        )
        lost = pb.WorkerInfo(worker_id="worker-1", silent_s=40, reason="no heartbeat for 10 s")
        refused = pb.RefusedWorker(
            worker_id="worker-2",
            address="[h]:1",
            reason="nobody answers at [h]:1 as worker 'worker-2'",
            num_times=3,
        )
        return pb.ListWorkersResponse(workers=[alive, lost], refused=[refused])


async def serve(fake: FakeCoordinator, port: int = 0) -> tuple[Any, str]:
    """The started server and its address."""
    server = make_server()
    add_CoordinatorServiceServicer_to_server(fake, server)
    bound = bind(server, "127.0.0.1", port)
    await server.start()
    return server, f"127.0.0.1:{bound}"


@contextmanager
def served(fake: FakeCoordinator) -> Iterator[str]:
    """Serve from a thread, for blocking clients."""
    loop = LoopThread()
    server, address = loop.call(serve(fake))
    try:
        yield address
    finally:
        loop.call(server.stop(None))
        loop.close()
