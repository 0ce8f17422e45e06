"""Asks a process that has torch how much memory a job will need and which settings fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratagem.client.sdk.job_input import Job
from stratagem.client.sdk.torch_process import ask
from stratagem.client.sdk.views import Worker
from stratagem.common import strategy as strategies
from stratagem.common.job import JobSpec
from stratagem.common.job.execution import DataParallel


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the device of the worker that needs most; the six parts add up to `total`.

    snapshot: of the state at a commit, in host memory; num_snapshots: that are kept at a time.
    received: of a state that the clients of a federation begin from, there, too; num_received:
    likewise. num_copied: of updates as large, for a coordinator on the same machine. needed:
    `total`, and on a CPU the snapshots, what is received and what is copied. rows: that pass
    through the model together. calibrated_by: what corrected it.
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
    """Sections of the job that fit the memory, and why; `fits` is False where nothing does."""

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

    num_workers: that share it, as many as the strategy has room for unless given. inference: only
    run the model. measure: also do real steps here and correct the estimate by them. device: cpu
    or cuda, if it is here; unless given, what is here. import_path: folders of the user's modules;
    unless given, this folder and that of the job file.
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
    """Precision, gradient and parallelism for workers with so much memory each.

    workers: of a coordinator, as `Client.workers()` answers. They say how much memory there is and
    how many they are, unless that is given, and give a pipeline its names.
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
    """The job with the strategy that `execution.parallelism` means for these workers, and why."""
    match job.execution.parallelism:
        case "None":
            return job, ""
        case DataParallel(number):  # needs no look at the model
            strategy = strategies.DataParallel(number, strategies.AllReduce())
            execution = job.execution.with_changes(parallelism="None")
            changed = job.with_changes(strategy=strategy, execution=execution)
            return changed, f"DataParallel over {number} workers, as asked for"
        case "Automatic" if job.only_evaluates:
            return _over_all(job, sum(worker.is_alive for worker in workers))
    answer = ask("resolve", job, import_path=import_path, members=_members(workers))
    return JobSpec.from_json(answer["job_json"]), answer["reason"]


def _members(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """Return the workers that are alive, in order of name, as the process with torch takes them."""
    return [
        {
            "worker_id": worker.worker_id,
            "host": worker.address.rpartition(":")[0],
            "device": worker.device,
            "memory_bytes": worker.memory_bytes,
            "num_threads": worker.num_threads,
        }
        for worker in sorted(workers, key=lambda worker: worker.worker_id)
        if worker.is_alive
    ]


def _over_all(job: JobSpec, num_workers: int) -> tuple[JobSpec, str]:
    """Workers that evaluate exchange nothing, so each one more makes it faster."""
    chosen: strategies.Strategy = strategies.Local()
    reason = "Local: there is one worker"
    if num_workers > 1:
        chosen = strategies.DataParallel(num_workers, strategies.AllReduce())
        reason = f"DataParallel over {num_workers} workers: nothing is exchanged in an evaluation"
    execution = job.execution.with_changes(parallelism="None")
    return job.with_changes(strategy=chosen, execution=execution), reason


def _to_estimate(answer: Mapping[str, Any]) -> MemoryEstimate:
    return MemoryEstimate(**{**answer, "notes": tuple(answer["notes"])})
