"""States of metric objects that are numbers of fixed size and are added up, and nothing else.

Such states of clients, each over its own rows, may be added: the sum is what one object would hold
that has seen the rows of all. A metric of torchmetrics says so of each state by
`dist_reduce_fx="sum"`; an object of any other kind names its attributes in `summed_states`. A state
that begins with another value than zero would be counted once per client, and lists of rows stay
where they are: such metrics are none of these.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError

MAX_NUMBERS: Final = 65_536
"""Numbers of all such states of a split together, which leave with one message."""
DECLARATION: Final = "summed_states"

_TORCHMETRICS_SUM: Final = "dim_zero_sum"


@dataclass(frozen=True, slots=True)
class SummedState:
    """One state of a metric, as 64-bit numbers: int64 where it counts, else float64."""

    metric: str
    """ "<split>.<metric>"."""
    name: str
    """Of the attribute; in a collection, "<key>/<attribute>"."""
    values: np.ndarray


def num_summed(metric: object) -> int:
    """Return how many numbers the states of a new metric are; 0 where it is no metric of sums."""
    number = 0
    for _, member in _members(metric):
        names = _declared(member)
        if not names:
            return 0
        for name in names:
            value = _as_array(getattr(member, name, None))
            if value is None or value.size == 0 or value.any():
                return 0
            number += value.size
    return number


def read(named: str, metric: object) -> Iterator[SummedState]:
    """Yield the states of a metric of sums."""
    for prefix, member in _members(metric):
        for name in _declared(member):
            value = _as_array(getattr(member, name))
            if value is None:
                raise _misfit(named, f"its state {name} is no number or tensor of numbers any more")
            wide = np.float64 if value.dtype.kind == "f" else np.int64
            yield SummedState(named, f"{prefix}{name}", value.astype(wide))


def fill(named: str, metric: object, states: Sequence[SummedState]) -> None:
    """Give a new metric of sums these states, in the types and shapes of its own.

    Raises InvalidInputError where they are not those of the metric.
    """
    left = {state.name: np.asarray(state.values) for state in states}
    for prefix, member in _members(metric):
        for name in _declared(member):
            given = left.pop(f"{prefix}{name}", None)
            setattr(member, name, _like(named, name, getattr(member, name), given))
        if hasattr(member, "_update_count"):
            member._update_count = 1  # torchmetrics warns of values without rows
    if left:
        raise _misfit(named, f"it has no state {next(iter(left))}")


def _members(metric: object) -> list[tuple[str, Any]]:
    """Return the objects that hold states, with what stands before the names of theirs."""
    if isinstance(metric, nn.ModuleDict):  # a MetricCollection; its items() have shared states
        return [(f"{key}/", member) for key, member in sorted(metric.items())]
    return [("", metric)]


def _declared(member: Any) -> Sequence[str]:
    """Return the names of all states of an object; none where one of them is not added up."""
    declared = getattr(member, DECLARATION, None)
    if isinstance(declared, tuple | list) and all(isinstance(name, str) for name in declared):
        return sorted(declared)
    defaults, reductions = getattr(member, "_defaults", None), getattr(member, "_reductions", None)
    if not isinstance(defaults, Mapping) or not isinstance(reductions, Mapping):
        return ()
    if isinstance(member, nn.Module) and any(map(_has_states, member.children())):
        return ()  # a metric of metrics, whose states are none of its own
    if all(getattr(each, "__name__", "") == _TORCHMETRICS_SUM for each in reductions.values()):
        return sorted(defaults)
    return ()


def _has_states(module: nn.Module) -> bool:
    return any(hasattr(each, "_defaults") for each in module.modules())


def _as_array(value: object) -> np.ndarray | None:
    """Return whole or floating-point numbers as an array; None for anything else."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        value = value.numpy()
    if isinstance(value, int | float | np.generic | np.ndarray) and not isinstance(value, bool):
        array = np.asarray(value)
        return array if array.dtype.kind in "iuf" else None
    return None


def _like(named: str, name: str, own: Any, given: np.ndarray | None) -> Any:
    """Return numbers as a value of the same type, dtype and shape as one of the metric's own."""
    fresh = _as_array(own)
    if given is None or fresh is None or given.shape != fresh.shape:
        shape = "none" if given is None else str(given.shape)
        raise _misfit(named, f"its state {name} has another shape than what is given: {shape}")
    if (given.dtype.kind == "f") != (fresh.dtype.kind == "f"):
        raise _misfit(named, f"its state {name} counts other numbers than what is given")
    if fresh.dtype.kind in "iu":
        limits = np.iinfo(fresh.dtype)
        if given.min() < limits.min or given.max() > limits.max:
            raise _misfit(named, f"the sum of its states {name} does not fit {fresh.dtype}")
    if isinstance(own, Tensor):
        return torch.from_numpy(given.copy()).to(own.dtype)
    if isinstance(own, np.ndarray | np.generic):
        return (
            given.astype(fresh.dtype)[()]
            if isinstance(own, np.generic)
            else given.astype(fresh.dtype)
        )
    return given.item()


def _misfit(named: str, why: str) -> InvalidInputError:
    return InvalidInputError.at("evaluation.metrics", f'"{named}" cannot be merged: {why}')
