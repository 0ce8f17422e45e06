"""The blocking client, for scripts and notebooks.

    with Client("host:7070") as client:
        run = client.submit("job.yaml")
        model.load_state_dict(run.result().state_dict())

Every method runs its namesake of async_client.py on an event loop in one thread that belongs to the
client, so it works inside a notebook, whose own loop runs already. Ctrl-C during a call gives up
waiting; the run goes on. Knows nothing of messages and channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Self

from stratagem.client.report.comparison import Comparison
from stratagem.client.sdk.async_client import PATIENCE_S, AsyncClient
from stratagem.client.sdk.backup_folder import BackupDone
from stratagem.client.sdk.connection.fork_safety import is_lost
from stratagem.client.sdk.connection.loop_thread import LoopThread
from stratagem.client.sdk.job_input import Job
from stratagem.client.sdk.run_handle import RunHandle
from stratagem.client.sdk.uploads import InlineData
from stratagem.client.sdk.views import (
    RefusedWorker,
    RunsChange,
    RunStatus,
    Worker,
)
from stratagem.common.identity.tls import TlsFiles

if TYPE_CHECKING:
    pass


class Client:
    """A blocking client of one coordinator; close it, or use it as a context manager."""

    def __init__(
        self,
        address: str | None = None,
        *,
        patience_s: float = PATIENCE_S,
        tls: TlsFiles | None = None,
        token_file: str | PathLike[str] | None = None,
    ) -> None:
        """See AsyncClient."""
        self._client = AsyncClient(address, patience_s=patience_s, tls=tls, token_file=token_file)
        self._loop: LoopThread | None = LoopThread()
        try:
            self._loop.call(self._client.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    @property
    def address(self) -> str:
        return self._client.address

    def submit(
        self,
        job: Job,
        run_id: str | None = None,
        *,
        data: InlineData | None = None,
        import_path: Sequence[Path] = (),
    ) -> RunHandle:
        """Start a run; see AsyncClient.submit."""
        submitted = self._client.submit(job, run_id, data=data, import_path=import_path)
        return RunHandle(self._running().call(submitted), self._running())

    def get(self, run_id: str) -> RunHandle:
        """An existing run; NotFoundError when there is none of this id."""
        return RunHandle(self._running().call(self._client.get(run_id)), self._running())

    def resume_as(
        self,
        run_id: str,
        overrides: Iterable[str],
        *,
        from_segment: int | None = None,
        new_run_id: str | None = None,
    ) -> RunHandle:
        """Start a new run that goes on from a commit of another one; see AsyncClient.resume_as."""
        resumed = self._client.resume_as(
            run_id, overrides, from_segment=from_segment, new_run_id=new_run_id
        )
        return RunHandle(self._running().call(resumed), self._running())

    def runs(self) -> tuple[RunStatus, ...]:
        """All runs, newest first."""
        return self._running().call(self._client.runs())

    def compare(self, runs: Sequence[str | RunStatus | RunHandle]) -> Comparison:
        """2 to 8 runs beside each other, which a notebook shows; see AsyncClient.compare."""
        run_ids = [each if isinstance(each, str) else each.run_id for each in runs]
        return self._running().call(self._client.compare(run_ids))

    def watch_runs(self, *, timeout_s: float | None = None) -> Iterator[RunsChange]:
        """All runs in brief, and then those that change; see AsyncClient.watch_runs. timeout_s: as
        for `RunHandle.watch`."""
        return self._running().iterate(self._client.watch_runs(), timeout_s)

    def back_up(self, folder: Path) -> BackupDone:
        """Copy the journal and all states of this moment; see AsyncClient.back_up."""
        return self._running().call(self._client.back_up(folder))

    def workers(self) -> tuple[Worker, ...]:
        """All registered workers, alive or not."""
        return self._running().call(self._client.workers())

    def refused_workers(self) -> tuple[RefusedWorker, ...]:
        """Return the workers that were refused lately; see AsyncClient.refused_workers."""
        return self._running().call(self._client.refused_workers())

    def close(self) -> None:
        """Idempotent. Runs go on."""
        if self._loop is not None and not is_lost():
            self._loop.call(self._client.close())
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> LoopThread:
        if self._loop is None:
            raise RuntimeError("this client is closed")
        return self._loop
