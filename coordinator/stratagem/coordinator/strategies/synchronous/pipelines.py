"""ModelParallel spreads the nodes of a model over workers; this module also places the stages and
replicas.

A replica needs a worker for every partition: the worker of the given name, or one that carries the
tag, preferably the first registered one that has no partition of the run yet, else the one with
fewest. A worker that owns several partitions is one rank. Replicas share no worker. The functions
are pure functions of the job and of the present workers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from stratagem.common.base.ids import WorkerId
from stratagem.common.job import JobSpec
from stratagem.common.job.checks import check_stages
from stratagem.common.strategy import ModelParallel, Partition, Tag
from stratagem.coordinator.core.effects import ExchangeMethod
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.core.world import WorkerRecord, World
from stratagem.coordinator.strategies.placement import eligible, why_apart, why_none
from stratagem.coordinator.strategies.synchronous.party import Parts, PartyRun, Placed, SegmentRules
from stratagem.coordinator.strategies.synchronous.strategy import synchronous

# ---- Placement ----

Place = Callable[[JobSpec, PartyRun, World], Placed]


def place_replicas(spec: ModelParallel, num_replicas: int, min_replicas: int) -> Place:
    """Return a placement function for as many whole replicas as there are workers for; whole
    replicas stay as they are."""

    def place(job: JobSpec, run: PartyRun, world: World) -> Placed:
        workers = _by_registration(job, run, world)
        replicas = _whole_replicas(run, workers)
        is_whole = bool(replicas) and len(replicas) * _width(run) == len(run.members)
        if is_whole and run.finished:
            # Any change would return the run to its last commit: not before there is a new one.
            return Placed(run.members, run.ranks)
        if replicas and _spreads_better(spec, workers, run):
            replicas = []
        ranks = run.ranks if replicas else ()
        while len(replicas) < num_replicas:
            placed = _replica(
                spec, workers, {m.worker_id for replica in replicas for m in replica}, ranks
            )
            if placed is None:
                break
            members, ranks = placed
            replicas.append(members)
        if len(replicas) < min_replicas:
            return Placed(())
        return Placed(tuple(member for replica in replicas for member in replica), ranks)

    return place


def part_per_rank(members: tuple[Member, ...], ranks: tuple[int, ...]) -> Parts:
    """Return one part per rank: equal ranks of all replicas hold the same nodes of the model."""
    width = len(set(ranks)) or 1
    return tuple(tuple(members[rank::width]) for rank in range(min(width, len(members))))


def why_missing(spec: ModelParallel) -> Callable[[JobSpec, PartyRun, World], str]:
    """Return a function that makes a sentence about the partitions for which there is no worker."""

    def why(job: JobSpec, run: PartyRun, world: World) -> str:
        workers = _by_registration(job, run, world)
        missing = [
            f"partition {number} needs {_wanted(partition)}"
            for number, partition in enumerate(spec.partitions)
            if not _fitting(partition, workers)
        ]
        registered = f"registered are: {', '.join(map(_named, workers.values()))}"
        if not workers:
            registered = why_none(job, world, run.fingerprint)
        elif apart := why_apart(job, world):
            registered += f"; {apart}"
        if missing:
            return f"{'; '.join(missing)}; {registered}"
        return f"the replicas need workers of their own; {registered}"

    return why


def _spreads_better(
    spec: ModelParallel, workers: Mapping[WorkerId, WorkerRecord], run: PartyRun
) -> bool:
    """Return True if stages that share workers could now be spread over more workers."""
    replica = _replica(spec, workers, set(), ())
    return replica is not None and len(replica[0]) > _width(run)


def _by_registration(job: JobSpec, run: PartyRun, world: World) -> Mapping[WorkerId, WorkerRecord]:
    """Return the eligible workers, sorted by the time of their last registration, then by name."""
    fitting = sorted(
        eligible(job, world, run.fingerprint),
        key=lambda worker: (worker.registered_s, worker.member.worker_id),
    )
    return {worker.member.worker_id: worker for worker in fitting}


def _width(run: PartyRun) -> int:
    return len(set(run.ranks)) or 1


def _whole_replicas(
    run: PartyRun, workers: Mapping[WorkerId, WorkerRecord]
) -> list[tuple[Member, ...]]:
    """Return the replicas whose members are all present."""
    alive = {record.member for record in workers.values()}
    width = _width(run)
    replicas = [run.members[i : i + width] for i in range(0, len(run.members), width)]
    return [replica for replica in replicas if set(replica) <= alive]


def _replica(
    spec: ModelParallel,
    workers: Mapping[WorkerId, WorkerRecord],
    occupied: set[WorkerId],
    ranks: tuple[int, ...],
) -> tuple[tuple[Member, ...], tuple[int, ...]] | None:
    """Return (members by rank, rank of each partition) of one more replica; None if workers are
    missing.

    All replicas are divided in the same way: a further one has the ranks of the first.
    """
    free = {name: record for name, record in workers.items() if name not in occupied}
    owners: list[WorkerId] = []
    for number, partition in enumerate(spec.partitions):
        fitting = _fitting(partition, free)
        if ranks:
            same = [owners[i] for i in range(number) if ranks[i] == ranks[number]]
            others = {owners[i] for i in range(number) if ranks[i] != ranks[number]}
            fitting = [name for name in fitting if name not in others]
            fitting = [name for name in fitting if name in same] if same else fitting
        if not fitting:
            return None
        used = Counter(owners)
        owners.append(min(fitting, key=lambda name: used[name]))  # the first among equals
    order = list(dict.fromkeys(owners))
    if ranks:
        order = [owners[ranks.index(rank)] for rank in range(len(set(ranks)))]
    members = tuple(free[name].member for name in order)
    return members, tuple(order.index(name) for name in owners)


def _fitting(partition: Partition, workers: Mapping[WorkerId, WorkerRecord]) -> list[WorkerId]:
    target = partition.target
    if isinstance(target, Tag):
        return [name for name, w in workers.items() if target.tag in w.capability.tags]
    return [target.worker_id] if target.worker_id in workers else []


def _wanted(partition: Partition) -> str:
    target = partition.target
    return f"a worker tagged {target.tag!r}" if isinstance(target, Tag) else repr(target.worker_id)


def _named(worker: WorkerRecord) -> str:
    tags: Sequence[str] = worker.capability.tags
    name = str(worker.member.worker_id)
    return f"{name} ({', '.join(tags)})" if tags else name


# ---- Strategy ----
#
# The workers pass activations on, in one of three ways:
#
#     Direct      a batch goes through the stages as a whole, worker to worker
#     Pipeline    in micro-batches, several under way at once (1F1B,
#                 https://arxiv.org/abs/2006.09503)
#     DataStore   as Direct, through an object store
#
# Every stage is a sole copy: when a worker is lost, a replacement takes its partitions and all
# stages return to the last commit. The result has the same bits for any cut of the model.


def segment_rules(
    spec: ModelParallel,
    num_replicas: int = 1,
    min_replicas: int = 1,
    exchange: ExchangeMethod = ExchangeMethod.ALL_REDUCE,
) -> SegmentRules:
    """Return the rules of a party of one pipeline, or of several that share the rows of a batch.

    exchange: the exchange of the gradients of equal stages.
    """
    return SegmentRules(
        num_shards=num_replicas,
        min_members=1,
        exchange=exchange,
        parts_of=part_per_rank,
        is_sole_copy=True,
        place=place_replicas(spec, num_replicas, min_replicas),
        why_missing=why_missing(spec),
    )


def _shape(job: JobSpec) -> SegmentRules:
    assert isinstance(job.strategy, ModelParallel)
    return segment_rules(job.strategy)


STRATEGY = synchronous(_shape, check_stages)
