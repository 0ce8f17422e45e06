"""Define runs, workers and events, as clients see them, as frozen values.

They are read from the coordinator's messages; field names and units are those of coordinator.proto.
"""

import json
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any, Final, TypeVar, cast

from google.protobuf.message import Message

from stratagem.common.base.ids import Party, is_within
from stratagem.common.numerics.verification import VERIFIER
from stratagem.v1 import coordinator_pb2 as pb

# ---- Views ----

T = TypeVar("T")


class Phase(StrEnum):
    """The phase of a run."""

    PENDING = "PENDING"
    PLACING = "PLACING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return self in (Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The hyperparameters of a population member, valid from a step on."""

    from_step: int
    values: Mapping[str, Any]
    """The values, keyed by dotted path of the job, such as "optimizer.lr"."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed state of a run."""

    segment: int
    step: int
    digest: str
    is_best: bool
    is_final: bool
    metrics: Mapping[str, float]
    path: str
    """The path of the safetensors file on the coordinator's machine; empty in an object store."""
    member: int | None = None
    """The population member that the state belongs to."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """The hyperparameters with which a population member reached the commit's score."""
    schedule: tuple[Hyperparameters, ...] = ()
    """All hyperparameters that a population's state was trained with, by step, including those of
    the states that the member copied."""
    average: str = ""
    """The digest of the averaged parameters, if the federation keeps an average."""


@dataclass(frozen=True, slots=True)
class UserError:
    """An exception that the user's own code raised on a worker."""

    type: str
    message: str
    traceback: str
    worker_id: str
    activity: str


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """The recorded result of a verification of an ended run; see sdk.verification.Verification."""

    conclusion: str
    num_equal: int
    num_unverified: int
    workers: tuple[str, ...]
    verified_by: str
    """The name of the caller who verified the run; empty without authentication."""
    time_s: float

    def __str__(self) -> str:
        """Return the result in words."""
        text = f"{self.num_equal} digests equal on {', '.join(self.workers) or 'no worker'}"
        if self.num_unverified:
            text += f", {self.num_unverified} not verified"
        if self.conclusion not in ("EQUAL", "NOTHING"):
            text += f"; one differs: {self.conclusion}"
        return text


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of one run at the time of the call."""

    run_id: str
    name: str
    phase: Phase
    reason: str
    """The reason why the run is in this phase, as a sentence."""
    strategy_phase: str
    strategy: str
    step: int
    num_steps: int
    segment: int
    num_segments: int
    submitted_at_s: float
    ended_at_s: float | None
    commits: tuple[Commit, ...]
    metrics: Mapping[str, float]
    worker_ids: tuple[str, ...]
    error: UserError | None
    job: Mapping[str, Any]
    event_index: int
    engine: str
    reproducible: bool
    data_plane: str = ""
    """The encryption between its present workers: "tls", "trusted" (none), or empty if unknown."""
    submitted_by: str = ""
    """The submitter, such as "client alice" or "token ci"; empty without authentication."""
    pinned: bool = False
    """The run never expires until it is unpinned."""
    verification: str = ""
    """The result of the verification during the run, in words; empty if the job asks for none."""
    last_verification: VerificationResult | None = None
    """The result of the newest `stratagem verify` of the run; None if nobody has run it."""

    @property
    def seconds(self) -> float | None:
        """Return the time from submission to the end; None while the run has not ended."""
        return None if self.ended_at_s is None else self.ended_at_s - self.submitted_at_s

    def commit(self, which: str = "final") -> Commit | None:
        """Return the commit that `download(which)` would fetch, or None if there is none."""
        match which:
            case "final":
                finals = [commit for commit in self.commits if commit.is_final]
                newest = max(self.commits, key=lambda commit: commit.segment, default=None)
                return finals[-1] if finals else newest
            case "best":
                return next((commit for commit in self.commits if commit.is_best), None)
            case _:
                return next(
                    (commit for commit in self.commits if str(commit.segment) == which), None
                )


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a run; `watch(from_index=event.index + 1)` continues after it."""

    index: int
    time_s: float
    kind: str
    sentence: str
    payload: Mapping[str, Any]
    phase: Phase
    leader_s: float = 0.0
    """The time by the leading coordinator's clock, which all deadlines in payloads use. It advances
    as time_s does, but stands still while no coordinator leads."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The latest values of a running run; not every update is sent."""

    step: int
    num_steps: int
    loss: float
    rows_per_s: float
    num_clients_done: int
    num_clients: int
    segment: int
    num_segments: int
    strategy_phase: str
    grad_norm: float = 0.0
    """The 2-norm of the latest step's gradient before clipping; 0 if unknown."""
    num_skipped_steps: int = 0
    """The number of steps so far that had infinite or NaN values, and so changed nothing."""
    training_phase: str = ""
    """The phase of phase training (some gradients are predicted): FULL, PREDICT or CORRECT."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the latest step, as reported by the party's first member."""
    reason: str = ""
    """The reason why a run without workers waits."""
    lr: float = 0.0
    """The learning rate of the latest step's update; 0 if unknown."""
    epoch: float = 0.0
    """The number of passes over the rows; 0 if it is not defined."""
    elapsed_s: float = 0.0
    """The time since the run was submitted."""
    eta_s: float | None = None
    """The time until the last step at the pace of the last minute; None if no pace is known."""
    may_end_early: bool = False
    """The run may end before its last step; eta_s is then an upper bound."""
    unit: str = "steps"
    """The unit of num_steps: steps, rounds or generations."""
    num_clients_rejected: int = 0
    num_clients_late: int = 0
    best: float | None = None
    """The best score in a population's newest closed generation."""
    best_member: int | None = None
    num_copied: int = 0
    """The number of population members replaced by copies of better ones after that generation."""
    bubble: float | None = None
    """The share of the latest steps in which the pipeline's ranks were idle, 0 to 1."""


@dataclass(frozen=True, slots=True)
class RunBrief:
    """A short form of a run's status, for a list of runs."""

    run_id: str
    name: str
    phase: Phase
    reason: str
    strategy_phase: str
    strategy: str
    step: int
    num_steps: int
    segment: int
    num_segments: int
    submitted_at_s: float
    ended_at_s: float | None
    metrics: Mapping[str, float]
    submitted_by: str
    event_index: int
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class RunsChange:
    """A batch of runs that changed; the first batches of a subscription name all runs."""

    runs: tuple[RunBrief, ...]
    deleted: tuple[str, ...]
    is_complete: bool
    """True once all runs that existed at the beginning of the subscription have been named."""
    time_s: float
    """The time of the change by the coordinator's clock."""
    is_first: bool = False
    """True if the subscription begins with this batch, also after an interruption: runs that are
    not named until is_complete no longer exist."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a run's log; `worker_id` is empty for the coordinator's own lines."""

    time_s: float
    worker_id: str
    level: str
    text: str
    line: int = 0
    """The number of the line in the log, from 0."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A registered worker."""

    worker_id: str
    incarnation: str
    address: str
    is_alive: bool
    silent_s: float
    """The seconds since the worker's last heartbeat, without times in which no coordinator led."""
    device: str
    device_name: str
    memory_bytes: int
    num_threads: int
    numerics: str
    local_data: tuple[str, ...]
    tags: tuple[str, ...]
    run_ids: tuple[str, ...]
    reason: str
    data_plane: str = ""
    """The encryption between it and other workers: "tls", "trusted" (none), or empty if unknown."""
    code_policy: str = ""
    """The code that it accepts with jobs: "none", "signed", "digests", "any"; empty: unknown."""
    tunnelled: bool = False
    """The worker has no address of its own: the coordinator reaches it through the connections that
    the worker opened, and other workers cannot reach it."""
    quarantine: str = ""
    """The reason why the worker gets no work until it is released; empty if it may work."""

    @property
    def may_work(self) -> bool:
        """Return True if the worker is alive and not quarantined."""
        return self.is_alive and not self.quarantine


@dataclass(frozen=True, slots=True)
class RefusedWorker:
    """A worker that repeatedly asks to register and is refused."""

    worker_id: str
    address: str
    reason: str
    silent_s: float
    """The seconds since the worker's last attempt to register."""
    num_times: int
    is_alive: bool = False
    is_refused: bool = True


@cache
def phase_of(value: pb.RunPhase.ValueType) -> Phase:
    return Phase(pb.RunPhase.Name(value).removeprefix("RUN_PHASE_"))


def run_status(info: pb.RunInfo) -> RunStatus:
    return _read(
        RunStatus,
        info,
        phase=phase_of(info.phase),
        ended_at_s=info.ended_at_s or None,
        commits=tuple(map(_commit, info.commits)),
        error=_read(UserError, info.error) if info.HasField("error") else None,
        job=json.loads(info.job_json) if info.job_json else {},
        last_verification=_read(VerificationResult, info.last_verification)
        if info.HasField("last_verification")
        else None,
    )


def event(message: pb.RunEvent) -> Event:
    # Events may be very many: naming each field takes a quarter of the time.
    return Event(
        index=message.index,
        time_s=message.time_s,
        kind=message.kind,
        sentence=message.sentence,
        payload=json.loads(message.payload_json) if message.payload_json else {},
        phase=phase_of(message.phase),
        leader_s=message.leader_s,
    )


def progress(message: pb.RunProgress) -> Progress:
    return _read(
        Progress,
        message,
        unit=message.unit or "steps",
        eta_s=message.eta_s if message.HasField("eta_s") else None,
        best=message.best if message.HasField("best") else None,
        best_member=message.best_member if message.HasField("best_member") else None,
        bubble=message.bubble if message.HasField("bubble") else None,
    )


def run_brief(message: pb.RunBrief) -> RunBrief:
    return _read(
        RunBrief,
        message,
        phase=phase_of(message.phase),
        ended_at_s=message.ended_at_s or None,
        progress=progress(message.progress) if message.HasField("progress") else None,
    )


def runs_change(message: pb.WatchRunsResponse, *, is_first: bool) -> RunsChange:
    return _read(
        RunsChange,
        message,
        runs=tuple(map(run_brief, message.runs)),
        deleted=tuple(message.deleted),
        is_first=is_first,
    )


def log_line(message: pb.TailLogsResponse) -> LogLine:
    return _read(LogLine, message)


def worker(info: pb.WorkerInfo) -> Worker:
    capability = info.capability
    return _read(Worker, info, capability, numerics=capability.numerics_description)


def refused_worker(message: pb.RefusedWorker) -> RefusedWorker:
    return _read(RefusedWorker, message, is_alive=False, is_refused=True)


def _commit(info: pb.CommitInfo) -> Commit:
    schedule = tuple(
        Hyperparameters(setting.from_step, json.loads(setting.values_json))
        for setting in info.schedule
    )
    return _read(
        Commit,
        info,
        member=info.member if info.HasField("member") else None,
        hyperparameters=schedule[-1].values if schedule else {},
        schedule=schedule,
    )


def _read(kind: type[T], *messages: Message, **values: Any) -> T:
    """Make a view from equally named fields of the messages; `values` take precedence."""
    for name in (spec.name for spec in fields(cast(Any, kind)) if spec.name not in values):
        value = next(getattr(message, name) for message in messages if hasattr(message, name))
        match value:
            case str() | int() | float():
                values[name] = value
            case Mapping():
                values[name] = dict(value)
            case _:
                values[name] = tuple(value)
    return kind(**values)


# ---- Payloads ----
#
# Values are read from the payloads of events: numbers that JSON has no form for, metrics,
# members. Facts of a party below the root name its path; those of the root have "".

ENDS: Final = frozenset({"RunCompleted", "StoppedEarly", "RunCancelled", "RunFailed"})
"""The kinds of facts that end a run."""


def number(value: Any) -> float:
    """Parse a number of an event's payload; null, "NaN" and "-Infinity" are accepted."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        return math.nan


def numbers(values: Any) -> dict[str, float]:
    """Parse the metrics of an event's payload, keyed by name."""
    metrics = values if isinstance(values, Mapping) else {}
    return {str(name): number(value) for name, value in metrics.items()}


def party_of(event: Event) -> str:
    """Return the path of the party that an event is about; "" for the root."""
    return str(event.payload.get("party") or "")


def is_of_verifier(event: Event) -> bool:
    """Return True if an event is about the verifier, the party that executes segments of the run
    again, and so is no part of the run's own course."""
    return is_within(Party(party_of(event)), VERIFIER)


def undone_from(event: Event) -> int | None:
    """Return the last segment that stays valid if this event returns to a commit, else None."""
    if event.kind != "RunResumed":
        return None
    segment = event.payload.get("from_segment")
    return None if segment is None else int(segment)


def ended_by(status: Any) -> str:
    """Describe how a process ended, as "SIGKILL" or "exit status 3"; "" if unknown."""
    if not isinstance(status, int):
        return ""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
