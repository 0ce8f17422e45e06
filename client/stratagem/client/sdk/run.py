"""The asynchronous handle on one run: its status, its events, its states.

Reconnecting is in connection.py, the tensor streams in downloads.py; nothing here imports torch.
RunHandle in blocking.py takes its methods, and their documentation, from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

import grpc

from stratagem.client.course import views
from stratagem.client.course.views import Event, LogLine, Phase, Progress, RunStatus
from stratagem.client.sdk.connection import Connection
from stratagem.common.base.errors import (
    InvalidInputError,
    RunFailedError,
    UserCodeError,
)
from stratagem.common.base.ids import RunId
from stratagem.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    import torch

    from stratagem.client.course.client_sums import FederatedClient
    from stratagem.client.course.members import MemberInterval
    from stratagem.client.course.population import Population
    from stratagem.client.course.rounds import Round
    from stratagem.client.course.step_history import History
    from stratagem.client.report.run import ReportedRun
    from stratagem.client.sdk import downloads

# What a method alone needs, such as the pictures of a report, is imported there: most programs
# submit a run and look at its status.

ASKING_S: Final = 5.0
"""The longest wait for a status with timeout_s=0, because the coordinator may be away."""


class AsyncRun:
    """A handle on one run of a coordinator, which knows only the run's id and asks for all else."""

    def __init__(
        self, connection: Connection, run_id: RunId, note: str = "", *, created: bool = False
    ) -> None:
        self.run_id = run_id
        self.note = note
        """Remarks about a run that was submitted here: why its strategy was chosen, and how its
        schedule changes if it is longer or shorter than the training that it resumes."""
        self.created = created
        """True if submitting started this run; False if it existed before."""
        self._connection = connection

    async def status(self) -> RunStatus:
        """Return the status of the run: phase and reason, progress, commits, metrics, error."""
        connection = self._connection
        request = pb.GetRunRequest(run_id=self.run_id)
        return views.run_status((await connection.call(connection.stub.GetRun, request)).run)

    async def metrics(self) -> Mapping[str, float]:
        """Return the latest metrics, such as {"test.accuracy": 0.97, "train.loss": 0.08}."""
        return (await self.status()).metrics

    async def watch(
        self,
        from_index: int = 0,
        *,
        kinds: Iterable[str] = (),
        limit: int | None = None,
        newest_first: bool = False,
        follow: bool | None = None,
        before_index: int | None = None,
    ) -> AsyncGenerator[Event | Progress]:
        """Yield the events from an index on, each once, and progress between them, until the run
        has ended.

        If the coordinator restarts, watching continues after the last event that was seen.
        kinds: only events of these kinds, such as ["SegmentFinished"]. limit: stop after so many
        events. newest_first: from the newest event, or the one before before_index, back to
        from_index, and stop there. follow: False stops at the events so far, without progress.
        before_index: only events before this one, and stop there.
        """
        request = pb.WatchRunRequest(
            run_id=self.run_id,
            from_index=from_index,
            kinds=tuple(kinds),
            newest_first=newest_first,
            follow=follow,
            before_index=before_index or 0,
            several=True,
        )
        has_end = follow is False or newest_first or before_index is not None
        if (limit is not None and limit < 1) or before_index == 0:
            return
        num_left, phase, is_over = limit, cast("Phase | None", None), False
        while phase is None or not phase.is_final:
            request.limit = num_left or 0
            # The request says at every (re)connection from where to continue.
            stream = self._connection.follow(lambda: self._connection.stub.WatchRun(request))
            async for message in stream:
                if message.WhichOneof("message") == "progress":
                    yield views.progress(message.progress)
                    continue
                for item in (message.event, *message.more):
                    event = views.event(item)
                    phase = event.phase
                    if newest_first:
                        request.before_index = event.index
                        num_left = 0 if event.index == 0 else num_left
                    else:
                        request.from_index = event.index + 1
                    if num_left is not None:
                        num_left = max(num_left - 1, 0)
                        request.limit = num_left
                    yield event
                    if num_left == 0:
                        return
            if has_end or is_over:
                return
            if phase is None or not phase.is_final:  # ended early, or nothing has happened
                # One more round asks for events since the stream ended.
                is_over = (await self.status()).phase.is_final

    async def rounds(self, party: str = "") -> tuple[Round, ...]:
        """Return the rounds of a federation so far. party: the path of a nested
        federation."""
        from stratagem.client.course.rounds import rounds

        return rounds(await self.events(), party)

    async def clients(self, party: str = "") -> tuple[FederatedClient, ...]:
        """Return the clients of a federation over its rounds so far. party: as for `rounds`."""
        from stratagem.client.course.rounds import clients

        return clients(await self.events(), party)

    async def members(self) -> tuple[MemberInterval, ...]:
        """Return the times in which each worker was a member of the run, and why it left."""
        from stratagem.client.course.members import members

        return members(await self.events())

    async def population(self) -> Population:
        """Return the generations of a population so far: scores, lineages and schedules."""
        from stratagem.client.course.population import population

        return population(await self.events(), (await self.status()).job)

    async def events(self) -> tuple[Event, ...]:
        """Return all events so far."""
        from stratagem.client.report.notebook import ListedEvents

        return ListedEvents([event async for page in self.past() for event in page])

    async def past(
        self, from_index: int = 0, *, before_index: int | None = None
    ) -> AsyncGenerator[list[Event]]:
        """Yield the events so far, from an index on, in batches as the messages bring them.

        before_index: only events before this one.
        """
        if before_index == 0:
            return
        request = pb.WatchRunRequest(
            run_id=self.run_id,
            from_index=from_index,
            follow=False,
            before_index=before_index or 0,
            several=True,
        )
        # The request says at every (re)connection from where to continue.
        stream = self._connection.follow(lambda: self._connection.stub.WatchRun(request))
        async for message in stream:
            if not message.HasField("event"):
                continue
            events = [views.event(item) for item in (message.event, *message.more)]
            request.from_index = events[-1].index + 1
            yield events

    async def shown(self, max_rows: int = 2048) -> ReportedRun:
        """Return the data for all pictures of the run. max_rows: the most rows of each curve."""
        from stratagem.client.report.run import ReportedRun, recorded

        status, events = await self.status(), await self.events()
        history = await self.history(*recorded(status.job), max_rows=max_rows)
        return await asyncio.to_thread(ReportedRun.of, status, events, history)

    async def report(self, path: str | PathLike[str]) -> Path:
        """Write the run as it is now as one page of HTML without scripts: curves, a panel for its
        strategy, its events and its job."""
        from stratagem.client.course.members import time_text
        from stratagem.client.report.pages import page

        run = await self.shown()
        text = await asyncio.to_thread(page, run, time_text(time.time()))
        written = Path(path)
        await asyncio.to_thread(written.write_text, text, encoding="utf-8")
        return written

    async def history(
        self,
        series: str | Sequence[str] = (),
        parties: str | Sequence[str] = (),
        *,
        from_step: int = 1,
        to_step: int | None = None,
        max_rows: int | None = None,
    ) -> History:
        """Return the recorded values of each step: loss, gradient norm, learning rates, times, and
        values that the user's code logged.

        series, parties: names, or beginnings of names followed by "*"; by default all series, and
        the party of the whole run. max_rows: the most rows of each series; each row then stands
        for several steps. The steps of the segment that is being trained are included.
        """
        from stratagem.client.course.step_history import History

        request = pb.GetHistoryRequest(
            run_id=self.run_id,
            series=[series] if isinstance(series, str) else series,
            parties=[parties] if isinstance(parties, str) else parties,
            from_step=from_step,
            to_step=to_step or 0,
            max_rows=max_rows or 0,
        )
        blocks: list[pb.HistoryBlock] = []

        def open_stream() -> grpc.aio.UnaryStreamCall[pb.GetHistoryRequest, pb.GetHistoryResponse]:
            blocks.clear()  # after an interruption everything is sent again
            return self._connection.stub.GetHistory(request)

        async for response in self._connection.follow(open_stream):
            blocks.append(response.block)
        return History.of(blocks)

    async def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait until the run has completed, failed or been cancelled, and return its last status.

        timeout_s: raise TimeoutError if the run has not ended after this time; None waits without
        a limit, 0 asks once and waits a few seconds for the answer. A timeout does not stop the
        run.
        """
        if timeout_s is not None and not timeout_s >= 0:
            raise InvalidInputError.at("timeout_s", f"{timeout_s} is not 0 or more, nor None")
        status: RunStatus | None = None
        limit = asyncio.timeout(None if timeout_s is None else timeout_s or ASKING_S)
        try:
            async with limit:
                status = await self.status()
                while not status.phase.is_final and timeout_s != 0:
                    async for _ in self.watch(status.event_index):
                        pass
                    status = await self.status()
        except TimeoutError:
            if not limit.expired():
                raise
        if status is not None and status.phase.is_final:
            return status
        last = "nobody has answered"
        if status is not None:
            last = ": ".join(filter(None, (status.phase.lower(), status.reason)))
        within = f" within {timeout_s:g} s" if timeout_s else ""
        raise TimeoutError(f"run {self.run_id} has not ended{within}; {last}")

    async def result(self, timeout_s: float | None = None) -> RunStatus:
        """Wait until the run has completed, and return its last status.

        Raises UserCodeError with the text of the user's exception, or RunFailedError with the
        reason if the run failed otherwise or was cancelled. timeout_s: as for `wait`.
        """
        status = await self.wait(timeout_s)
        if status.phase is Phase.COMPLETED:
            return status
        if status.error is not None:
            error = status.error
            raise UserCodeError(
                error.type, error.message, error.traceback, error.worker_id, error.activity
            )
        raise RunFailedError(f"run {self.run_id} {status.phase.lower()}: {status.reason}")

    async def cancel(self) -> None:
        """Stop the run; its last commit is kept and can be resumed. Stopping again does
        nothing."""
        request = pb.CancelRunRequest(run_id=self.run_id)
        await self._connection.call(self._connection.stub.CancelRun, request)

    async def resume(self, from_segment: int | None = None) -> None:
        """Continue a run that was cancelled or has failed, from its last commit.

        from_segment: continue from the commit of this segment instead; later steps are trained
        again.
        """
        request = pb.ResumeRunRequest(run_id=self.run_id, from_segment=from_segment)
        await self._connection.call(self._connection.stub.ResumeRun, request)

    async def delete(self) -> None:
        """Delete a run that has ended, with its states."""
        request = pb.DeleteRunRequest(run_id=self.run_id)
        await self._connection.call(self._connection.stub.DeleteRun, request)

    async def pin(self, pinned: bool = True) -> None:
        """Keep the run, regardless of the retention limits, until pin(False) unpins it."""
        request = pb.PinRunRequest(run_id=self.run_id, pinned=pinned)
        await self._connection.call(self._connection.stub.PinRun, request)

    async def record_verification(self, result: pb.VerificationResult) -> None:
        """Store the result of a verification with the run; status shows the newest one."""
        request = pb.RecordVerificationRequest(run_id=self.run_id, result=result)
        await self._connection.call(self._connection.stub.RecordVerification, request)

    async def logs(
        self, *, follow: bool = False, worker: str = "", from_line: int = 0
    ) -> AsyncIterator[LogLine]:
        """Yield the lines of the run's log, of one worker if named, with `follow` until the run
        ends.

        from_line: number of the first line; a negative number counts from the end of the log.
        """
        request = pb.TailLogsRequest(
            run_id=self.run_id, follow=follow, worker_id=worker, from_line=from_line
        )
        earlier, current = set[LogLine](), set[LogLine]()

        def open_stream() -> grpc.aio.UnaryStreamCall[pb.TailLogsRequest, pb.TailLogsResponse]:
            # After an interruption the log is sent from its start: skip lines already yielded.
            earlier.update(current)
            return self._connection.stub.TailLogs(request)

        async for message in self._connection.follow(open_stream):
            line = views.log_line(message)
            content = replace(line, line=0)  # another coordinator has a log of its own
            if content not in earlier:
                current.add(content)
                yield line

    async def download(
        self,
        path: str | PathLike[str],
        which: str = "final",
        *,
        plain: bool = False,
        shard_size: str | None = None,
    ) -> Path:
        """Write a committed state as a safetensors file, completely or not at all.

        plain: write only the model, under all names of its state_dict(), for any reader of
        safetensors. Otherwise the file also holds the optimizer's tensors, and tied tensors once.
        which: "final" (the newest state while the run lives), "best", or the number of a segment;
        "average", the averaged parameters of a run that keeps them, always plain; or
        "predictions", of a run that keeps them.
        shard_size: such as "5GB". Write the plain model as a new folder of files with up to this
        much data each, and model.safetensors.index.json; no tensor is split.
        """
        from stratagem.client.sdk import downloads
        from stratagem.common.base.units import size_bytes

        if shard_size is not None:
            size = size_bytes(shard_size, "shard_size")
            return await downloads.to_folder(self._connection, self.run_id, which, Path(path), size)
        return await downloads.to_file(
            self._connection, self.run_id, which, Path(path), plain=plain
        )

    async def export(
        self,
        path: str | PathLike[str],
        to: Literal["hf", "torch-export", "onnx"],
        which: str = "final",
        *,
        shard_size: str = "5GB",
        import_path: Sequence[Path] = (),
    ) -> downloads.ExportedModel:
        """Write the model in the format of another program; the path must not exist yet.

        The model is built on this machine by the user's code, which needs torch. import_path:
        folders with the user's modules, by default the current folder. hf: a folder for
        from_pretrained, in files of shard_size. torch-export, onnx: a file, whose outputs are
        compared with the model's; all sizes but the number of rows are those of the data.
        """
        from stratagem.client.sdk import downloads
        from stratagem.common.job import JobSpec

        job = JobSpec.parse(dict((await self.status()).job))
        asked = {"to": to, "shard_size": shard_size}
        return await downloads.export_model(
            self._connection, self.run_id, which, job, Path(path), import_path, **asked
        )

    async def download_profile(self, path: str | PathLike[str]) -> Path:
        """Write the recordings of all workers as one trace for Perfetto or chrome://tracing.

        Raises NotFoundError if nothing was recorded: see execution.profiling.
        """
        from stratagem.client.sdk import downloads

        return await downloads.profile_to_file(self._connection, self.run_id, Path(path))

    async def state_dict(self, which: str = "final") -> dict[str, torch.Tensor]:
        """Return the model of a committed state as torch tensors, for `model.load_state_dict`."""
        from stratagem.client.sdk.torch_states import to_state_dict

        return await to_state_dict(self._connection, self.run_id, which)
