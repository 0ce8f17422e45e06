"""Recommend settings with which a job fits the available memory, and give the reasons.

Changes that matter least come first: the job as it is, then passes over fewer rows (the same
update), then activations that are computed again (the same numbers, more time), then lower
precision. Only settings that the workers carry out are recommended.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import WorkerId
from stratagem.common.job import ExecutionSpec, JobSpec
from stratagem.common.job import execution as forms
from stratagem.common.job.execution import Accumulated, Checkpointed
from stratagem.common.strategy import (
    AllReduce,
    DataParallel,
    Direct,
    Local,
    ModelParallel,
    Partition,
    Pipeline,
    Strategy,
    WorkerIdTarget,
    describe,
    dump_strategy,
    is_cut,
)
from stratagem.tools.memory.estimate import StepMemory, estimate_memory, rows_of_share, text_of
from stratagem.tools.memory.play import Site, play_forward
from stratagem.tools.memory.strategies import NodeCost, node_costs
from stratagem.worker.plans.build import check_supported

# ---- Strategy for the requested parallelism ----
#
# `Automatic` weighs computing against exchanging, with nominal speeds, so that the same job and the
# same workers always get the same answer, and gives the reason. A model that does not fit one
# worker is cut into a pipeline, where it can be cut.

SAFETY_MARGIN: Final = 0.1
"""The fraction of memory left free, for temporaries inside kernels and for fragmentation."""
CPU_THREAD_FLOPS: Final = 1e10
GPU_FLOPS: Final = 2e13
SAME_HOST_BYTES_PER_S: Final = 2e9
NETWORK_BYTES_PER_S: Final = 1e9
EXCHANGE_LATENCY_S: Final = 1e-3
"""A nominal latency. It and the speeds above only rank choices; they do not predict times."""
BACKWARD_COST: Final = 2
"""The number of operations of a backward pass, relative to the forward pass."""
MICRO_BATCHES_PER_STAGE: Final = 4
"""Micro-batches per stage at which a pipeline idles for about a fifth of the time."""


@dataclass(frozen=True, slots=True)
class CandidateWorker:
    """A worker that a run may use: its host, its device and its memory."""

    worker_id: str
    host: str = ""
    device: str = "cpu"
    memory_bytes: int = 0
    num_threads: int = 1

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def flops(self) -> float:
        return GPU_FLOPS if self.on_cuda else self.num_threads * CPU_THREAD_FLOPS


@dataclass(frozen=True, slots=True)
class Fleet:
    """The available workers, in the order in which they are chosen."""

    members: tuple[CandidateWorker, ...]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes that every worker may use: the least over all, where workers on one host
        share its memory."""
        return min((self._own(member) for member in self.members), default=0)

    @classmethod
    def of_equals(cls, number: int, device: str, memory_bytes: int = 0) -> "Fleet":
        """Return a fleet of equal workers on different hosts; memory_bytes: 0 if unknown."""
        numbers = range(number)
        members = (
            CandidateWorker(f"worker-{n}", f"host-{n}", device, memory_bytes) for n in numbers
        )
        return cls(tuple(members))

    @property
    def has_one_host(self) -> bool:
        return len({member.host for member in self.members}) == 1

    @property
    def link(self) -> str:
        return "shared memory" if self.has_one_host else "a network"

    def _own(self, member: CandidateWorker) -> int:
        if member.on_cuda:
            return member.memory_bytes
        return member.memory_bytes // sum(other.host == member.host for other in self.members)


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy that was chosen, and a sentence with the reason."""

    strategy: Strategy
    reason: str


def resolve(job: JobSpec, site: Site, fleet: Fleet) -> tuple[JobSpec, str]:
    """Return the job with a strategy for its `execution.parallelism`, and the reason; "" if the job
    asks for none. Raises InvalidInputError, naming the field, if that is impossible."""
    if job.execution.parallelism == "None":
        return job, ""
    choice = choose(job, site, fleet)
    execution = job.execution.with_changes(parallelism="None")
    return job.with_changes(strategy=choice.strategy, execution=execution), choice.reason


def choose(job: JobSpec, site: Site, fleet: Fleet) -> StrategyChoice:
    """Return the strategy that the job's `execution.parallelism` becomes on these workers."""
    match job.execution.parallelism:
        case "None":
            return StrategyChoice(job.strategy, "parallelism is None")
        case forms.DataParallel(number):
            strategy = DataParallel(number, AllReduce())
            return StrategyChoice(strategy, f"DataParallel over {number} workers, as asked for")
        case forms.PipelineParallel(number):
            return _cut(job, site, fleet, number, is_pipeline=True)
        case forms.ModelParallel(number):
            return _cut(job, site, fleet, number, is_pipeline=False)
        case "Automatic":
            return _automatic(alone(job), site, fleet)


def alone(job: JobSpec) -> JobSpec:
    """Return the job as one worker alone would run it."""
    execution = job.execution.with_changes(parallelism="None")
    return job.altered(strategy=Local(), execution=execution)


def _replicas(number: int) -> Strategy:
    return DataParallel(number, AllReduce()) if number > 1 else Local()


# ---- Automatic choice ----


def _automatic(job: JobSpec, site: Site, fleet: Fleet) -> StrategyChoice:
    if not fleet.members:
        raise InvalidInputError.at("execution.parallelism", "Automatic found no worker; start one")
    if len(fleet) == 1:
        return StrategyChoice(Local(), "Local: there is one worker")
    budget = int(fleet.memory_bytes * (1 - SAFETY_MARGIN)) or None
    most = min(len(fleet), job.batch_size)
    if most == 1:
        return StrategyChoice(Local(), "Local: a batch of one row cannot be divided")
    smallest = _estimate_replicas(job, site, most)
    if budget is not None and smallest.needed > budget:
        return _too_large(job, site, fleet, smallest, budget)
    counts = [
        n
        for n in range(1, most + 1)
        if n == most or budget is None or _estimate_replicas(job, site, n).needed <= budget
    ]
    return _fastest(job, site, fleet, counts)


def _estimate_replicas(job: JobSpec, site: Site, number: int) -> StepMemory:
    return estimate_memory(job.altered(strategy=_replicas(number)), site)


def _fastest(job: JobSpec, site: Site, fleet: Fleet, counts: Sequence[int]) -> StrategyChoice:
    estimate = _estimate_replicas(job, site, 1)
    flops = (1 + BACKWARD_COST) * play_forward(job, site, job.batch_size).flops
    speed = min(member.flops for member in fleet.members)
    bandwidth = SAME_HOST_BYTES_PER_S if fleet.has_one_host else NETWORK_BYTES_PER_S

    def seconds(number: int) -> float:
        exchange = 0.0
        if number > 1:
            sent = 2 * estimate.gradients * (number - 1) / number
            exchange = EXCHANGE_LATENCY_S + sent / bandwidth
        return flops / (number * speed) + exchange

    best = min(counts, key=lambda number: (seconds(number), number))
    work = f"{flops / 1e9:.3g} GFLOP and {text_of(estimate.gradients)} of gradients a step"
    if best == 1:
        reason = (
            f"Local: {work} over {fleet.link}; exchanging costs more than {len(fleet)} workers save"
        )
        return StrategyChoice(Local(), reason)
    reason = (
        f"DataParallel over {best} of {len(fleet)} workers: {work} over {fleet.link}; "
        f"a worker needs {text_of(_estimate_replicas(job, site, best).needed)}"
    )
    return StrategyChoice(_replicas(best), reason)


def _too_large(
    job: JobSpec, site: Site, fleet: Fleet, smallest: StepMemory, budget: int
) -> StrategyChoice:
    """Return, for a model too large for one worker, the shortest pipeline whose stages fit. Raises
    InvalidInputError if none does."""
    need = f"one of {len(fleet)} replicas needs {text_of(smallest.needed)} of {text_of(budget)}"
    for number in range(2, len(fleet) + 1):
        try:
            choice = _cut(job, site, fleet, number, is_pipeline=True)
        except InvalidInputError as error:
            raise InvalidInputError.at(
                "execution.parallelism", f"Automatic: {need}, and no pipeline can be made: {error}"
            ) from error
        piped = job.altered(strategy=choice.strategy)
        estimate = estimate_memory(piped, site)
        if estimate.needed <= budget:
            reason = f"{choice.reason}; {need}, a stage {text_of(estimate.needed)}"
            return replace(choice, reason=reason)
    raise InvalidInputError.at(
        "execution.parallelism",
        f"Automatic: {need}, and a pipeline over all workers needs {text_of(estimate.needed)}; "
        "`stratagem recommend` says what would fit",
    )


# ---- Cuts of a pipeline ----


def _cut(
    job: JobSpec, site: Site, fleet: Fleet, number: int, *, is_pipeline: bool
) -> StrategyChoice:
    name = "PipelineParallel" if is_pipeline else "ModelParallel"
    if number > len(fleet):
        text = f"{name} {number} needs as many workers; there are {len(fleet)}"
        raise InvalidInputError.at("execution.parallelism", text)
    rows = math.ceil(job.batch_size / (MICRO_BATCHES_PER_STAGE * number)) if is_pipeline else 1
    try:
        program, costs = node_costs(alone(job), site, rows)
    except InvalidInputError as error:
        text = f"{name} cannot cut this model: {error}"
        raise InvalidInputError.at("execution.parallelism", text) from error
    nodes = [call.node for call in program.calls]
    if number > len(nodes):
        text = f"{name} {number}: the model has only {len(nodes)} nodes to cut between"
        raise InvalidInputError.at("execution.parallelism", text)
    weights = _weights(nodes, costs, is_pipeline=is_pipeline)
    groups = balanced([weights[node] for node in nodes], number)
    partitions = tuple(
        Partition(
            tuple(nodes[group.start : group.stop]), WorkerIdTarget(WorkerId(member.worker_id))
        )
        for group, member in zip(groups, fleet.members, strict=False)
    )
    by = "operations" if is_pipeline else "parameters"
    protocol = Pipeline(rows) if is_pipeline else Direct()
    heaviest = max(sum(weights[node] for node in nodes[g.start : g.stop]) for g in groups)
    share = heaviest / (sum(weights.values()) or 1)
    reason = f"{name} over {number} workers, balanced by {by}: the heaviest has {share:.0%} of them"
    return StrategyChoice(ModelParallel(partitions, protocol), reason)


def _weights(
    nodes: Sequence[str], costs: Mapping[str, NodeCost], *, is_pipeline: bool
) -> dict[str, int]:
    counted = {node: costs[node].flops if is_pipeline else costs[node].parameters for node in nodes}
    return counted if any(counted.values()) else dict.fromkeys(nodes, 1)


def balanced(weights: Sequence[int], number: int) -> list[range]:
    """Cut a list of weights into `number` non-empty parts so that the heaviest part is as light as
    possible. Of equally good cuts, the one with the earliest cuts is taken."""
    if not 1 <= number <= len(weights):
        raise ValueError(f"{len(weights)} weights cannot make {number} pieces")
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[k][j]: (heaviest piece, last cut) of the first j weights in k pieces
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for pieces in range(1, number + 1):
        row = {}
        for end in range(pieces, len(weights) - (number - pieces) + 1):
            row[end] = min(
                (max(before[0], sums[end] - sums[start]), start)
                for start, before in best[-1].items()
                if start < end
            )
        best.append(row)
    cuts = [len(weights)]
    for pieces in range(number, 0, -1):
        cuts.append(best[pieces][cuts[-1]][1])
    cuts.reverse()
    return [range(a, b) for a, b in pairwise(cuts)]


# ---- Recommended settings ----

_LOWER: Final = {
    "Full": ("Single", "Mixed", "Half"),
    "Single": ("Mixed", "Half"),
    None: ("Mixed", "Half"),
}
"""The lower precisions to try, keyed by the job's precision; None: the model's own dtypes."""
_INTERVALS: Final = (1, 4)


@dataclass(frozen=True, slots=True)
class JobRecommendation:
    """The recommended job, which fits or, if none does, needs least memory; with the reasons in
    sentences."""

    job: JobSpec
    estimate: StepMemory
    fits: bool
    micro_batch: int
    """The number of rows that pass through the model together on one worker."""
    accumulation_steps: int
    reasons: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the recommendation as plain values, for JSON."""
        return {
            "fits": self.fits,
            "execution": self.job.document()["execution"],
            "strategy": dump_strategy(self.job.strategy),
            "micro_batch": self.micro_batch,
            "accumulation_steps": self.accumulation_steps,
            "estimate": self.estimate.document(),
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, slots=True)
class _Attempt:
    job: JobSpec
    estimate: StepMemory
    reason: str


def recommend(
    job: JobSpec,
    site: Site,
    memory_bytes: int | None,
    num_workers: int | None = None,
    *,
    members: Sequence[CandidateWorker] | None = None,
) -> JobRecommendation:
    """Recommend precision, gradient and parallelism for workers with this much memory each.

    num_workers: by default 1, or all members. members: existing workers; they give the memory,
    unless it is set, and the names for a pipeline. A tenth of the memory is left free. Raises
    InvalidInputError for memory or workers below 1.
    """
    fleet = _fleet(site, memory_bytes, num_workers, members)
    memory_bytes, num_workers = fleet.memory_bytes, len(fleet)
    if job.only_evaluates:
        text = "None trains nothing; `stratagem estimate` says what an evaluation needs"
        raise InvalidInputError.at("execution.gradient", text)
    choice = _parallelism(job, site, fleet)
    if members is None and isinstance(choice.strategy, ModelParallel) and not is_cut(job.strategy):
        text = (
            "worker-0, worker-1 and so on stand for your workers: with --coordinator they have "
            "their names, or submit with execution.parallelism, which finds them"
        )
        choice = replace(choice, reason=f"{choice.reason}; {text}")
    execution = job.execution.with_changes(parallelism="None", gradient="Full")
    base = job.altered(strategy=choice.strategy, execution=execution)
    budget = int(memory_bytes * (1 - SAFETY_MARGIN))
    least: _Attempt | None = None
    for attempt in _attempts(base, site, budget, num_workers):
        if attempt.estimate.needed <= budget:
            return _recommended(attempt, choice, budget, fits=True)
        if least is None or attempt.estimate.needed < least.estimate.needed:
            least = attempt
    assert least is not None  # the first attempt is the job as it is
    return _recommended(least, choice, budget, fits=False)


def _recommended(
    attempt: _Attempt, choice: StrategyChoice, budget: int, *, fits: bool
) -> JobRecommendation:
    need, free = text_of(attempt.estimate.needed), text_of(budget)
    last = f"A worker needs {need} of the {free} that may be used."
    if not fits:
        last = (
            f"Nothing that the workers carry out fits: {need} at least, and {free} may be used. "
            "Use more memory, or cut the model over more workers."
        )
    sentences = [f"{choice.reason}.", attempt.reason, last]
    execution = attempt.job.execution
    return JobRecommendation(
        job=attempt.job,
        estimate=attempt.estimate,
        fits=fits,
        micro_batch=attempt.estimate.rows,
        accumulation_steps=execution.accumulation_steps or 1,
        reasons=tuple(sentence for sentence in sentences if sentence),
    )


def _fleet(
    site: Site,
    memory_bytes: int | None,
    num_workers: int | None,
    members: Sequence[CandidateWorker] | None,
) -> Fleet:
    if num_workers is not None and num_workers < 1:
        raise InvalidInputError.at("workers", f"{num_workers} is not 1 or more")
    if memory_bytes is not None and memory_bytes <= 0:
        raise InvalidInputError.at("memory", f"{memory_bytes} bytes hold no model; must be > 0")
    if members is None:
        if memory_bytes is None:
            text = "missing; give a size such as 8GB, or a coordinator whose workers know theirs"
            raise InvalidInputError.at("memory", text)
        return Fleet.of_equals(num_workers or 1, site.device.type, memory_bytes)
    if not members or len(members) < (num_workers or 1):
        text = f"{num_workers or 1} asked for, and the coordinator has {len(members)}"
        raise InvalidInputError.at("workers", text)
    chosen = Fleet(tuple(members[: num_workers or len(members)]))
    if memory_bytes is not None:
        # Each has so much for itself, even on a shared host.
        shares = Counter(member.host for member in chosen.members if not member.on_cuda)
        chosen = Fleet(
            tuple(
                replace(member, memory_bytes=memory_bytes * max(1, shares[member.host]))
                for member in chosen.members
            )
        )
    if chosen.memory_bytes <= 0:
        raise InvalidInputError.at("memory", "the workers do not say how much they have; set it")
    return chosen


def _parallelism(job: JobSpec, site: Site, fleet: Fleet) -> StrategyChoice:
    """Return the job's strategy or, if the job leaves it open, one that suits these workers."""
    num_workers = len(fleet)
    if job.execution.parallelism not in ("None", "Automatic"):
        return choose(job, site, fleet)
    if not isinstance(job.strategy, Local) or num_workers == 1:
        return StrategyChoice(job.strategy, f"The strategy is {describe(job.strategy)}")
    automatic = job.execution.with_changes(parallelism="Automatic")
    try:
        return choose(job.altered(execution=automatic), site, fleet)
    except InvalidInputError as error:
        strategy = DataParallel(min(num_workers, job.batch_size), AllReduce())
        return StrategyChoice(strategy, f"DataParallel, because {error}")


def _attempts(job: JobSpec, site: Site, budget: int, num_workers: int) -> Iterator[_Attempt]:
    """Yield variants of the job, least changed first; each is only estimated when requested."""

    def attempt(execution: ExecutionSpec, reason: str) -> _Attempt:
        changed = job.altered(execution=execution)
        return _Attempt(changed, estimate_memory(changed, site, num_workers=num_workers), reason)

    own = job.execution.precision
    for precision in (own, *_LOWER.get(own, ())):
        execution = job.execution.with_changes(precision=precision)
        if not _is_supported(execution):
            continue
        before = own or "that of the model"
        words = "" if precision == own else f"Precision is lowered from {before} to {precision}. "
        plain = attempt(execution, f"{words}The whole share of a batch fits at once.")
        yield plain
        if (steps := _accumulation(plain, site, budget, num_workers)) is not None:
            rows = math.ceil(plain.estimate.rows / steps)
            sentence = f"{words}{rows} rows fit at once, so each share takes {steps} micro-batches."
            yield attempt(execution.with_changes(gradient=Accumulated(steps)), sentence)
        for interval in _INTERVALS:
            checkpointed = execution.with_changes(gradient=Checkpointed(interval))
            if _is_supported(checkpointed):
                sentence = f"{words}Activations are kept at every block number {interval} only."
                yield attempt(checkpointed, sentence)


def _accumulation(plain: _Attempt, site: Site, budget: int, num_workers: int) -> int | None:
    """Return the number of micro-batches into which to cut a worker's share so that each fits into
    memory; None if not even one row fits."""
    job, share = plain.job, rows_of_share(plain.job)
    if share is None or not _is_supported(job.execution.with_changes(gradient=Accumulated(2))):
        return None
    num_shards = math.ceil(job.batch_size / share)

    def need(rows: int) -> int:
        smaller = job.altered(batch_size=rows * num_shards)
        return estimate_memory(smaller, site, num_workers=num_workers).needed

    one, whole = need(1), plain.estimate.needed
    if one > budget:
        return None
    # Memory grows about linearly with rows, so a straight line finds nearly the right number.
    guess = 1 + (budget - one) * (share - 1) // max(1, whole - one)
    low, high = 1, share  # the largest micro-batch that fits is in [low, high)
    for middle in (guess, guess + 1):
        if low < middle < high:
            low, high = (middle, high) if need(middle) <= budget else (low, middle)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= budget else (low, middle)
    return math.ceil(share / low)


def _is_supported(execution: ExecutionSpec) -> bool:
    try:
        check_supported(execution.with_changes(profiling=False))
    except InvalidInputError:
        return False
    return True
