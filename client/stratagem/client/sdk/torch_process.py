"""Ask questions about a job in a subprocess that loads torch and the user's code; this process
loads neither.

The questions build the user's model, so `stratagem.tools.questions` answers them in a process of
its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Final

from stratagem.client.course.views import Worker
from stratagem.client.sdk.cell_modules import cells
from stratagem.common import strategy as strategies
from stratagem.common.base.errors import (
    InvalidInputError,
    StratagemError,
    UnavailableError,
    UserCodeError,
    Violation,
)
from stratagem.common.code.bundle import digest_of
from stratagem.common.job import JobSpec, entry_points, load_job
from stratagem.common.job.execution import DataParallel
from stratagem.common.job.rules import check_submitted
from stratagem.common.observe.findings import Finding, Level
from stratagem.common.process.cpu_threads import passive_waiting
from stratagem.common.strategy import ModelParallel, Partition, RemoteTarget, Strategy, Tag

# ---- Job input ----
#
# A caller may give a job in several forms; one form is sent.

Job = JobSpec | Mapping[str, Any] | str | PathLike[str]
"""A job: validated, as a mapping, or the path of a YAML, TOML or JSON file."""


def parse_job(job: Job, inline: str | None = None) -> JobSpec:
    """Return the validated job. Raises InvalidInputError with a violation for each wrong field.
    inline: the digest of uploaded data, which replaces the job's data."""
    match job:
        case str() | PathLike():
            return load_job(Path(job), [] if inline is None else [f"data={{inline: {inline}}}"])
        case JobSpec() if inline is None:
            return job
        case JobSpec():
            document: Mapping[str, Any] = json.loads(job.canonical_json())
        case _:
            document = job
    changed = document if inline is None else {**document, "data": {"inline": inline}}
    return JobSpec.parse(dict(changed))


# ---- Process ----

_PROGRAM: Final = (sys.executable, "-m", "stratagem.tools.questions")
_LONG_S: Final = 30.0
"""The time after which the user is told what the subprocess is doing; it doubles each time."""
_PLACE_S: Final = 2.0
"""The time for which an interrupted caller waits to be told what the subprocess was doing."""
_WHERE: Final = "where"
NO_TORCH: Final = (
    "the model has to be built for this, and torch is not installed here; "
    "pip install 'stratagem[worker]', or ask on a worker"
)


def import_folders(job: Job) -> tuple[Path, ...]:
    """Return the default folders with user code: the current folder, and that of the job file."""
    folders = [Path.cwd()]
    if isinstance(job, str | PathLike):
        folders.append(Path(job).absolute().parent)
    return tuple(dict.fromkeys(folders))


def ask(
    question: str,
    job: Job,
    *,
    import_path: Sequence[Path] = (),
    tell: Callable[[Mapping[str, Any]], None] = lambda _: None,
    complain: Callable[[str], None] = lambda _: None,
    **asked: Any,
) -> dict[str, Any]:
    """Answer one question about a job in a subprocess; raise the errors that it raises in the
    subprocess.

    import_path: folders with the user's modules, by default the current folder and that of the job
    file. tell: is given findings before the answer. complain: is given sentences about what takes
    long, and where. Raises KeyboardInterrupt with the place where the process was interrupted.
    """
    if find_spec("torch") is None:
        raise UnavailableError(NO_TORCH)
    spec = parse_job(job)
    request: dict[str, Any] = {
        "question": question,
        "job_json": spec.canonical_json(),
        "allow": entry_points(spec),
        "import_path": [str(path) for path in import_path or import_folders(job)],
        **asked,
    }
    code = cells.code_of(spec)
    if code is not None and code.path is not None:
        from stratagem.client.sdk.code_folder import bundle_of

        archive = bundle_of(code)
        request["code"] = {"digest": digest_of(archive), "archive": b64encode(archive).decode()}
    reply, returncode, last = _exchange(json.dumps(request), tell, complain)
    if reply is None or returncode != 0:
        raise StratagemError(f"the question {question!r} could not be answered: {last}")
    if "error" in reply:
        raise _error(reply["error"])
    answer: dict[str, Any] = reply["answer"]
    return answer


def _exchange(
    request: str, tell: Callable[[Mapping[str, Any]], None], complain: Callable[[str], None]
) -> tuple[Mapping[str, Any] | None, int, str]:
    """Run the subprocess with a request; return its reply, its exit code, and its last stderr
    line."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            _PROGRAM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **passive_waiting(os.environ)},
        ) as process,
    ):
        lines: SimpleQueue[str] = SimpleQueue()
        reply = None
        try:
            threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
            _write(process, request)
            reply = next(_replies(process, lines, tell, complain), None)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_place_at_end(process, lines)) from None
        finally:
            if reply is None:
                process.kill()
        returncode = process.wait()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
    return reply, returncode, last


def _read(source: IO[str], lines: "SimpleQueue[str]") -> None:
    """Put all lines of a subprocess into a queue, and an empty line at the end."""
    for line in source:
        lines.put(line)
    lines.put("")


def _write(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the end of a process is noticed by its output
        process.stdin.write(f"{line}\n")
        process.stdin.flush()


def _replies(
    process: "subprocess.Popen[str]",
    lines: "SimpleQueue[str]",
    tell: Callable[[Mapping[str, Any]], None],
    complain: Callable[[str], None],
) -> Iterator[Mapping[str, Any]]:
    """Yield a subprocess's replies; pass its findings to `tell` and its progress to `complain`."""
    patience_s = _LONG_S
    while True:
        try:
            line = lines.get(timeout=patience_s)
        except Empty:
            patience_s *= 2
            _write(process, _WHERE)
            continue
        if not line:
            return
        message = json.loads(line)
        if "finding" in message:
            tell(message["finding"])
            patience_s = _LONG_S
        elif "place" in message:
            complain(f"still {_words(message)}")
        else:
            yield message


def _place_at_end(process: "subprocess.Popen[str]", lines: "SimpleQueue[str]") -> str:
    """Return a text on where an interrupted subprocess was in the code, as far as it tells."""
    _write(process, _WHERE)
    until_s = time.monotonic() + _PLACE_S
    with suppress(Empty):
        while line := lines.get(timeout=max(0.0, until_s - time.monotonic())):
            message = json.loads(line)
            if "place" in message:
                return f"stopped {_words(message)}"
    return "stopped"


def _words(message: Mapping[str, str]) -> str:
    """Format what a subprocess is doing, and where in the code."""
    place = message["place"]
    doing = f"at {message['at']}" if message["at"] else "at work"
    return f"{doing} ({place})" if place else doing


def _error(reply: Mapping[str, Any]) -> StratagemError:
    if "violations" in reply:
        return InvalidInputError(
            violations=[Violation(**violation) for violation in reply["violations"]]
        )
    if "traceback" in reply:
        return UserCodeError(reply["type"], reply["message"], reply["traceback"], "this machine")
    return StratagemError(reply["text"])


# ---- Planning ----
#
# The process answers how much memory a job will need and which settings fit.


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory in bytes on the device of the worker that needs most; six parts add up to `total`.

    snapshot: one state at a commit, in host memory; num_snapshots: those kept at a time. received:
    one state that the clients of a federation begin from, in host memory; num_received: those kept
    at a time. num_copied: updates as large, for a coordinator on the same machine. needed: `total`,
    and on a CPU also snapshots, received states and copies. rows: the rows that pass through the
    model together. calibrated_by: the measurement that corrected it.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    buffers: int
    total: int
    needed: int
    snapshot: int
    num_snapshots: int
    received: int
    num_received: int
    num_copied: int
    rows: int
    num_parameters: int
    device: str
    measured: int | None
    calibrated_by: str
    notes: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return "\n".join([self.text, *self.notes])


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The sections of the job that fit the memory, and the reasons; `fits` is False if none do."""

    fits: bool
    execution: Mapping[str, Any]
    strategy: Mapping[str, Any]
    micro_batch: int
    accumulation_steps: int
    estimate: MemoryEstimate
    reasons: tuple[str, ...]


def estimate_memory(
    job: Job,
    *,
    num_workers: int | None = None,
    inference: bool = False,
    measure: bool = False,
    device: str = "",
    import_path: Sequence[Path] = (),
) -> MemoryEstimate:
    """Estimate the memory that one worker of the job will need.

    num_workers: the workers that share the job, by default as many as the strategy has room for.
    inference: only run the model. measure: also run real steps here and correct the estimate by
    them. device: cpu or cuda, by default what this machine has. import_path: folders with the
    user's modules, by default the current folder and that of the job file.
    """
    answer = ask(
        "estimate",
        job,
        import_path=import_path,
        num_workers=num_workers,
        inference=inference,
        measure=measure,
        device=device,
    )
    return _to_estimate(answer)


def recommend(
    job: Job,
    *,
    memory_bytes: int | None = None,
    num_workers: int | None = None,
    workers: Sequence[Worker] | None = None,
    device: str = "",
    import_path: Sequence[Path] = (),
) -> Recommendation:
    """Recommend a precision, gradient settings and parallelism for the memory of the workers.

    workers: the workers of a coordinator, as from `Client.workers()`. They determine the memory and
    the number of workers, unless these are passed, and the names for a pipeline.
    """
    asked: dict[str, Any] = {
        "memory_bytes": memory_bytes,
        "num_workers": num_workers,
        "device": device,
        "members": None if workers is None else _members(workers),
    }
    answer = ask("recommend", job, import_path=import_path, **asked)
    text = answer.pop("text")
    answer["estimate"] = _to_estimate({**answer["estimate"], "text": text})
    return Recommendation(**{**answer, "reasons": tuple(answer["reasons"])})


def resolve_parallelism(
    job: JobSpec, workers: Sequence[Worker], import_path: Sequence[Path] = ()
) -> tuple[JobSpec, str]:
    """Return the job with the strategy to which its `execution.parallelism` leads on these workers,
    and the reason for the choice."""
    match job.execution.parallelism:
        case "None":
            return job, ""
        case DataParallel(number):  # does not depend on the model
            strategy = strategies.DataParallel(number, strategies.AllReduce())
            execution = job.execution.with_changes(parallelism="None")
            changed = job.with_changes(strategy=strategy, execution=execution)
            return changed, f"DataParallel over {number} workers, as asked for"
        case "Automatic" if job.only_evaluates:
            return _over_all(job, sum(worker.may_work for worker in workers))
    answer = ask("resolve", job, import_path=import_path, members=_members(workers))
    return JobSpec.from_json(answer["job_json"]), answer["reason"]


def _members(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """Return the workers that may work, sorted by name, as plain values for the subprocess."""
    return [
        {
            "worker_id": worker.worker_id,
            "host": worker.address.rpartition(":")[0],
            "device": worker.device,
            "memory_bytes": worker.memory_bytes,
            "num_threads": worker.num_threads,
        }
        for worker in sorted(workers, key=lambda worker: worker.worker_id)
        if worker.may_work
    ]


def _over_all(job: JobSpec, num_workers: int) -> tuple[JobSpec, str]:
    """Return an evaluation job spread over all workers, which exchange nothing, and why."""
    chosen: strategies.Strategy = strategies.Local()
    reason = "Local: there is one worker"
    if num_workers > 1:
        chosen = strategies.DataParallel(num_workers, strategies.AllReduce())
        reason = f"DataParallel over {num_workers} workers: nothing is exchanged in an evaluation"
    execution = job.execution.with_changes(parallelism="None")
    return job.with_changes(strategy=chosen, execution=execution), reason


def _to_estimate(answer: Mapping[str, Any]) -> MemoryEstimate:
    return MemoryEstimate(**{**answer, "notes": tuple(answer["notes"])})


# ---- Check ----
#
# A check looks for faults of a job before it is submitted: in its document, its code, its data,
# and in what a cluster has for it.

_CHECK: Final = "check"
_NUM_NAMES: Final = 5
"""The largest number of workers that a finding lists."""


def check_job(
    job: Job | Callable[[], JobSpec],
    *,
    workers: Sequence[Worker] | None = None,
    device: str = "",
    import_path: Sequence[Path] = (),
    tell: Callable[[Finding], None] = lambda _: None,
    complain: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Return the findings about a job; those of level FAIL are faults. Nothing is submitted.

    job: as for `Client.submit`, or a function that reads it. workers: the workers of the
    coordinator that will run the job. device: cpu or cuda, by default what this machine has.
    import_path: folders with the user's modules, by default the current folder and that of the job
    file. tell: is given each finding as it is made. complain: is given sentences about what takes
    long.
    """
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        tell(finding)

    def add_all(more_findings: Iterable[Finding]) -> None:
        for finding in more_findings:
            add(finding)

    try:
        spec = job() if callable(job) else parse_job(job)
    except InvalidInputError as error:
        add_all(_document_faults(error))
        return findings
    add_all(_refused(check_submitted(spec)))
    if not findings:
        add(Finding("document", spec.name, Level.OK, "all fields are valid"))
    try:
        ask(
            _CHECK,
            spec,
            import_path=import_path,
            device=device,
            tell=lambda message: add(finding_in(message)),
            complain=complain,
        )
    except UnavailableError as error:
        text = "code, model and data are not checked"
        add(Finding("code", "", Level.WARN, text, str(error)))
    if workers is not None:
        add_all(_of_cluster(spec, workers))
    return findings


def finding_in(message: Mapping[str, Any]) -> Finding:
    """Decode a finding from a message of the subprocess."""
    return Finding(**{**message, "level": Level(message["level"])})


def _document_faults(error: InvalidInputError) -> Iterator[Finding]:
    yield from _refused(error.violations)
    if not error.violations:
        yield Finding("document", "", Level.FAIL, str(error))
    advice = "fix the document first, then check again"
    yield Finding("code", "", Level.WARN, "code, model and data are not checked", advice)


def _refused(violations: Iterable[Violation]) -> Iterator[Finding]:
    for violation in violations:
        yield Finding("document", violation.field, Level.FAIL, violation.message)


def _of_cluster(spec: JobSpec, workers: Sequence[Worker]) -> Iterator[Finding]:
    """Yield findings on whether the cluster has the workers that the job needs."""
    alive = sorted((w for w in workers if w.may_work), key=lambda worker: worker.worker_id)
    waits = "the run waits for one, up to placement_timeout_s"
    if not alive:
        yield Finding("workers", "", Level.WARN, "none is alive and may work", waits)
        return
    listed = _names([worker.worker_id for worker in alive])
    yield Finding("workers", "", Level.OK, f"{len(alive)} are alive: {listed}")
    yield from _of_code(spec, alive)
    for field, partition in _partitions(spec.strategy, "strategy"):
        target = partition.target
        if not any(_fits(target, worker) for worker in alive):
            text = f"no live worker is {target}"
            yield Finding("workers", f"{field}.target", Level.WARN, text, waits)
    local = spec.data.worker_local
    if local is not None and not any(local in worker.local_data for worker in alive):
        text = f'no live worker has "{local}"'
        yield Finding("workers", "data.worker_local", Level.WARN, text, waits)


def _of_code(spec: JobSpec, alive: Sequence[Worker]) -> Iterator[Finding]:
    """Yield findings on whether workers accept the code that travels with the job."""
    if spec.code is None:
        return
    refusing = [worker.worker_id for worker in alive if worker.code_policy == "none"]
    asking = [w.worker_id for w in alive if w.code_policy in ("signed", "digests")]
    advice = "have their operator set --allow-code, or install the package and leave `code` out"
    if len(refusing) == len(alive):
        text = f"no live worker accepts code from jobs: {_names(refusing)}"
        yield Finding("workers", "code", Level.FAIL, text, advice)
    elif refusing:
        text = f"these accept no code from jobs, and are left out: {_names(refusing)}"
        yield Finding("workers", "code", Level.WARN, text, advice)
    if asking:
        text = f"these accept only code that their operator has signed or listed: {_names(asking)}"
        advice = "`stratagem code sign` prints the value of code.signature"
        yield Finding("workers", "code", Level.WARN, text, advice)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_NAMES]) + (", ..." if len(names) > _NUM_NAMES else "")


def _partitions(strategy: Strategy, field: str) -> Iterator[tuple[str, Partition]]:
    """Yield (field, partition) for the stages of a pipeline, which may be inside a strategy."""
    if isinstance(strategy, ModelParallel):
        for place, partition in enumerate(strategy.partitions):
            yield f"{field}.partitions[{place}]", partition
        return
    inner = getattr(getattr(strategy, "options", None), "inner", None)
    if inner is not None:
        yield from _partitions(inner, f"{field}.options.inner")


def _fits(target: RemoteTarget, worker: Worker) -> bool:
    if isinstance(target, Tag):
        return target.tag in worker.tags
    return target.worker_id == worker.worker_id
