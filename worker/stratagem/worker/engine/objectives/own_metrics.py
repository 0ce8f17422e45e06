"""The user's own metrics: each is computed once, of all rows of a split, and never of a batch.

A function gets the outputs and the targets of all rows, in order. An object with `update` and
`compute` (torchmetrics and others like it) is updated with batch after batch, in order, as in a
loop of the user's. Merging the states of such objects instead would not do: torchmetrics 1.9 puts
the rows of the merged one first, and takes means for single values. So the numbers depend neither
on who evaluated which batch nor on how many did. Only clients, whose rows are nowhere together, say
their states beside the values, where these are sums (summed_states.py). Must not know who that was.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, StratagemError, UserCodeError
from stratagem.common.base.text import is_printable
from stratagem.common.job import EvaluationSpec
from stratagem.common.job.fields import CLIENT_MEAN
from stratagem.common.numerics.keys import mix
from stratagem.worker.data.generators import generators_kept, seed_generators
from stratagem.worker.engine.objectives.kept_batches import KeptBatch, joined, kept_batch
from stratagem.worker.engine.objectives.summed_states import (
    MAX_NUMBERS,
    SummedState,
    fill,
    num_summed,
    read,
)
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

Sums = list[SummedState]
Measure = Callable[[Sequence[KeptBatch], str, Sums | None], Any]
"""Computes a metric of all batches of a split, in order; the name is that of what is measured, and
the list gets its states where these are sums."""

DEFAULT_MAX_BYTES: Final = 1 << 30
MAX_VALUES: Final = 128
"""Values of all own metrics together: each is a number with a name in journal and reports."""
_MAX_NAME_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class OwnMetrics:
    """The user's own metrics of a job, by name, and what is kept of each batch for them."""

    measures: Mapping[str, Measure]
    keep_of: Callable[..., Any] | None
    max_bytes: int
    best: str | None
    makers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Of those that are objects, what makes a new one."""

    def keep(self, output: Any, target: Any, num_rows: int, num_all_rows: int) -> KeptBatch:
        """Keeps a batch of a split of that many rows.

        Raises InvalidInputError if all batches, were they like this one, would be too large. So it
        is the same batch that is refused on any number of workers.
        """
        if self.keep_of is not None:
            pair = self.keep_of(output, target)
            if not (isinstance(pair, tuple) and len(pair) == 2):
                text = f"returned a {type(pair).__name__} instead of a pair (output, target)"
                raise InvalidInputError.at("evaluation.keep", text)
            output, target = pair
        kept = kept_batch(output, target)
        num_bytes = kept.num_bytes * num_all_rows // max(num_rows, 1)
        if num_bytes > self.max_bytes:
            text = f"the outputs and targets of {num_all_rows} rows take {num_bytes} bytes; the "
            limit = f"limit is {self.max_bytes}. evaluation.keep names a function that keeps less "
            hint = "of each batch, such as (output.argmax(1), target)"
            raise InvalidInputError.at("evaluation.max_bytes", text + limit + hint)
        return kept

    def measured(
        self, split: str, batches: Sequence[KeptBatch], sums: Sums | None = None
    ) -> dict[str, float]:
        """Computes the metrics of a whole split, by "<split>.<metric>"; none without rows.

        sums: gets the states of those that may be added to the states of others.
        """
        found: dict[str, float] = {}
        for name, measure in self.measures.items() if batches else ():
            with generators_kept(), user_code(f"measuring {split}"):
                seed_generators(mix("metric", split, name))
                value = measure(batches, f"{split}.{name}", sums)
            found.update(_named_numbers(name, value))
        self._check(found)
        return {f"{split}.{name}": value for name, value in found.items()}

    def merged(
        self, split: str, states: Sequence[SummedState]
    ) -> tuple[dict[str, float], dict[str, StratagemError]]:
        """Computes the metrics of these states of a split, each the sum over clients; and returns
        the errors of those that cannot be computed, by name."""
        found: dict[str, float] = {}
        failed: dict[str, StratagemError] = {}
        for name, make in self.makers.items():
            own = [state for state in states if state.metric == f"{split}.{name}"]
            if not own:
                continue
            try:
                found.update(_merged(split, name, make, own))
            except (UserCodeError, InvalidInputError) as error:
                failed[f"{split}.{name}"] = error
        self._check(found, all_there=False)
        return {f"{split}.{name}": value for name, value in found.items()}, failed

    def are_sums(self, name: str) -> bool:
        """True for a metric that is an object whose states are sums."""
        with user_code(f"making {name}"):
            return name in self.makers and 0 < num_summed(self.makers[name]()) <= MAX_NUMBERS

    def _check(self, found: Mapping[str, float], *, all_there: bool = True) -> None:
        if len(found) > MAX_VALUES:
            text = f"{len(found)} values of metrics of your own; at most {MAX_VALUES} are allowed"
            raise InvalidInputError.at("evaluation.metrics", text)
        if all_there and self.best is not None and found and self.best not in found:
            known = ", ".join(found)
            text = f'"{self.best}" is no number that is measured; measured are {known}'
            raise InvalidInputError.at("evaluation.best", text)


def make_own_metrics(
    spec: EvaluationSpec | None, entrypoints: EntryPoints, numerics: int
) -> OwnMetrics | None:
    """The user's own metrics of a job; None where there are none, or by the rules of `numerics` 2
    and before."""
    names = own_names(spec.metrics) if spec is not None and numerics >= 3 else ()
    if spec is None or not names:
        return None
    targets = {name: entrypoints.resolve(name, "evaluation.metrics") for name in names}
    made = {name: _maker_of(target) for name, target in targets.items()}
    makers = {name: make for name, make in made.items() if make is not None}
    measures = {
        name: _by_updates(name, makers[name]) if name in makers else _by_call(name, target)
        for name, target in targets.items()
    }
    keep = spec.keep and entrypoints.resolve(spec.keep, "evaluation.keep")
    is_own = spec.best is not None and spec.best.startswith(names)
    is_own = is_own and not str(spec.best).endswith(f".{CLIENT_MEAN}")
    limit = DEFAULT_MAX_BYTES if spec.max_bytes is None else spec.max_bytes
    best = spec.best if is_own else None
    return OwnMetrics(measures, keep or None, limit, best, makers)


def own_names(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the metrics that are the user's own: they are named by entry point."""
    return tuple(name for name in names if ":" in name)


def _maker_of(target: Any) -> Callable[[], Any] | None:
    """Return what makes an object that is updated; None of a function of outputs and targets."""
    if inspect.isclass(target) and _is_updated(target):
        return target
    if _is_updated(target):
        return lambda: copy.deepcopy(target)
    return target if _takes_nothing(target) else None


def _by_call(name: str, target: Callable[..., Any]) -> Measure:
    return lambda batches, _name, _sums: _checked(name, target(*joined(batches)))


def _by_updates(name: str, make: Callable[[], Any]) -> Measure:
    with user_code(f"making {name}"):
        made = make()
    if not _is_updated(made):
        text = f'"{name}" takes no arguments and returns a {type(made).__name__}: a metric '
        allowed = (
            "is a function of (outputs, targets), or returns an object with update and compute"
        )
        raise InvalidInputError.at("evaluation.metrics", text + allowed)

    def measure(batches: Sequence[KeptBatch], named: str, sums: Sums | None) -> Any:
        metric = make()
        num_numbers = 0 if sums is None else num_summed(metric)
        for batch in batches:
            metric.update(*batch.unpacked())
        if sums is not None and num_numbers:
            num_before = sum(state.values.size for state in sums)
            if num_before + num_numbers <= MAX_NUMBERS:
                sums.extend(read(named, metric))
        return metric.compute()

    return measure


def _is_updated(target: object) -> bool:
    return callable(getattr(target, "update", None)) and callable(getattr(target, "compute", None))


def _takes_nothing(target: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # of some that are written in C
        return False
    return _binds(signature) and not _binds(signature, None, None)


def _binds(signature: inspect.Signature, *args: object) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        text = f'"{name}" returned a tuple. It is called once with the outputs and targets of all '
        allowed = "rows, so it returns the value without a weight: a number, a mapping or a list"
        raise InvalidInputError.at("evaluation.metrics", text + allowed)
    return value


def _named_numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if len(name) > _MAX_NAME_CHARS or not is_printable(name):
        text = f"{name[:_MAX_NAME_CHARS]!r} is no name of at most {_MAX_NAME_CHARS} characters"
        raise InvalidInputError.at("evaluation.metrics", text)
    match value:
        case bool() | int() | float():
            yield name, float(value)
        case Tensor() | np.ndarray() | np.generic():
            count = value.numel() if isinstance(value, Tensor) else value.size
            if count > MAX_VALUES:
                text = f'"{name}" has {count} values; at most {MAX_VALUES} are allowed'
                raise InvalidInputError.at("evaluation.metrics", text)
            yield from _named_numbers(name, value.item() if count == 1 else value.tolist())
        case Mapping():
            for key, each in value.items():
                yield from _named_numbers(f"{name}.{key}", each)
        case list() | tuple():
            for index, each in enumerate(value):
                yield from _named_numbers(f"{name}.{index}", each)
        case _:
            text = f'"{name}" gave a {type(value).__name__}; allowed are numbers, tensors, and '
            raise InvalidInputError.at("evaluation.metrics", f"{text}mappings and lists of them")


def _merged(
    split: str, name: str, make: Callable[[], Any], states: Sequence[SummedState]
) -> dict[str, float]:
    with generators_kept(), user_code(f"measuring {split}"):
        seed_generators(mix("metric", split, name))
        metric = make()
        fill(name, metric, states)
        value = metric.compute()
    return dict(_named_numbers(name, value))
