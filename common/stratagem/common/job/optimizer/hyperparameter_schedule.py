"""The hyperparameters and seeds that one state is trained with, by step.

What a population has found, as a section of a job that has none: the job is trained as the winner's
state was, member after member of its lineage.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Protocol

from stratagem.common.base.errors import Violation
from stratagem.common.schema.document import Section
from stratagem.common.schema.field_types import Count, Kwargs, NonEmptyItems, Whole
from stratagem.common.schema.rules import rule
from stratagem.common.strategy import Custom, Federated, PopulationBased, Strategy


class _Job(Protocol):
    """What is read here of a job."""

    @property
    def hyperparameter_schedule(self) -> "HyperparameterSchedule | None": ...
    @property
    def strategy(self) -> Strategy: ...
    @property
    def initial(self) -> Any: ...
    @property
    def evaluation(self) -> Any: ...
    @property
    def checkpoint(self) -> Any: ...
    def optimizers(self) -> Mapping[str, Any]: ...


class SettingSpec(Section):
    """What the job trains with from a step on.

    from_step: steps (rounds of a federation) behind the state that it begins with. seed: of all
    random numbers from there on, as in the job. params: fields of the job by dotted path, such as
    "optimizer.lr"; a field that is not named is as in the job.
    """

    from_step: Whole
    seed: Whole
    params: Kwargs


class HyperparameterSchedule(Section):
    """The settings in order of step, and the step after which the training ends.

    last_step: None is the end of the job; an earlier one ends the training there, with rates that
    are on their way to the end of the job.
    """

    settings: NonEmptyItems[SettingSpec]
    last_step: Count | None = None

    @rule
    def _in_order(self) -> Iterator[Violation]:
        steps = [setting.from_step for setting in self.settings]
        if steps[0]:
            text = f"{steps[0]} is not allowed; the first setting is from step 0 on"
            yield Violation("settings[0].from_step", text)
        for place, (before, step) in enumerate(pairwise(steps), start=1):
            if step <= before:
                text = f"{step} must be more than {before}, that of the setting before"
                yield Violation(f"settings[{place}].from_step", text)
        if self.last_step is not None and self.last_step <= steps[-1]:
            text = f"{self.last_step} must be more than {steps[-1]}, where the last setting begins"
            yield Violation("last_step", text)

    def ends(self, num_steps: int) -> tuple[int, ...]:
        """Return the step at which each setting ends, in a job of this many steps."""
        ends = (setting.from_step for setting in self.settings[1:])
        return (*ends, self.last_step or num_steps)


def check_schedule(job: _Job, num_steps: int | None) -> Iterator[Violation]:
    """Yield why the hyperparameters of a job cannot change where it says so.

    num_steps: of the whole training (rounds of a federated one), where the job says so.
    """
    schedule, name = job.hyperparameter_schedule, "hyperparameter_schedule"
    if schedule is None:
        return
    kind = type(job.strategy).__name__
    if isinstance(job.strategy, PopulationBased | Custom):
        yield Violation(name, f"is not possible with strategy {kind}, which decides by itself")
        return
    if num_steps is None:
        yield Violation("steps", f"missing; {name} counts in steps, for example steps: 1000")
        return
    if job.initial is not None and job.initial.resume:
        yield Violation("initial.resume", f"is not possible with {name}, which begins at step 0")
    if job.evaluation is not None and job.evaluation.stop is not None:
        yield Violation(
            "evaluation.stop", f"is not allowed with {name}, whose last_step is its end"
        )
    if any(optimizer.plateau is not None for optimizer in job.optimizers().values()):
        text = f"is not allowed with {name}: a plateau is followed under one setting only"
        yield Violation("optimizer.schedule", text)
    if schedule.last_step is not None and schedule.last_step > num_steps:
        text = f"{schedule.last_step} is more than the {num_steps} steps of the job"
        yield Violation(f"{name}.last_step", text)
    else:
        yield from _uncommitted(job, schedule, num_steps)


def _uncommitted(
    job: _Job, schedule: HyperparameterSchedule, num_steps: int
) -> Iterator[Violation]:
    """Yield the ends of settings at which no segment ends, whatever number of rows there is."""
    everies = {
        "checkpoint.every": job.checkpoint.every,
        "evaluation.every": job.evaluation.every if job.evaluation else None,
    }
    given = {field: every for field, every in everies.items() if every is not None}
    if isinstance(job.strategy, Federated):
        return  # each round is committed
    for field, every in given.items():
        if every.unit != "step":
            text = f"'{every}' is not allowed with hyperparameter_schedule, which counts in steps"
            yield Violation(field, text)
            return
    for end in schedule.ends(num_steps):
        if end != num_steps and all(end % every.count for every in given.values()):
            text = f"must be a divisor of {end}, so that what a setting has trained is committed"
            yield Violation("checkpoint.every", text)
            return
