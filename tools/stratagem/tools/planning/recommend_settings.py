"""Settings with which a job fits the memory there is, and why they were chosen.

What changes least comes first: the job as it is, then passes over fewer rows (the same update),
then activations that are computed again (the same numbers, more time), then lower precision. Only
what the workers carry out is recommended.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import ExecutionSpec, JobSpec
from stratagem.common.job.execution import Accumulated, Checkpointed
from stratagem.common.strategy import (
    AllReduce,
    DataParallel,
    Local,
    ModelParallel,
    describe,
    dump_strategy,
    is_cut,
)
from stratagem.tools.planning.job_site import Site
from stratagem.tools.planning.memory_estimate import estimate_memory, rows_of_share
from stratagem.tools.planning.resolve_parallelism import (
    SAFETY_MARGIN,
    CandidateWorker,
    Fleet,
    StrategyChoice,
    choose,
)
from stratagem.tools.planning.step_memory import StepMemory, text_of
from stratagem.worker.plans.build import check_supported

_LOWER: Final = {
    "Full": ("Single", "Mixed", "Half"),
    "Single": ("Mixed", "Half"),
    None: ("Mixed", "Half"),
}
"""What may be tried below a precision; None: a model of its own dtypes."""
_INTERVALS: Final = (1, 4)


@dataclass(frozen=True, slots=True)
class JobRecommendation:
    """A job that fits, or the one that needs least where none does; why, in sentences."""

    job: JobSpec
    estimate: StepMemory
    fits: bool
    micro_batch: int
    """Rows that pass through the model together on one worker."""
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
    """Precision, gradient and parallelism for workers with so much memory each.

    num_workers: 1 unless given, or all members. members: workers that are there; they say the
    memory, unless it is given, and the names of a pipeline's. A tenth of the memory is left free.
    Raises InvalidInputError for memory or workers below 1.
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
    """Return the strategy that the job names or, where it leaves that open, one that suits these
    workers."""
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
    """Yield changed jobs, those that change least first; each is estimated only when it is
    requested."""

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
    """ceil(rows / the most rows that fit), of one worker's share; None when not even one does."""
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
