"""The asynchronous client: submit a job, follow the run, fetch its states.

    async with AsyncClient("host:7070") as client:
        run = await client.submit("job.yaml")
        async for item in run.watch(): ...
        await run.result()

Reconnecting is in connection.py, the tensor streams in downloads.py and uploads.py; nothing here
imports torch. Client in blocking.py offers the same methods to scripts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import grpc

from stratagem.client.course import views
from stratagem.client.course.views import RefusedWorker, RunsChange, RunStatus, Worker
from stratagem.client.sdk.connection import Connection
from stratagem.client.sdk.run import AsyncRun
from stratagem.common.base.errors import (
    InvalidInputError,
    UnavailableError,
    WrongStateError,
)
from stratagem.common.base.ids import RunId, check_run_id, new_run_id
from stratagem.common.identity.tls import TlsFiles
from stratagem.common.observe import tracing
from stratagem.common.rpc.channel import Proof
from stratagem.common.schema.json import JSON
from stratagem.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from stratagem.client.report.comparison import Comparison
    from stratagem.client.sdk.downloads import BackupDone
    from stratagem.client.sdk.torch_process import Job
    from stratagem.client.sdk.uploads import InlineData
    from stratagem.client.sdk.verification import OnClaim, Verification

# What a method alone needs is imported there, as in run.py.

DEFAULT_ADDRESS: Final = "127.0.0.1:7070"
ADDRESS_VARIABLE: Final = "STRATAGEM_COORDINATOR"
"""The environment variable that names the default coordinator, here and on the command line."""
WORKERS_AT_ONCE: Final = 500
"""The page size of the call that lists workers."""
PATIENCE_S: Final = 60.0


class AsyncClient:
    """A client of one coordinator; use as an async context manager."""

    def __init__(
        self,
        address: str | None = None,
        *,
        patience_s: float = PATIENCE_S,
        tls: TlsFiles | None = None,
        token_file: str | PathLike[str] | None = None,
    ) -> None:
        """Make a client; entering its context connects it.

        address: HOST:PORT, or several of which one leads, separated by commas; by default
        STRATAGEM_COORDINATOR, else 127.0.0.1:7070.

        patience_s: how long a call waits for a coordinator that was reachable before.

        tls: certificates that authenticate the coordinator and this client; without them the
        connection is plaintext. token_file: a token of `stratagem token create`, for a
        coordinator's --token-listen. Both are read again when the files change. Raises
        InvalidInputError if a file cannot be used.
        """
        if address is None:
            address = os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
        self.address = address
        self._proof = Proof(tls, token_file)
        self._patience_s = patience_s
        self._open_connection: Connection | None = None
        tracing.adopt()

    async def __aenter__(self) -> Self:
        self._open_connection = Connection(self.address, self._patience_s, self._proof)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; closing it again does nothing."""
        connection, self._open_connection = self._open_connection, None
        if connection is not None:
            await connection.close()

    @property
    def _connection(self) -> Connection:
        if self._open_connection is None:
            raise UnavailableError("this client is closed; use it inside its `with` block")
        return self._open_connection

    async def submit(
        self,
        job: Job,
        run_id: str | None = None,
        *,
        data: InlineData | None = None,
        import_path: Sequence[Path] = (),
    ) -> AsyncRun:
        """Start a run. Calling this again with the same run_id and the same job starts nothing.

        data: arrays or tensors per split, {"train": (x, y), "test": (x, y)}; they are uploaded
        and replace the job's `data`. A run or file in the job's `initial` is replaced by the
        digest of its state. With execution.parallelism the strategy is chosen here, for the
        workers that are registered now; the run's `note` explains the choice, and how the schedule
        changes if a training is resumed with another length.
        import_path: folders with the user's modules, in case the model must be built to choose the
        strategy; by default the current folder and that of the job file.
        """
        from stratagem.client.sdk import torch_process, uploads
        from stratagem.client.sdk.resume import resolve_initial

        connection = self._connection
        packed = None if data is None else uploads.pack(data)
        spec = torch_process.parse_job(job, None if packed is None else packed.digest)
        chosen = new_run_id(spec.name) if run_id is None else check_run_id(run_id)
        if packed is not None:
            await uploads.upload(connection, packed)
        spec, note = await resolve_initial(connection, spec)
        spec = await uploads.resolve_code(connection, spec)
        if spec.execution.parallelism != "None":
            # The journal holds the chosen strategy, so that replays need not choose again.
            folders = import_path or torch_process.import_folders(job)
            spec, reason = await asyncio.to_thread(
                torch_process.resolve_parallelism, spec, await self.workers(), folders
            )
            note = "; ".join(filter(None, (f"strategy: {reason}", note)))
        request = pb.SubmitRunRequest(run_id=chosen, job_json=spec.canonical_json(), note=note)
        with tracing.span("submit", run_id=chosen):
            response = await connection.call(connection.stub.SubmitRun, request)
        return AsyncRun(connection, RunId(response.run_id), note, created=response.created)

    async def resume_as(
        self,
        run_id: str,
        overrides: Iterable[str],
        *,
        from_segment: int | None = None,
        new_run_id: str | None = None,
    ) -> AsyncRun:
        """Start a new run that continues from a commit of another run, with other settings.

        It begins with the optimizer, the schedule and the step of that commit. overrides: such as
        "epochs=20"; InvalidInputError names those that cannot change. from_segment: the segment of
        the commit; by default the newest one, for which the other run must have ended.
        """
        from stratagem.common.job import JobSpec, with_fields
        from stratagem.common.job.files import read_overrides

        status = await (await self.get(run_id)).status()
        which = "final" if from_segment is None else str(from_segment)
        stored = ", ".join(str(commit.segment) for commit in status.commits)
        if not stored:
            raise WrongStateError(
                f"run {run_id} has committed nothing yet, so no other run can continue from it"
            )
        if from_segment is None and not status.phase.is_final:
            raise WrongStateError(
                f"run {run_id} is still training ({status.phase}, step {status.step}): stop it "
                f"first (`stratagem stop {run_id}`, run.cancel()), or name the commit from which "
                f"the new run continues (--from, from_segment=): {stored}"
            )
        if status.commit(which) is None:
            text = f"segment {from_segment} is no kept commit of run {run_id!r}; kept are {stored}"
            raise InvalidInputError(text)
        initial: dict[str, JSON] = {"run": run_id, "which": which, "resume": True}
        values = {"initial": initial, **read_overrides(overrides)}
        job = with_fields(JobSpec.parse(dict(status.job)), values)
        return await self.submit(job, new_run_id)

    async def get(self, run_id: str) -> AsyncRun:
        """Return a handle on an existing run. Raises NotFoundError if no run has this id."""
        run = self.handle(run_id)
        await run.status()
        return run

    def handle(self, run_id: str) -> AsyncRun:
        """Return a handle on the run with this id, without asking whether it exists."""
        return AsyncRun(self._connection, check_run_id(run_id))

    async def runs(self) -> tuple[RunStatus, ...]:
        """Return all runs, newest first."""
        from stratagem.client.report.notebook import ListedRuns

        connection = self._connection
        statuses: list[RunStatus] = []
        request = pb.ListRunsRequest()
        while True:
            response = await connection.call(connection.stub.ListRuns, request)
            statuses += [views.run_status(run) for run in response.runs]
            if not response.next_page_token:
                return ListedRuns(statuses)
            request.page_token = response.next_page_token

    async def compare(self, runs: Sequence[str | RunStatus | AsyncRun]) -> Comparison:
        """Compare 2 to 8 runs: their newest metrics, the fields in which their jobs differ, and
        curves with a line for each run. runs: their ids, handles or statuses."""
        from stratagem.client.report.comparison import Comparison, check_compared

        run_ids = [run if isinstance(run, str) else run.run_id for run in runs]
        check_compared(run_ids)
        return Comparison.of([await (await self.get(run_id)).shown() for run_id in run_ids])

    async def verify(
        self,
        run_id: str,
        *,
        segments: Collection[int] | None = None,
        sample: float | None = None,
        on_claim: OnClaim = lambda _run, _again: None,
    ) -> Verification:
        """Compute the states and updates of an ended run again, and compare their digests.

        segments: only these; sample: only this share of them, the same each time. on_claim: called
        with each claim of the run and what was computed for it. Where a digest differs, a third
        execution decides who is wrong; see Verification.conclusion.
        """
        from stratagem.client.sdk.verification import RunCalls, verify

        runs = RunCalls(self.get, self.submit)
        return await verify(runs, run_id, segments=segments, sample=sample, on_claim=on_claim)

    async def watch_runs(self) -> AsyncIterator[RunsChange]:
        """Yield all runs in brief, newest first, then those that change, at most twice a second.

        Continues until the caller stops; after an interruption it begins again with all runs.
        """
        connection, begins = self._connection, True

        def open_stream() -> grpc.aio.UnaryStreamCall[pb.WatchRunsRequest, pb.WatchRunsResponse]:
            nonlocal begins
            begins = True
            return connection.stub.WatchRuns(pb.WatchRunsRequest())

        async for message in connection.follow(open_stream):
            is_first, begins = begins, False
            yield views.runs_change(message, is_first=is_first)

    async def back_up(self, folder: Path) -> BackupDone:
        """Copy the journal and all current states into a folder; if it holds an earlier backup,
        copy only what is new. Requires the scope admin."""
        from stratagem.client.sdk.downloads import back_up

        return await back_up(self._connection, folder)

    async def workers(self) -> tuple[Worker, ...]:
        """Return all registered workers, alive or not."""
        from stratagem.client.report.notebook import ListedWorkers

        connection = self._connection
        workers: list[Worker] = []
        request = pb.ListWorkersRequest(page_size=WORKERS_AT_ONCE)
        while True:
            response = await connection.call(connection.stub.ListWorkers, request)
            workers += map(views.worker, response.workers)
            if not response.next_page_token:
                return ListedWorkers(workers)
            request.page_token = response.next_page_token

    async def release_worker(self, worker_id: str) -> None:
        """Lift the quarantine of a worker, so that it gets work again. Requires the scope admin."""
        request = pb.ReleaseWorkerRequest(worker_id=worker_id)
        await self._connection.call(self._connection.stub.ReleaseWorker, request)

    async def refused_workers(self) -> tuple[RefusedWorker, ...]:
        """Return the workers that were refused registration lately, in order of name.

        A coordinator of an earlier version reports none.
        """
        request, connection = pb.ListWorkersRequest(page_size=1), self._connection
        response = await connection.call(connection.stub.ListWorkers, request)
        return tuple(map(views.refused_worker, response.refused))
