"""This module provides the blocking client, for scripts and notebooks.

    with Client("host:7070") as client:
        run = client.submit("job.yaml")
        model.load_state_dict(run.result().state_dict())

Every method runs the method of the same name in client.py or run.py on an event loop in a thread
of the client, so it also works inside a notebook, whose own loop is already running. Ctrl-C during
a call ends the waiting; the run continues.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar

from stratagem.client.course.views import (
    Event,
    Hyperparameters,
    LogLine,
    Progress,
    RunsChange,
    RunStatus,
)
from stratagem.client.sdk.client import PATIENCE_S, AsyncClient
from stratagem.client.sdk.connection import check_fork, is_lost
from stratagem.client.sdk.run import AsyncRun
from stratagem.common.base.errors import StratagemError
from stratagem.common.identity.tls import TlsFiles

if TYPE_CHECKING:
    import torch

    from stratagem.client.report.comparison import Comparison
    from stratagem.client.report.run import ReportedRun
    from stratagem.client.sdk.torch_process import Job
    from stratagem.client.sdk.uploads import InlineData

# ---- Methods ----

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")


def _blocking(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[Client | RunHandle, Parameters], Value]:
    """Turn an async method of AsyncClient or AsyncRun into a blocking one with its parameters and
    its documentation."""

    @wraps(method)
    def call(
        self: Client | RunHandle, /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Value:
        return self._running().call(method(self._asynchronous, *args, **kwargs))

    return call


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
        """Connect to a coordinator; see AsyncClient."""
        self._asynchronous = AsyncClient(
            address, patience_s=patience_s, tls=tls, token_file=token_file
        )
        self._loop: LoopThread | None = LoopThread()
        try:
            self._loop.call(self._asynchronous.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    @property
    def address(self) -> str:
        """The address of the coordinator, or several of which one leads, separated by commas."""
        return self._asynchronous.address

    def submit(
        self,
        job: Job,
        run_id: str | None = None,
        *,
        data: InlineData | None = None,
        import_path: Sequence[Path] = (),
    ) -> RunHandle:
        """Start a run; see AsyncClient.submit."""
        submitted = self._asynchronous.submit(job, run_id, data=data, import_path=import_path)
        return RunHandle(self._running().call(submitted), self._running())

    def get(self, run_id: str) -> RunHandle:
        """Return a handle on an existing run. Raises NotFoundError if no run has this id."""
        return RunHandle(self._running().call(self._asynchronous.get(run_id)), self._running())

    def resume_as(
        self,
        run_id: str,
        overrides: Iterable[str],
        *,
        from_segment: int | None = None,
        new_run_id: str | None = None,
    ) -> RunHandle:
        """Start a new run that continues from a commit of another; see AsyncClient.resume_as."""
        resumed = self._asynchronous.resume_as(
            run_id, overrides, from_segment=from_segment, new_run_id=new_run_id
        )
        return RunHandle(self._running().call(resumed), self._running())

    def compare(self, runs: Sequence[str | RunStatus | RunHandle]) -> Comparison:
        """Compare 2 to 8 runs; a notebook shows the result. See AsyncClient.compare."""
        run_ids = [run if isinstance(run, str) else run.run_id for run in runs]
        return self._running().call(self._asynchronous.compare(run_ids))

    def watch_runs(self, *, timeout_s: float | None = None) -> Iterator[RunsChange]:
        """Yield all runs in brief, then those that change; see AsyncClient.watch_runs. timeout_s:
        as for `RunHandle.watch`."""
        return self._running().iterate(self._asynchronous.watch_runs(), timeout_s)

    runs = _blocking(AsyncClient.runs)
    workers = _blocking(AsyncClient.workers)
    refused_workers = _blocking(AsyncClient.refused_workers)
    release_worker = _blocking(AsyncClient.release_worker)
    back_up = _blocking(AsyncClient.back_up)
    verify = _blocking(AsyncClient.verify)

    def close(self) -> None:
        """Close the connection; runs continue. Closing again does nothing."""
        if self._loop is not None and not is_lost():
            self._loop.call(self._asynchronous.close())
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
        self._asynchronous = run
        self._loop = loop

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._asynchronous.run_id

    @property
    def note(self) -> str:
        """Remarks about a run that was submitted here; see AsyncRun.note."""
        return self._asynchronous.note

    @property
    def created(self) -> bool:
        """True if submitting started this run; False if it existed before."""
        return self._asynchronous.created

    # ---- state and course ----

    status = _blocking(AsyncRun.status)
    metrics = _blocking(AsyncRun.metrics)
    events = _blocking(AsyncRun.events)
    history = _blocking(AsyncRun.history)
    rounds = _blocking(AsyncRun.rounds)
    clients = _blocking(AsyncRun.clients)
    members = _blocking(AsyncRun.members)
    population = _blocking(AsyncRun.population)
    report = _blocking(AsyncRun.report)

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
        """Yield events and progress until the run has ended; see AsyncRun.watch.

        timeout_s: raise TimeoutError, and stop watching, if an item has not come this long after
        the first one was asked for.
        """
        watched = self._asynchronous.watch(
            from_index,
            kinds=kinds,
            limit=limit,
            newest_first=newest_first,
            follow=follow,
            before_index=before_index,
        )
        return self._loop.iterate(watched, timeout_s)

    def logs(
        self,
        *,
        follow: bool = False,
        worker: str = "",
        from_line: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[LogLine]:
        """Yield the lines of the run's log, with `follow` until the run ends; see AsyncRun.logs.
        timeout_s: as for `watch`."""
        lines = self._asynchronous.logs(follow=follow, worker=worker, from_line=from_line)
        return self._loop.iterate(lines, timeout_s)

    def shown(self, max_rows: int = 720) -> ReportedRun:
        """Return the data for all pictures of the run. max_rows: the most rows of each curve."""
        return self._loop.call(self._asynchronous.shown(max_rows))

    def show(self) -> None:
        """Follow the run in a notebook cell until it ends; an interrupt ends only the display."""
        from stratagem.client.report.notebook import follow, run_html

        follow(self.watch(), lambda: run_html(self.shown()))

    # ---- life ----

    wait = _blocking(AsyncRun.wait)

    def result(self, timeout_s: float | None = None) -> RunResult:
        """Wait for the end of the run and return its result. Raises UserCodeError or
        RunFailedError; see AsyncRun.result. timeout_s: as for `wait`."""
        return RunResult(self._loop.call(self._asynchronous.result(timeout_s)), self)

    cancel = _blocking(AsyncRun.cancel)
    resume = _blocking(AsyncRun.resume)
    delete = _blocking(AsyncRun.delete)
    pin = _blocking(AsyncRun.pin)

    # ---- states ----

    download = _blocking(AsyncRun.download)
    export = _blocking(AsyncRun.export)
    download_profile = _blocking(AsyncRun.download_profile)
    state_dict = _blocking(AsyncRun.state_dict)

    def __repr__(self) -> str:
        return f"RunHandle({self.run_id!r})"

    def _repr_html_(self) -> str:
        from stratagem.client.report.notebook import run_html

        return run_html(self.shown())

    def _running(self) -> LoopThread:
        return self._loop


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
        """Return the hyperparameters of the population member whose state this is; else empty."""
        commit = self.status.commit()
        return commit.hyperparameters if commit else {}

    @property
    def schedule(self) -> tuple[Hyperparameters, ...]:
        """Return all hyperparameters that this state was trained with, in order of step; empty for
        a run that is not a population."""
        commit = self.status.commit()
        return commit.schedule if commit else ()

    def state_dict(self, which: str = "final") -> dict[str, torch.Tensor]:
        """Return the trained model as torch tensors, for `model.load_state_dict`."""
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
            from stratagem.client.report.notebook import header_html

            return header_html(self.status)


# ---- Event loop in a thread ----

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
        """Run a coroutine to its end and return its result; an interrupt cancels it."""
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
            # An interrupt may come at any instant, even before the future is returned to us.
            if future is None or not future.done():
                # The caller may reuse the coroutine's resources, so wait until it has ended.
                asyncio.run_coroutine_threadsafe(_cancelled(tasks), self._loop).result()
            raise

    def iterate(
        self, source: AsyncIterator[Value], timeout_s: float | None = None
    ) -> Iterator[Value]:
        """Yield an async iterator's items as they come; leaving the loop early closes the iterator.

        timeout_s: raise TimeoutError, and close it, if an item has not come this long after the
        first one was asked for.
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
            # A closed loop has closed the source.
            if not self._loop.is_closed() and not is_lost():
                self.call(close())

    def close(self) -> None:
        """Stop the loop and its thread; do nothing in a fork, as the parent process owns both."""
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

    All coroutines handed to the loop earlier have begun by now, so their tasks are among them.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _report_unless_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an exception on the loop, but no BlockingIOError: gRPC wakes all loops of a process
    for each event, and all but one find nothing to read."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
