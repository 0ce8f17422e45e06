"""What a report is made of: the status of a run, and its events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol, Self

from stratagem.client.course.failure import failure_text
from stratagem.client.course.shapes import EventLike, RunLike, SeriesLike
from stratagem.client.report.run_course import RunCourse


class ErrorLike(Protocol):
    """An exception of the user's code; see UserError of the SDK."""

    @property
    def type(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def traceback(self) -> str: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def activity(self) -> str: ...


class StatusLike(RunLike, Protocol):
    """The status of a run with all that a report shows; see RunStatus of the SDK."""

    @property
    def run_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def strategy(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def segment(self) -> int: ...
    @property
    def num_segments(self) -> int: ...
    @property
    def event_index(self) -> int: ...
    @property
    def submitted_at_s(self) -> float: ...
    @property
    def submitted_by(self) -> str: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def worker_ids(self) -> Sequence[str]: ...
    @property
    def engine(self) -> str: ...
    @property
    def reproducible(self) -> bool: ...
    @property
    def error(self) -> ErrorLike | None: ...


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run as it is shown."""

    status: StatusLike
    course: RunCourse
    history: Mapping[str, SeriesLike] = field(default_factory=dict)
    """Of its steps, by series; without it curves have a value for each segment."""
    events: Sequence[EventLike] = ()
    """All of them, for a report; pictures need none."""

    @classmethod
    def of(
        cls,
        status: StatusLike,
        events: Sequence[EventLike],
        history: Mapping[str, SeriesLike] | None = None,
    ) -> Self:
        """Return a run with these events."""
        return cls(status, RunCourse.of(events, status.job), history or {}, events)

    @property
    def job(self) -> Mapping[str, Any]:
        """Return the run's job."""
        return self.status.job

    @property
    def strategy(self) -> Mapping[str, Any]:
        """Return the strategy of the job; empty for a job that trains nothing."""
        return self.job.get("strategy") or {}

    @property
    def began_s(self) -> float:
        """Return the wall time of the first event."""
        began_s = self.course.began_s
        return self.status.submitted_at_s if began_s is None else began_s

    @property
    def seconds(self) -> float:
        """Return the time from the first to the newest event."""
        return self.course.newest_s - self.began_s if self.course.num_events else 0.0


_UNITS: Final[Mapping[str, str]] = {
    "Federated": "rounds",
    "PopulationBased": "generations",
    "Custom": "steps of the strategy",
}
"""That a run counts, by the type of its strategy; others count steps."""


def committed_step(status: StatusLike) -> int:
    """Return how many steps the newest commit of a run has."""
    return max((each.step for each in status.commits if each.member is None), default=0)


def progress_text(status: StatusLike) -> str:
    """Return how far a run is, as "12 of 30 rounds"; "" where it is not known."""
    unit = _UNITS.get((status.job.get("strategy") or {}).get("type", ""), "steps")
    if status.phase == "FAILED" and unit == "steps":
        activity = status.error.activity if status.error is not None else ""
        return failure_text(committed_step(status), activity, of=status.num_steps)
    return f"{status.step:,} of {status.num_steps:,} {unit}" if status.num_steps else ""


def time_text(time_s: float) -> str:
    """Return a time as "2026-11-23 08:15:00 UTC": the same wherever it is read."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
