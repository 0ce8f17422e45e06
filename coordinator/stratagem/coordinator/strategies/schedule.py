"""Divide a synchronous run into segments at checkpoints and evaluations, and compute the metrics of
its commits.

A segment is the unit of commitment. Its boundary does not change the result, to the bit: workers
take a snapshot and go on.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Final

from stratagem.common.job import Every, JobSpec
from stratagem.common.job.fields import of_metric
from stratagem.common.strategy import Federated, local_steps_of

# ---- Segments ----

TRAIN_SPLIT = "train"
STREAM_CHECKPOINT_STEPS = 1000
"""Steps between two commits if rows come as a stream, unless the job says otherwise."""


@dataclass(frozen=True, slots=True)
class SegmentSchedule:
    """The optimizer steps of a run, and the periods of its evaluations and checkpoints, in steps; a
    run that resumes another one begins after from_step."""

    num_steps: int
    evaluate_every: int | None
    checkpoint_every: int
    from_step: int = 0

    def ends(self) -> tuple[int, ...]:
        """Return the step at which each segment ends, ascending; the last one is num_steps."""
        ends = _ends(self.num_steps, self.evaluate_every, self.checkpoint_every)
        return ends[bisect_right(ends, self.from_step) :] if self.from_step else ends

    def evaluates_at(self, step: int) -> bool:
        """Return True if an evaluation is due after this step."""
        if self.evaluate_every is None:
            return False
        return step == self.num_steps or step % self.evaluate_every == 0


def schedule_of(job: JobSpec, num_rows: Mapping[str, int]) -> SegmentSchedule:
    """Return the schedule of a job whose splits have this many rows. A job that trains nothing has
    one segment without steps, after which it is evaluated; a federated job has one segment per
    round, and a round counts as a step."""
    if job.only_evaluates:
        return SegmentSchedule(num_steps=0, evaluate_every=1, checkpoint_every=1)
    if isinstance(job.strategy, Federated):
        every = job.evaluation.every.count if job.evaluation else None
        return SegmentSchedule(job.strategy.rounds, evaluate_every=every, checkpoint_every=1)
    num_train_rows = num_rows[TRAIN_SPLIT]  # 0 where they come as a stream
    steps_per_epoch = ceil(num_train_rows / job.batch_size) or STREAM_CHECKPOINT_STEPS

    def steps_of(every: Every) -> int:
        return every.count * (steps_per_epoch if every.unit == "epoch" else 1)

    num_steps = job.steps if job.steps is not None else (job.epochs or 0) * steps_per_epoch
    evaluate_every = steps_of(job.evaluation.every) if job.evaluation else None
    checkpoint = job.checkpoint.every
    checkpoint_every = steps_of(checkpoint) if checkpoint else evaluate_every or steps_per_epoch
    local_steps = local_steps_of(job.strategy) or 1
    # Only where replicas are joined there is a state to commit; a given period ends there anyway.
    checkpoint_every = ceil(checkpoint_every / local_steps) * local_steps
    from_step = (job.initial.step or 0) if job.initial else 0
    return SegmentSchedule(num_steps, evaluate_every, checkpoint_every, from_step)


@lru_cache(maxsize=256)
def _ends(num_steps: int, evaluate_every: int | None, checkpoint_every: int) -> tuple[int, ...]:
    ends = set(range(checkpoint_every, num_steps, checkpoint_every))
    if evaluate_every is not None:
        ends.update(range(evaluate_every, num_steps, evaluate_every))
    return (*sorted(ends), num_steps)


# ---- Metrics of a commit ----
#
# A state is committed with the metrics of its training and of its evaluation.

LOGGED: Final = "evaluation."
"""The prefix of metrics that the user's on_evaluation has logged."""


def is_evaluated(job: JobSpec, name: str) -> bool:
    """Return True if a metric of a commit comes from the job's evaluations: it is a metric that the
    job names, one of several values of such a metric, its spread over clients, or a logged
    value."""
    spec = job.evaluation
    if spec is None:
        return False
    if name.startswith(LOGGED):
        return True
    name = of_metric(name)
    names = [f"{spec.split}.{metric}" for metric in ("loss", *spec.metrics)]
    return name in names or any(":" in n and name.startswith(f"{n}.") for n in names)


def commit_metrics(
    job: JobSpec, trained: Mapping[str, float], evaluated: Mapping[str, float] | None = None
) -> tuple[tuple[str, float], ...]:
    """Return the metrics of a commit, sorted by name.

    A training metric with the name of an evaluated one (`train.loss`, if the split that is
    evaluated is train) is left out: the commit would seem to have been evaluated.
    """
    others = {name: value for name, value in trained.items() if not is_evaluated(job, name)}
    return tuple(sorted({**others, **(evaluated or {})}.items()))


# ---- Sums of an evaluation ----
#
# Sums are keyed by name: "<split>/<metric>" is the sum of metric times weight,
# "<split>/weight:<metric>" the sum of the weights of a metric with weights of its own, and
# "<split>/weight:" that of all others.

WEIGHT = "weight:"
LOSS = "loss"
PERPLEXITY = "perplexity"


def added(sums: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each quantity over all parts, keyed by name, added in the order given."""
    totals: dict[str, float] = {}
    for part in sums:
        for name, value in sorted(part.items()):
            totals[name] = totals.get(name, 0.0) + value
    return totals


def means(totals: Mapping[str, float], metrics: Sequence[str]) -> dict[str, float]:
    """Return the weighted means from sums, keyed by "<split>.<metric>".

    perplexity is exp of the mean loss, so it has no sum of its own.
    """
    averages: dict[str, float] = {}
    for key, total in totals.items():
        split, _, name = key.partition("/")
        weight = totals.get(f"{split}/{WEIGHT}{name}", totals.get(f"{split}/{WEIGHT}", 0.0))
        if not name.startswith(WEIGHT) and weight > 0:
            averages[f"{split}.{name}"] = total / weight
    if PERPLEXITY in metrics:
        for split in sorted({key.partition("/")[0] for key in totals}):
            averages[f"{split}.{PERPLEXITY}"] = _exp(averages.get(f"{split}.{LOSS}", math.nan))
    return averages


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
