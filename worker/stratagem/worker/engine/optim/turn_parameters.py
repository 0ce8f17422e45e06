"""The parameters of each turn of a job: every trained one belongs to exactly one of them."""

from collections.abc import Sequence

from torch import nn

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.job.objective.turns_section import TurnSpec
from stratagem.common.job.optimizer.optimizer_section import check_groups

NamedParams = Sequence[tuple[str, nn.Parameter]]


def by_turn(
    turns: Sequence[TurnSpec], params: NamedParams
) -> list[tuple[TurnSpec, list[tuple[str, nn.Parameter]]]]:
    """Returns each turn with its parameters."""
    return [(turn, [(n, p) for n, p in params if turn.holds(n)]) for turn in turns]


def check_turn_parameters(turns: Sequence[TurnSpec], params: NamedParams) -> None:
    """Raises InvalidInputError for a turn without a trained parameter, and for a parameter that is
    trained by no turn, or by two."""
    violations = []
    for place, (turn, own) in enumerate(by_turn(turns, params)):
        if own:
            check_groups(turn.optimizer, [(name, param.dim()) for name, param in own])
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
