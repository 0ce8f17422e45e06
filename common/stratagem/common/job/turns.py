"""The section `turns`: several optimizers of one model, which take turns within each step.

Every turn is a whole synchronous step over its own parameters, with an objective of its own.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Protocol

from pydantic import BeforeValidator, Field

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.job.optimizer import OptimizerSpec, check_groups, is_matched
from stratagem.common.schema.document import EntrypointName, Items, Name, NonEmptyText, Section
from stratagem.common.strategy import (
    AllReduce,
    DataParallel,
    Federated,
    Local,
    PopulationBased,
    Strategy,
    describe,
)

MAX_TURNS: Final = 8


class TurnSpec(Section):
    """One turn of every step. params: patterns of the names of the parameters that it trains, such
    as "generator.*"; the others are frozen meanwhile. step: computes what this turn minimises."""

    name: Name
    params: Annotated[
        Items[NonEmptyText],
        Field(min_length=1),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ]
    step: EntrypointName
    optimizer: OptimizerSpec

    def holds(self, name: str) -> bool:
        """Return whether the turn trains a parameter of this name."""
        return is_matched(name, self.params)


class JobWithTurns(Protocol):
    """What is asked of a job here."""

    @property
    def turns(self) -> Sequence[TurnSpec] | None: ...
    @property
    def loss(self) -> Any: ...
    @property
    def step(self) -> Any: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def callbacks(self) -> Any: ...
    @property
    def compression(self) -> Any: ...
    @property
    def phases(self) -> Any: ...
    @property
    def strategy(self) -> Strategy: ...


def check_turns(job: JobWithTurns) -> Iterator[Violation]:
    """Yield what is wrong with the turns of a job, and what cannot go with them."""
    turns = job.turns
    if turns is None:
        return
    if not 2 <= len(turns) <= MAX_TURNS:
        text = f"has {len(turns)} turns; 2 to {MAX_TURNS} are allowed, and one is a step"
        yield Violation("turns", text)
    names = [turn.name for turn in turns]
    for place, turn in enumerate(turns):
        if turn.name in names[:place]:
            yield Violation(f"turns[{place}].name", f"{turn.name!r} is the name of an earlier turn")
        if turn.optimizer.plateau is not None:
            text = "plateau is not allowed in turns, which follow no metric"
            yield Violation(f"turns[{place}].optimizer.schedule", text)
        schedule = turn.optimizer.schedule
        if schedule is not None and schedule.entrypoint is not None:
            text = "a schedule by entry point is not allowed in turns, which share no state of it"
            yield Violation(f"turns[{place}].optimizer.schedule", text)
    if job.callbacks is not None:
        yield Violation("callbacks", "are not allowed with turns: a step has several gradients")
    for name in ("loss", "step", "optimizer"):
        if getattr(job, name) is not None:
            yield Violation(name, "is not allowed beside turns, each of which has its own")
    for name in ("compression", "phases"):
        if getattr(job, name) is not None:
            yield Violation(name, "is not allowed with turns: it follows one gradient in each step")
    yield from _strategy(job.strategy)


def check_turn_parameters(turns: Sequence[TurnSpec], params: Sequence[tuple[str, int]]) -> None:
    """Raise InvalidInputError for a turn without a trained parameter, and for a parameter that is
    trained by no turn, or by two.

    params: names and numbers of dimensions of all that are trained.
    """
    violations = []
    for place, turn in enumerate(turns):
        if own := [(name, num_dims) for name, num_dims in params if turn.holds(name)]:
            check_groups(turn.optimizer, own)
            continue
        text = f"{', '.join(map(repr, turn.params))} fits no trained parameter"
        violations.append(Violation(f"turns[{place}].params", text))
    for name, _ in params:
        holding = [repr(turn.name) for turn in turns if turn.holds(name)]
        if len(holding) != 1:
            text = f"parameter {name!r} is in {' and '.join(holding) or 'no turn'}; each trained "
            violations.append(Violation("turns", f"{text}parameter is in one turn, or frozen"))
            break
    if violations:
        raise InvalidInputError(violations=violations)


def _strategy(strategy: Strategy) -> Iterator[Violation]:
    match strategy:
        case Local():
            return
        case PopulationBased() | Federated() | DataParallel(aggregation=AllReduce()):
            yield from _strategy(strategy.options.inner or Local())
        case other:
            text = f"are not allowed with strategy {describe(other)}; Local, DataParallel with "
            own = "AllReduce, Federated, and PopulationBased over them take turns"
            yield Violation("turns", text + own)
