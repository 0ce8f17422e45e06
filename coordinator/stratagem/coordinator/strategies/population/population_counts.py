"""What the status of a population shows besides its generations: the best member, and copies."""

from stratagem.common.job import JobSpec
from stratagem.coordinator.core.strategy_contract import RunCounts
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.population.population_run import (
    PopulationRun,
    is_scored,
    spec_of,
)


def counts(job: JobSpec, value: PopulationRun) -> RunCounts:
    """Return how far the open generation is, and what the newest closed one has shown."""
    is_even = not spec_of(job).options.asynchronous
    num_scored = sum(map(is_scored, value.members)) if is_even else 0
    newest = value.generation - 1
    origin = value.origins.get(newest)
    best = None if origin is None else _score(job, value, origin.member, newest)
    return RunCounts(
        unit="generations",
        part_done=num_scored / (len(value.members) + 1),  # the last part is the exploitation
        is_even=is_even,
        loss=0.0 if origin is None else _loss(value, origin.member),
        best=best,
        best_member=None if origin is None else origin.member,
        num_copied=_num_copied(job, value) if is_even else 0,
    )


def _score(job: JobSpec, value: PopulationRun, member: int, generation: int) -> float | None:
    """Return a member's score in a generation as the metric that it is."""
    score = value.members[member].scores[generation - 1]
    evaluation = job.evaluation
    assert evaluation is not None
    return score if score is None or evaluation.mode == "max" else -score


def _loss(value: PopulationRun, member: int) -> float:
    return nested.progress(value.members[member].child).loss


def _num_copied(job: JobSpec, value: PopulationRun) -> int:
    """Return the members that began the open generation from another one's state."""
    begun_at = (value.generation - 1) * (job.steps_per_generation or 1)
    if begun_at == 0:
        return 0
    return sum(member.schedule[-1].from_step == begun_at for member in value.members)
