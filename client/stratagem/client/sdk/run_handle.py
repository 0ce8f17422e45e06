"""One run for scripts and notebooks: every method runs its namesake of async_run.py.

Knows nothing of messages and channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stratagem.client.course.client_sums import FederatedClient
from stratagem.client.course.members import MemberInterval
from stratagem.client.course.population import Population
from stratagem.client.course.rounds import Round
from stratagem.client.history.step_history import History
from stratagem.client.report.notebook import follow, header_html, run_html
from stratagem.client.report.run_values import ReportedRun
from stratagem.client.sdk.async_run import AsyncRun
from stratagem.client.sdk.connection.loop_thread import LoopThread
from stratagem.client.sdk.downloads import ExportedModel
from stratagem.client.sdk.views import (
    Event,
    Hyperparameters,
    LogLine,
    Progress,
    RunStatus,
)
from stratagem.common.base.errors import StratagemError

if TYPE_CHECKING:
    import torch


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
