"""Names the stored state from which a run's weights come, unless they are drawn from the seed.

A run begins from a stored state, which a digest names. What a person would rather name, an earlier
run or a file, is turned into that digest by the client before the job is submitted: what a run
began from then stands in its job, whatever happens to the run or the file later.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.base.ids import Digest, check_digest, check_run_id
from stratagem.common.job.sections import check_tensor_file
from stratagem.common.schema.document import Section, one_of, only_with
from stratagem.common.schema.field_types import Kwargs, Whole
from stratagem.common.schema.rules import rule
from stratagem.common.strategy import (
    Custom,
    FedAvg,
    Federated,
    FedProx,
    PopulationBased,
    Strategy,
)


def _check_which(value: str) -> str:
    if value not in ("final", "best") and not re.fullmatch("[0-9]{1,18}", value):
        raise InvalidInputError(f"{value!r} is not final, best or the number of a segment")
    return value


def _check_numbers(value: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InvalidInputError(f"{name} is {number!r}, not a number")
    return value


class InitialSpec(Section):
    """A stored state by its digest; or a run, or a safetensors file of the client.

    which: of a run, as in `stratagem download`: final, best or the number of a segment.
    trained_with: of a digest, the hyperparameters of the population's member whose state it is, for
    the error where it does not fit; the client finds them with the digest.
    resume: the run goes on from the step of the commit, with its optimizer and its schedule;
    without it the optimizer is new and the steps count from 0. step, metrics, average: of that
    commit, of a digest; the client finds them, too.
    """

    digest: (
        Annotated[Digest, AfterValidator(check_digest), Field(examples=["0123456789abcdef" * 4])]
        | None
    ) = None
    run: Annotated[str, AfterValidator(check_run_id)] | None = None
    which: Annotated[str, AfterValidator(_check_which)] | None = None
    file: Annotated[str, AfterValidator(check_tensor_file)] | None = None
    trained_with: Kwargs | None = None
    resume: Literal[True] | None = None
    step: Whole | None = None
    metrics: Annotated[Kwargs, AfterValidator(_check_numbers)] | None = None
    average: Annotated[Digest, AfterValidator(check_digest)] | None = None

    @rule
    def _one_source(self) -> Iterator[Violation]:
        yield from one_of(self, ("digest", "run", "file"))
        yield from only_with(self, "which", "run")
        yield from only_with(self, "trained_with", "digest")

    @rule
    def _wrong_to_resume(self) -> Iterator[Violation]:
        if self.resume is not None and self.file is not None:
            yield Violation("resume", "is not possible from a file, only from a run")
        if self.resume is not None and self.digest is not None and self.step is None:
            yield Violation("step", "missing; the steps behind the state that is resumed")
        for name in ("step", "metrics", "average"):
            if getattr(self, name) is not None and (self.resume is None or self.digest is None):
                yield Violation(name, "has a meaning only together with digest and resume")


def check_resumed(
    initial: InitialSpec | None, strategy: Strategy, num_steps: int | None
) -> Iterator[Violation]:
    """Yield why a job cannot go on from the state that it names.

    num_steps: of the whole training (rounds of a federated one), where the job says so.
    """
    if initial is None or initial.resume is None:
        return
    if reason := why_not_resumed(strategy):
        yield Violation("initial.resume", reason)
    name = "strategy.rounds" if isinstance(strategy, Federated) else "steps"
    if num_steps is not None and initial.step is not None and num_steps <= initial.step:
        text = f"{num_steps} must be more than the {initial.step} of the state that is resumed"
        yield Violation(name, text)


def why_not_resumed(strategy: Strategy) -> str:
    """Return why a commit of a run of this strategy is not all that another run needs to go on from
    it; "" where it is."""
    match strategy:
        case PopulationBased():
            return (
                "is not possible under PopulationBased: a commit is the state of one member; give "
                "its hyperparameters to a job without a population"
            )
        case Custom():
            return "is not possible under Custom: what it keeps besides a state is not known here"
        case Federated(aggregation=FedAvg() | FedProx()):
            return ""
        case Federated():
            kind = type(strategy.aggregation).__name__
            return f"is not possible with {kind}: what its server optimizer keeps is in no commit"
        case _:
            return ""
