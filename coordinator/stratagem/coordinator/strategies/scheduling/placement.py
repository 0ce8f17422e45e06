"""Placement of a run on workers: by capability and numerics, the least loaded first."""

from collections import Counter

from stratagem.common.job import JobSpec
from stratagem.coordinator.core.state import WorkerRecord, World

MAX_NAMES = 8
"""Number of workers named in one sentence."""


def eligible(job: JobSpec, world: World, fingerprint: str) -> list[WorkerRecord]:
    """Return usable workers whose numerics fit, least loaded first.

    fingerprint: what the run's members have; "" before the first placement, when the numerics
    that most workers share are taken (the first in order among equals).
    """
    workers = world.usable()
    if not job.execution.deterministic or not workers:
        return workers
    if not fingerprint:
        counts = Counter(w.capability.numerics_fingerprint for w in workers)
        fingerprint = max(counts, key=lambda f: counts[f])
    return [w for w in workers if w.capability.numerics_fingerprint == fingerprint]


def why_none(job: JobSpec, world: World, fingerprint: str) -> str:
    """Return why there are no workers, or not as many as are needed, as a sentence."""
    usable = world.usable()
    if not world.workers:
        return "no worker is registered"
    if not usable:
        states = sorted(
            f"{w.member.worker_id} ({w.reason or 'draining'})" for w in world.workers.values()
        )
        return f"no worker is available: {', '.join(states)}"
    if not eligible(job, world, fingerprint):
        return f"the run began on other numerics than the workers left have: {_names(usable)}"
    fitting = eligible(job, world, fingerprint)
    others = len(usable) - len(fitting)
    more = f"; {others} more have other numerics" if others else ""
    return f"only {len(fitting)} {'fits' if len(fitting) == 1 else 'fit'}: {_names(fitting)}{more}"


def _names(workers: list[WorkerRecord]) -> str:
    names = sorted(str(worker.member.worker_id) for worker in workers)
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
