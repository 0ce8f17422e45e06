"""Which workers a run gets: by capability and numerics, the least loaded first."""

from collections import Counter

from stratagem.common.job import JobSpec
from stratagem.coordinator.core.state import WorkerRecord, World


def eligible(job: JobSpec, world: World, fingerprint: str) -> list[WorkerRecord]:
    """Usable workers whose numerics fit, least loaded first.

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
    """Why no worker is eligible, as a sentence."""
    usable = world.usable()
    if not world.workers:
        return "no worker has registered yet"
    if not usable:
        states = sorted(
            f"{w.member.worker_id} ({w.reason or 'draining'})" for w in world.workers.values()
        )
        return f"no worker is available: {', '.join(states)}"
    if fingerprint and job.execution.deterministic:
        names = ", ".join(str(w.member.worker_id) for w in usable)
        return f"the run began on other numerics than the workers left have: {names}"
    return "all workers are in use"
