"""Looks for faults of a job before it is submitted: in its document, its code, its data, and what
a cluster has for it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stratagem.client.sdk.job_input import Job, parse_job
from stratagem.client.sdk.torch_process import ask
from stratagem.client.sdk.views import Worker
from stratagem.common.base.errors import InvalidInputError, UnavailableError, Violation
from stratagem.common.job import JobSpec
from stratagem.common.job.strategy_rules import check_submitted
from stratagem.common.observe.findings import Finding, Level
from stratagem.common.strategy import ModelParallel, Partition, RemoteTarget, Strategy, Tag

_CHECK: Final = "check"
_NUM_NAMES: Final = 5
"""How many workers a finding lists."""


def check_job(
    job: Job | Callable[[], JobSpec],
    *,
    workers: Sequence[Worker] | None = None,
    device: str = "",
    import_path: Sequence[Path] = (),
    tell: Callable[[Finding], None] = lambda _: None,
    complain: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Return what is found about a job; those of level FAIL are faults. Nothing is submitted.

    job: as for `Client.submit`, or what reads it. workers: of the coordinator that it is meant for.
    device: cpu or cuda, if it is here; unless given, what is here. import_path: folders of the
    user's modules; unless given, this folder and that of the job file. tell: is given each finding
    as it is made. complain: is told what takes long.
    """
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        tell(finding)

    def add_all(found: Iterable[Finding]) -> None:
        for finding in found:
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
            tell=lambda found: add(_finding(found)),
            complain=complain,
        )
    except UnavailableError as error:
        found = "code, model and data are not checked"
        add(Finding("code", "", Level.WARN, found, str(error)))
    if workers is not None:
        add_all(_of_cluster(spec, workers))
    return findings


def _finding(told: Mapping[str, Any]) -> Finding:
    return Finding(**{**told, "level": Level(told["level"])})


def _document_faults(error: InvalidInputError) -> Iterator[Finding]:
    yield from _refused(error.violations)
    if not error.violations:
        yield Finding("document", "", Level.FAIL, str(error))
    advice = "mend the document first, and check again"
    yield Finding("code", "", Level.WARN, "code, model and data are not checked", advice)


def _refused(violations: Iterable[Violation]) -> Iterator[Finding]:
    for violation in violations:
        yield Finding("document", violation.field, Level.FAIL, violation.message)


def _of_cluster(spec: JobSpec, workers: Sequence[Worker]) -> Iterator[Finding]:
    """Yield whether the cluster has workers that fit the job."""
    alive = sorted((w for w in workers if w.is_alive), key=lambda worker: worker.worker_id)
    waits = "until there is one the run waits, up to placement_timeout_s"
    if not alive:
        yield Finding("workers", "", Level.WARN, "none is alive", waits)
        return
    listed = _listed([worker.worker_id for worker in alive])
    yield Finding("workers", "", Level.OK, f"{len(alive)} are alive: {listed}")
    yield from _of_code(spec, alive)
    for field, partition in _partitions(spec.strategy, "strategy"):
        target = partition.target
        if not any(_fits(target, worker) for worker in alive):
            found = f"no worker that is alive is {target}"
            yield Finding("workers", f"{field}.target", Level.WARN, found, waits)
    local = spec.data.worker_local
    if local is not None and not any(local in worker.local_data for worker in alive):
        found = f'no worker that is alive has "{local}"'
        yield Finding("workers", "data.worker_local", Level.WARN, found, waits)


def _of_code(spec: JobSpec, alive: Sequence[Worker]) -> Iterator[Finding]:
    """Yield whether workers take the code that the job brings along."""
    if spec.code is None:
        return
    refusing = [worker.worker_id for worker in alive if worker.code_policy == "none"]
    asking = [w.worker_id for w in alive if w.code_policy in ("signed", "digests")]
    advice = "have their operator set --allow-code, or install the package and leave `code` out"
    if len(refusing) == len(alive):
        found = f"no worker that is alive takes code from jobs: {_listed(refusing)}"
        yield Finding("workers", "code", Level.FAIL, found, advice)
    elif refusing:
        found = f"these take no code from jobs, and are left out: {_listed(refusing)}"
        yield Finding("workers", "code", Level.WARN, found, advice)
    if asking:
        found = f"these take only code that their operator has signed or listed: {_listed(asking)}"
        advice = "`stratagem code sign` prints what belongs into code.signature"
        yield Finding("workers", "code", Level.WARN, found, advice)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_NAMES]) + (", ..." if len(names) > _NUM_NAMES else "")


def _partitions(strategy: Strategy, field: str) -> Iterator[tuple[str, Partition]]:
    """Yield the partitions of the pipeline that the strategy or its replicas are, with fields."""
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
