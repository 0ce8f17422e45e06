"""This module provides the blocking client, for scripts and notebooks.

    with Client("host:7070") as client:
        run = client.submit("job.yaml")
        model.load_state_dict(run.result().state_dict())

Every method runs its namesake of client.py or run.py on an event loop in one thread that belongs
to the client, so it works inside a notebook, whose own loop runs already. Ctrl-C during a call
ends the waiting; the run goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncIterator,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from stratagem.client.course.client_sums import FederatedClient
from stratagem.client.course.members import MemberInterval
from stratagem.client.course.population import Population
from stratagem.client.course.rounds import Round
from stratagem.client.course.views import (
    Event,
    Hyperparameters,
    LogLine,
    Progress,
    RefusedWorker,
    RunsChange,
    RunStatus,
    Worker,
)
from stratagem.client.history.step_history import History
from stratagem.client.report.comparison import Comparison
from stratagem.client.report.notebook import follow, header_html, run_html
from stratagem.client.report.run import ReportedRun
from stratagem.client.sdk.client import PATIENCE_S, AsyncClient
from stratagem.client.sdk.connection import check_fork, is_lost
from stratagem.client.sdk.downloads import BackupDone, ExportedModel
from stratagem.client.sdk.run import AsyncRun
from stratagem.client.sdk.torch_process import Job
from stratagem.client.sdk.uploads import InlineData
from stratagem.client.sdk.verification import OnClaim, Verification
from stratagem.common.base.errors import StratagemError
from stratagem.common.identity.tls import TlsFiles

if TYPE_CHECKING:
    import torch

# ---- Client ----


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

    def verify(
        self,
        run_id: str,
        *,
        segments: Collection[int] | None = None,
        sample: float | None = None,
        on_claim: OnClaim = lambda _run, _again: None,
    ) -> Verification:
        """Compute the claims of a run again; see AsyncClient.verify."""
        verified = self._client.verify(run_id, segments=segments, sample=sample, on_claim=on_claim)
        return self._running().call(verified)

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


# ---- Runs ----


class RunHandle:
    """A handle on one run; every method asks the coordinator. Usable until its client is closed."""

    def __init__(self, run: AsyncRun, loop: LoopThread) -> None:
        self._run = run
        self._loop = loop

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def note(self) -> str:
        """Return what its author should know of a run that was submitted here; see
        AsyncRun.note."""
        return self._run.note

    @property
    def created(self) -> bool:
        """Return whether submitting has started this run; False where it was there before."""
        return self._run.created

    def status(self) -> RunStatus:
        return self._loop.call(self._run.status())

    def metrics(self) -> Mapping[str, float]:
        """The latest metrics, such as {"test.accuracy": 0.97}."""
        return self._loop.call(self._run.metrics())

    def watch(
        self,
        from_index: int = 0,
        *,
        kinds: Iterable[str] = (),
        limit: int | None = None,
        newest_first: bool = False,
        follow: bool | None = None,
        before_index: int | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Event | Progress]:
        """Events and progress until the run has ended; see AsyncRun.watch.

        timeout_s: raise TimeoutError when the next one is not there so long after the first was
        asked for.
        """
        watched = self._run.watch(
            from_index,
            kinds=kinds,
            limit=limit,
            newest_first=newest_first,
            follow=follow,
            before_index=before_index,
        )
        return self._loop.iterate(watched, timeout_s)

    def events(self) -> tuple[Event, ...]:
        """All events so far."""
        return self._loop.call(self._run.events())

    def report(self, path: str | PathLike[str]) -> Path:
        """Write the run as it is now as one page of HTML; see AsyncRun.report."""
        return self._loop.call(self._run.report(path))

    def show(self) -> None:
        """Follow the run in the cell of a notebook until it ends; an interrupt leaves it alone."""
        follow(self.watch(), lambda: run_html(self.shown()))

    def rounds(self, party: str = "") -> tuple[Round, ...]:
        """The rounds of a federation so far; see AsyncRun.rounds."""
        return self._loop.call(self._run.rounds(party))

    def clients(self, party: str = "") -> tuple[FederatedClient, ...]:
        """The clients of a federation over its rounds so far."""
        return self._loop.call(self._run.clients(party))

    def members(self) -> tuple[MemberInterval, ...]:
        """When each worker was a member of the run, and why it was one no longer."""
        return self._loop.call(self._run.members())

    def population(self) -> Population:
        """The generations of a population so far: scores, lineages, and the schedule of each."""
        return self._loop.call(self._run.population())

    def history(
        self,
        series: str | Sequence[str] = (),
        parties: str | Sequence[str] = (),
        *,
        from_step: int = 1,
        to_step: int | None = None,
        max_rows: int | None = None,
    ) -> History:
        """What was recorded of each step, by name of series; see AsyncRun.history."""
        asked = self._run.history(
            series, parties, from_step=from_step, to_step=to_step, max_rows=max_rows
        )
        return self._loop.call(asked)

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait for the end of the run, whatever that is, and return its last status.

        timeout_s: raise TimeoutError when it has not ended after so long; None waits without a
        limit, 0 asks once, and waits a few seconds for the answer. The run goes on either way.
        """
        return self._loop.call(self._run.wait(timeout_s))

    def result(self, timeout_s: float | None = None) -> RunResult:
        """Wait for the end of the run; raises UserCodeError or RunFailedError. timeout_s: see
        `wait`."""
        return RunResult(self._loop.call(self._run.result(timeout_s)), self)

    def cancel(self) -> None:
        """Stop the run; its last commit stays and can be resumed."""
        self._loop.call(self._run.cancel())

    def resume(self, from_segment: int | None = None) -> None:
        """Go on from the last commit of a run that was cancelled or has failed.

        from_segment: go on from this one of the commits that are kept; what followed it happens
        anew.
        """
        self._loop.call(self._run.resume(from_segment))

    def delete(self) -> None:
        """Forget an ended run and its states."""
        self._loop.call(self._run.delete())

    def pin(self, pinned: bool = True) -> None:
        """Keep the run, whatever the retention limits say, until it is unpinned: pin(False)."""
        self._loop.call(self._run.pin(pinned))

    def logs(
        self,
        *,
        follow: bool = False,
        worker: str = "",
        from_line: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[LogLine]:
        """Lines of the run's log; with follow, until the run ends; see AsyncRun.logs. timeout_s: as
        for `watch`."""
        lines = self._run.logs(follow=follow, worker=worker, from_line=from_line)
        return self._loop.iterate(lines, timeout_s)

    def download(
        self,
        path: str | PathLike[str],
        which: str = "final",
        *,
        plain: bool = False,
        shard_size: str | None = None,
    ) -> Path:
        """Write a committed state as a safetensors file, whole or not at all.

        plain: only the model, under all names of its state_dict(); shard_size: that as a folder of
        files; see AsyncRun.download.
        """
        return self._loop.call(self._run.download(path, which, plain=plain, shard_size=shard_size))

    def export(
        self,
        path: str | PathLike[str],
        to: Literal["hf", "torch-export", "onnx"],
        which: str = "final",
        *,
        shard_size: str = "5GB",
        import_path: Sequence[Path] = (),
    ) -> ExportedModel:
        """Write the model in the form of another program; see AsyncRun.export."""
        return self._loop.call(
            self._run.export(path, to, which, shard_size=shard_size, import_path=import_path)
        )

    def download_profile(self, path: str | PathLike[str]) -> Path:
        """Write what the workers recorded as one trace; see AsyncRun.download_profile."""
        return self._loop.call(self._run.download_profile(path))

    def state_dict(self, which: str = "final") -> dict[str, torch.Tensor]:
        """The model of a committed state as torch tensors."""
        return self._loop.call(self._run.state_dict(which))

    def __repr__(self) -> str:
        return f"RunHandle({self.run_id!r})"

    def _repr_html_(self) -> str:
        return run_html(self.shown())

    def shown(self, max_rows: int = 720) -> ReportedRun:
        """All that pictures of the run are made of; max_rows: of each curve."""
        return self._loop.call(self._run.shown(max_rows))


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a completed run."""

    status: RunStatus
    run: RunHandle

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.status.metrics

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """Return the hyperparameters of the population member whose state is the result; empty for
        a run that is no population."""
        commit = self.status.commit()
        return commit.hyperparameters if commit else {}

    @property
    def schedule(self) -> tuple[Hyperparameters, ...]:
        """Return all hyperparameters that this state of a population was trained with, in order of
        step."""
        commit = self.status.commit()
        return commit.schedule if commit else ()

    def state_dict(self, which: str = "final") -> dict[str, torch.Tensor]:
        """The trained model as torch tensors, for `model.load_state_dict`."""
        return self.run.state_dict(which)

    def download(
        self,
        path: str | PathLike[str],
        which: str = "final",
        *,
        plain: bool = False,
        shard_size: str | None = None,
    ) -> Path:
        """Write the trained state as a safetensors file; see RunHandle.download."""
        return self.run.download(path, which, plain=plain, shard_size=shard_size)

    def _repr_html_(self) -> str:
        try:
            return self.run._repr_html_()
        except (RuntimeError, StratagemError):  # its client is closed, or the run deleted
            return header_html(self.status)


# ---- Event loop in a thread ----

Value = TypeVar("Value")

_END: Final = object()


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report_unless_poller)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="stratagem-client", daemon=True
        )
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Run to the end and give back the result; an interrupt cancels the coroutine."""
        if is_lost():  # the thread is not in this fork
            coroutine.close()
            check_fork()
        tasks: list[asyncio.Task[Value]] = []

        async def tracked() -> Value:
            tasks.append(asyncio.current_task())  # type: ignore[arg-type]
            return await coroutine

        future: Future[Value] | None = None
        try:
            future = asyncio.run_coroutine_threadsafe(tracked(), self._loop)
            return future.result()
        except BaseException:
            # An interrupt may come at any instant, also before the future is in our hands.
            if future is None or not future.done():
                # Not before it has ended may the caller do something else with what it used.
                asyncio.run_coroutine_threadsafe(_cancelled(tasks), self._loop).result()
            raise

    def iterate(
        self, source: AsyncIterator[Value], timeout_s: float | None = None
    ) -> Iterator[Value]:
        """The items as they come; leaving the loop early closes the source.

        timeout_s: raise TimeoutError, and close the source, when the next item is not there so long
        after the first one was asked for.
        """
        deadline_s = None if timeout_s is None else self._loop.time() + timeout_s

        async def advance() -> Value | object:
            async with asyncio.timeout_at(deadline_s):
                return await anext(source, _END)

        async def close() -> None:
            aclose = getattr(source, "aclose", None)
            if aclose is not None:
                await aclose()

        try:
            while (item := self.call(advance())) is not _END:
                yield item  # type: ignore[misc]
        finally:
            if (
                not self._loop.is_closed() and not is_lost()
            ):  # closing the loop has closed the source
                self.call(close())

    def close(self) -> None:
        """Nothing in a fork, where neither the loop nor what it has open is ours."""
        if is_lost():
            return
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait for their end.

    What was handed to the loop before this has begun by now, so `tasks` names it.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _report_unless_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC wakes every loop of a process for each event; all but one then find nothing to read."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
