"""A plain job that trains what the winner of a population was trained with, step by step."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stratagem.client.course.population import Ancestor, Population
from stratagem.common.base.errors import NotFoundError
from stratagem.common.job import JobSpec, member_job
from stratagem.common.schema.json import JSON, thawed

SUFFIX: Final = "-replay"
MAX_NAME: Final = 64


def replayed(found: Population, job: Mapping[str, Any]) -> JobSpec:
    """Return a job that ends with the state of the population's winner, to the bit.

    job: of the population. It is the job of the first member of the winner's lineage, with the
    hyperparameters and the seed of each later one from the step on at which it has copied. Raises
    NotFoundError where there is no winner yet.
    """
    winner = found.best
    if winner is None:
        raise NotFoundError("no member has a score yet, so there is no winner to replay")
    whole = JobSpec.parse(thawed(job))
    past = found.past(winner.member, winner.generation)
    plain = member_job(whole, past[0].member, {}).document()
    settings: list[JSON] = [
        {
            "from_step": each.from_step,
            "seed": member_job(whole, each.member, {}).seed,
            "params": thawed(dict(each.params)),
        }
        for each in _trained(past, winner.step)
    ]
    total = plain.get("steps")
    last: dict[str, JSON] = {} if winner.step == total else {"last_step": winner.step}
    name = whole.name[: MAX_NAME - len(SUFFIX)] + SUFFIX
    schedule: JSON = {"settings": settings, **last}
    return JobSpec.parse({**plain, "name": name, "hyperparameter_schedule": schedule})


def _trained(past: Sequence[Ancestor], last_step: int) -> list[Ancestor]:
    """Return the stretches of a lineage that have trained at least a step."""
    ends = (*(each.from_step for each in past[1:]), last_step)
    return [each for each, end in zip(past, ends, strict=True) if each.from_step < end]
