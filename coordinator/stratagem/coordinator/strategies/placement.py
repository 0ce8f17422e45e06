"""Place a run on workers by capability and numerics, the least loaded workers first."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated, describe, needs_peers
from stratagem.common.strategy.regions import are_named, members_of
from stratagem.coordinator.core.facts import Accepted, ClientBinding
from stratagem.coordinator.core.world import WorkerRecord, World

# ---- Placement ----

MAX_NAMES = 8
"""The most workers named in one sentence."""
_HOW_TO_TAKE_CODE: Final = (
    "their operator allows it with --allow-code, or installs the package and `code` is left out"
)

_WHAT_TUNNELS_CARRY: Final = (
    "has workers exchange with each other; Federated, ParameterServer and DataStore do not"
)


def eligible(job: JobSpec, world: World, fingerprint: str) -> list[WorkerRecord]:
    """Return the usable workers that suit a job, least loaded first: they take its code, have
    fitting numerics and, if the strategy needs that, are reachable for the others.

    fingerprint: the numerics of the run's members; "" before the first placement, which takes the
    numerics of most workers (of equals, those of the first worker).
    """
    wanted = job.code is None, needs_peers(job.strategy), job.execution.deterministic, fingerprint
    if wanted not in world.found:
        world.found[wanted] = tuple(_eligible(job, world, fingerprint))
    return list(world.found[wanted])


def _eligible(job: JobSpec, world: World, fingerprint: str) -> list[WorkerRecord]:
    workers = [
        worker
        for worker in world.usable()
        if not _refuses_code(job, worker) and not _is_apart(job, worker)
    ]
    if not job.execution.deterministic or not workers:
        return workers
    if not fingerprint:
        counts = Counter(w.capability.numerics_fingerprint for w in workers)
        fingerprint = max(counts, key=lambda f: counts[f])
    return [w for w in workers if w.capability.numerics_fingerprint == fingerprint]


def _refuses_code(job: JobSpec, worker: WorkerRecord) -> bool:
    """Return True if the job brings code and the worker takes none; a worker that takes signed or
    listed code decides itself."""
    return job.code is not None and worker.capability.code_policy == "none"


def _is_apart(job: JobSpec, worker: WorkerRecord) -> bool:
    """Return True if members of the run must reach each other, but none could reach this worker."""
    return worker.capability.tunnelled and needs_peers(job.strategy)


def is_site_of(job: JobSpec, worker: WorkerRecord) -> bool:
    """Return True if the worker has the local data that the job names, and can store the states of
    clients if they have any."""
    return job.data.worker_local in worker.capability.local_data and not _forgets(job, worker)


def why_forgetful(job: JobSpec, workers: list[WorkerRecord]) -> str:
    """Return a sentence about the workers that have the job's data but cannot store the states of
    its clients; "" if there are none."""
    having = [w for w in workers if job.data.worker_local in w.capability.local_data]
    if not (forgetful := [w for w in having if _forgets(job, w)]):
        return ""
    are = "has" if len(forgetful) == 1 else "have"
    return f"{_names(forgetful)} {are} no --data-dir, where clients of this job keep their states"


def _forgets(job: JobSpec, worker: WorkerRecord) -> bool:
    keeps = isinstance(job.strategy, Federated) and job.strategy.options.has_client_state
    return keeps and worker.capability.keeps_nothing


def why_apart(job: JobSpec, world: World) -> str:
    """Return a sentence about the usable workers that cannot be members because others do not reach
    them; "" if there are none."""
    apart = [worker for worker in world.usable() if _is_apart(job, worker)]
    if not apart:
        return ""
    are = "is reached through a tunnel" if len(apart) == 1 else "are reached through tunnels"
    return f"{_names(apart)} {are}, and {describe(job.strategy)} {_WHAT_TUNNELS_CARRY}"


def why_outdated(world: World) -> str:
    """Return a sentence about the workers too old to know the numerics rules of the run; "" if
    there are none."""
    if not (outdated := world.outdated()):
        return ""
    are = "is" if len(outdated) == 1 else "are"
    return (
        f"{_names(outdated)} {are} of an older version, which does not know the rules of this run "
        f"(numerics {world.numerics}) and has to be upgraded"
    )


def why_none(job: JobSpec, world: World, fingerprint: str) -> str:
    """Return a sentence that says why there are no workers for a job, or too few."""
    usable = world.usable()
    if not world.workers:
        return "no worker is registered"
    if not usable and world.outdated():
        return why_outdated(world)
    if not usable:
        states = sorted(
            f"{w.member.worker_id} ({_why_unusable(w)})" for w in world.workers.values()
        )
        return f"no worker is available: {', '.join(states)}"
    apart = why_apart(job, world)
    usable = [worker for worker in usable if not _is_apart(job, worker)]
    if not usable:
        return apart
    refusing = [worker for worker in usable if _refuses_code(job, worker)]
    if len(refusing) == len(usable):
        return f"no worker takes code from jobs: {_names(refusing)}; {_HOW_TO_TAKE_CODE}"
    fitting = eligible(job, world, fingerprint)
    if not fitting:
        taking = [worker for worker in usable if worker not in refusing]
        return f"the run began on other numerics than the workers left have: {_names(taking)}"
    others = len(usable) - len(refusing) - len(fitting)
    more = f"; {others} more have other numerics" if others else ""
    if refusing:
        more += f"; {len(refusing)} more take no code from jobs: {_names(refusing)}"
    more += "".join(f"; {why}" for why in (apart, why_outdated(world)) if why)
    return f"only {len(fitting)} {'fits' if len(fitting) == 1 else 'fit'}: {_names(fitting)}{more}"


def _why_unusable(worker: WorkerRecord) -> str:
    if worker.quarantine:
        return f"quarantined: {worker.quarantine}"
    return worker.reason or "draining"


def _names(workers: list[WorkerRecord]) -> str:
    names = sorted(str(worker.member.worker_id) for worker in workers)
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")


# ---- Fold tree ----
#
# The updates of a round are added by region, and the regions in order of their names.


def places_by_region(
    strategy: Federated, updates: Sequence[Accepted], roster: Sequence[ClientBinding]
) -> tuple[tuple[int, ...], ...]:
    """Return the indexes of the accepted updates that each region sums, for regions sorted by name.

    Regions without an update are left out; () if the job has no regions.
    """
    regions = strategy.options.regions
    if regions is None or isinstance(strategy.options.inner, Federated):
        return ()  # of regions that are clients each update is a sum already
    region_of: Mapping[Any, str] = {
        member: region for region, members in regions.items() for member in members
    }
    are_names = are_named(regions)
    places: dict[str, list[int]] = {region: [] for region in sorted(regions)}
    for place, accepted in enumerate(updates):
        binding = roster[accepted.client]
        places[region_of[binding.worker_id if are_names else binding.client]].append(place)
    return tuple(tuple(of_region) for of_region in places.values() if of_region)


def sites_of(strategy: Federated) -> frozenset[str] | None:
    """Return the sites that the job's regions name, which alone form the roster, or None."""
    regions = strategy.options.regions
    if regions is None or not are_named(regions):
        return None
    return frozenset(members_of(regions))
