"""Compute each of the user's own metrics once, of all rows of a split, never of a batch.

A function gets the outputs and the targets of all rows, in order. An object with `update` and
`compute` (such as those of torchmetrics) is updated with batch after batch, in order, as in a
user's loop. So the numbers depend neither on the assignment of batches to members nor on the number
of members. The states of such objects cannot be merged instead: torchmetrics 1.9 puts the rows of
the merged one first, and takes means for single values. Only clients, whose rows are never
together, report their states in addition to the values, where the states are sums.
"""

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, StratagemError, UserCodeError
from stratagem.common.base.text import CLIENT_MEAN, is_printable
from stratagem.common.job import EvaluationSpec
from stratagem.common.numerics.keys import mix
from stratagem.worker.data.rows import generators_kept, seed_generators
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

# ---- Kept batches ----
#
# Outputs and targets of evaluated batches are kept on the CPU. Nestings of tuples, lists and dicts
# are taken apart into tensors, so that they can be sent as any other tensors, and put together
# again where the metrics are computed.

LAYOUT: Final = "layout"
"""Metadata key of the nesting of a batch's tensors."""

_TENSOR: Final = "tensor"


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """Output and target of one batch: their tensors in order, and their nesting as JSON."""

    layout: str
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def unpacked(self, tensors: Sequence[Tensor] | None = None) -> tuple[Any, Any]:
        """Return (output, target) with these tensors, or with copies of the batch's ones, which may
        be changed."""
        source = iter([tensor.clone() for tensor in self.tensors] if tensors is None else tensors)
        output, target = json.loads(self.layout)
        return _nested(output, source), _nested(target, source)


def kept_batch(output: Any, target: Any) -> KeptBatch:
    """Copy output and target to the CPU. Raises InvalidInputError for other than nested tensors."""
    tensors: list[Tensor] = []
    # Copies made in inference mode could not be changed outside of it.
    with torch.inference_mode(mode=False), torch.no_grad():
        layout = json.dumps(
            [_layout(output, "output", tensors), _layout(target, "target", tensors)]
        )
    return KeptBatch(layout, tuple(tensors))


def joined(batches: Sequence[KeptBatch]) -> tuple[Any, Any]:
    """Return (outputs, targets) of all rows of these batches, in order, in new memory. Raises
    InvalidInputError if the batches differ in more than their rows."""
    first = batches[0]
    if any(batch.layout != first.layout for batch in batches):
        raise _unlike("are nested in different ways")
    columns = list(zip(*(batch.tensors for batch in batches), strict=True))
    for column in columns:
        shapes = sorted({tuple(tensor.shape[1:]) for tensor in column})
        if any(tensor.dim() == 0 for tensor in column):
            raise _unlike("are single numbers, without rows")
        if len(shapes) > 1 or len({tensor.dtype for tensor in column}) > 1:
            kinds = sorted({f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in column})
            raise _unlike(f"differ in more than rows: {kinds[0]} and {kinds[1]}")
    return first.unpacked([torch.cat(column) for column in columns])


def named_tensors(split: str, batch: int, kept: KeptBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch under the names used for sending."""
    return {
        f"{split}/{number:04d}/{batch:012d}": tensor for number, tensor in enumerate(kept.tensors)
    }


def from_named(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], split: str
) -> list[KeptBatch]:
    """Return a split's batches in order, from the tensors named by `named_tensors`."""
    by_batch: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        of_split, number, batch = name.rsplit("/", 2)
        if of_split == split:
            by_batch.setdefault(batch, {})[number] = tensor
    layout = metadata.get(LAYOUT, "")
    return [
        KeptBatch(layout, tuple(rows for _, rows in sorted(by_batch[batch].items())))
        for batch in sorted(by_batch)
    ]


def _layout(value: Any, name: str, tensors: list[Tensor]) -> Any:
    match value:
        case Tensor():
            copy = torch.empty(value.shape, dtype=value.dtype)
            tensors.append(copy.copy_(value))
            return _TENSOR
        case None:
            return None
        case Mapping():
            return {
                str(key): _layout(item, f"{name}.{key}", tensors) for key, item in value.items()
            }
        case tuple() | list():
            kind = type(value).__name__ if type(value) in (tuple, list) else "tuple"
            inner = [_layout(item, f"{name}.{key}", tensors) for key, item in enumerate(value)]
            return [kind, *inner]
        case _:
            text = f"the {name} of a batch is a {type(value).__name__}, and no tensor"
            hint = "evaluation.keep can make tensors of it"
            raise InvalidInputError.at("evaluation.metrics", f"{text}; {hint}")


def _nested(layout: Any, tensors: Iterator[Tensor]) -> Any:
    match layout:
        case None:
            return None
        case dict():
            return {key: _nested(item, tensors) for key, item in layout.items()}
        case [kind, *inner]:
            values = [_nested(item, tensors) for item in inner]
            return values if kind == "list" else tuple(values)
        case _:
            return next(tensors)


def _unlike(text: str) -> InvalidInputError:
    hint = "evaluation.keep can make them alike, and an object with update() gets them one by one"
    return InvalidInputError.at(
        "evaluation.metrics", f"outputs or targets of batches {text}; {hint}"
    )


# ---- States that are sums ----
#
# Some metric objects have only states that are sums of fixed size. Such states of clients, each
# over its rows, may be added: the sum is the state of one object that has seen the rows of all. A
# metric of torchmetrics declares each such state by `dist_reduce_fx="sum"`; an object of any other
# kind names its attributes in `summed_states`. A metric is excluded if a state begins with a value
# other than zero, which would be counted once per client, or is a list of rows, which stay at
# clients.

MAX_NUMBERS: Final = 65_536
"""Maximum count of numbers in all metric states of a split, which are sent in one message."""
DECLARATION: Final = "summed_states"

_TORCHMETRICS_SUM: Final = "dim_zero_sum"


@dataclass(frozen=True, slots=True)
class SummedState:
    """One state of a metric, as 64-bit numbers: int64 for counts, else float64."""

    metric: str
    """The name of the metric, as "<split>.<metric>"."""
    name: str
    """The name of the attribute; in a collection, "<key>/<attribute>"."""
    values: np.ndarray


def num_summed(metric: object) -> int:
    """Return the count of numbers in a new metric's states; 0 if its states are not sums."""
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
    """Yield the states of a metric whose states are sums."""
    for prefix, member in _members(metric):
        for name in _declared(member):
            value = _as_array(getattr(member, name))
            if value is None:
                raise _misfit(named, f"its state {name} is no number or tensor of numbers any more")
            wide = np.float64 if value.dtype.kind == "f" else np.int64
            yield SummedState(named, f"{prefix}{name}", value.astype(wide))


def fill(named: str, metric: object, states: Sequence[SummedState]) -> None:
    """Set the states of a new metric, in the types and shapes that it has. Raises InvalidInputError
    if they do not fit."""
    unused = {state.name: np.asarray(state.values) for state in states}
    for prefix, member in _members(metric):
        for name in _declared(member):
            given = unused.pop(f"{prefix}{name}", None)
            setattr(member, name, _like(named, name, getattr(member, name), given))
        if hasattr(member, "_update_count"):
            member._update_count = 1  # else torchmetrics warns of values without rows
    if unused:
        raise _misfit(named, f"it has no state {next(iter(unused))}")


def _members(metric: object) -> list[tuple[str, Any]]:
    """Return the objects with states in a metric or collection, with name prefixes."""
    if isinstance(metric, nn.ModuleDict):  # a MetricCollection; its items() have shared states
        return [(f"{key}/", member) for key, member in sorted(metric.items())]
    return [("", metric)]


def _declared(member: Any) -> Sequence[str]:
    """Return the names of an object's states; none if one of them is not a sum."""
    declared = getattr(member, DECLARATION, None)
    if isinstance(declared, tuple | list) and all(isinstance(name, str) for name in declared):
        return sorted(declared)
    defaults, reductions = getattr(member, "_defaults", None), getattr(member, "_reductions", None)
    if not isinstance(defaults, Mapping) or not isinstance(reductions, Mapping):
        return ()
    children = member.children() if isinstance(member, nn.Module) else ()
    if any(hasattr(module, "_defaults") for child in children for module in child.modules()):
        return ()  # a metric of metrics, which has no states itself
    if all(getattr(reduce, "__name__", "") == _TORCHMETRICS_SUM for reduce in reductions.values()):
        return sorted(defaults)
    return ()


def _as_array(value: object) -> np.ndarray | None:
    """Return numbers as an array; None for anything else."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        value = value.numpy()
    if isinstance(value, int | float | np.generic | np.ndarray) and not isinstance(value, bool):
        array = np.asarray(value)
        return array if array.dtype.kind in "iuf" else None
    return None


def _like(named: str, name: str, state: Any, given: np.ndarray | None) -> Any:
    """Return numbers in the type, dtype and shape of one of the metric's states."""
    fresh = _as_array(state)
    if given is None or fresh is None or given.shape != fresh.shape:
        shape = "none" if given is None else str(given.shape)
        raise _misfit(named, f"its state {name} has another shape than what is given: {shape}")
    if (given.dtype.kind == "f") != (fresh.dtype.kind == "f"):
        raise _misfit(named, f"its state {name} counts other numbers than what is given")
    if fresh.dtype.kind in "iu":
        limits = np.iinfo(fresh.dtype)
        if given.min() < limits.min or given.max() > limits.max:
            raise _misfit(named, f"the sum of its states {name} does not fit {fresh.dtype}")
    if isinstance(state, Tensor):
        return torch.from_numpy(given.copy()).to(state.dtype)
    if isinstance(state, np.ndarray | np.generic):
        return (
            given.astype(fresh.dtype)[()]
            if isinstance(state, np.generic)
            else given.astype(fresh.dtype)
        )
    return given.item()


def _misfit(named: str, why: str) -> InvalidInputError:
    return InvalidInputError.at("evaluation.metrics", f'"{named}" cannot be merged: {why}')


# ---- Own metrics ----

Sums = list[SummedState]
Measure = Callable[[Sequence[KeptBatch], str, Sums | None], Any]
"""Computes (result name → value) of a metric over all batches of a split, in order. Its states are
appended to the list, if these are sums."""

DEFAULT_MAX_BYTES: Final = 1 << 30
MAX_VALUES: Final = 128
"""Maximum number of values of all own metrics: each is a named number in journal and reports."""
_MAX_NAME_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class OwnMetrics:
    """The user's own metrics of a job, keyed by name, and the batches kept for them."""

    measures: Mapping[str, Measure]
    keep_of: Callable[..., Any] | None
    max_bytes: int
    best: str | None
    makers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Makers of new metric objects, keyed by name, for metrics that are objects."""

    def keep(self, output: Any, target: Any, num_rows: int, num_all_rows: int) -> KeptBatch:
        """Keep a batch of a split with num_all_rows rows. Raises InvalidInputError if all batches
        of this size would be too large, so that the error does not depend on the number of
        workers."""
        if self.keep_of is not None:
            pair = self.keep_of(output, target)
            if not (isinstance(pair, tuple) and len(pair) == 2):
                text = f"returned a {type(pair).__name__} instead of a pair (output, target)"
                raise InvalidInputError.at("evaluation.keep", text)
            output, target = pair
        batch = kept_batch(output, target)
        num_bytes = batch.num_bytes * num_all_rows // max(num_rows, 1)
        if num_bytes > self.max_bytes:
            text = f"the outputs and targets of {num_all_rows} rows take {num_bytes} bytes; the "
            limit = f"limit is {self.max_bytes}. evaluation.keep names a function that keeps less "
            hint = "of each batch, such as (output.argmax(1), target)"
            raise InvalidInputError.at("evaluation.max_bytes", text + limit + hint)
        return batch

    def measured(
        self, split: str, batches: Sequence[KeptBatch], sums: Sums | None = None
    ) -> dict[str, float]:
        """Compute the metrics of a whole split, keyed by "<split>.<metric>"; none without rows.
        sums: receives the states that may be summed over clients."""
        values: dict[str, float] = {}
        for name, measure in self.measures.items() if batches else ():
            with generators_kept(), user_code(f"measuring {split}"):
                seed_generators(mix("metric", split, name))
                value = measure(batches, f"{split}.{name}", sums)
            values.update(_named_numbers(name, value))
        self._check(values)
        return {f"{split}.{name}": value for name, value in values.items()}

    def merged(
        self, split: str, states: Sequence[SummedState]
    ) -> tuple[dict[str, float], dict[str, StratagemError]]:
        """Compute the metrics from states summed over clients; return (metrics, errors by name of
        those that cannot be computed)."""
        values: dict[str, float] = {}
        failed: dict[str, StratagemError] = {}
        for name, make in self.makers.items():
            metric_states = [state for state in states if state.metric == f"{split}.{name}"]
            if not metric_states:
                continue
            try:
                values.update(_merged(split, name, make, metric_states))
            except (UserCodeError, InvalidInputError) as error:
                failed[f"{split}.{name}"] = error
        self._check(values, all_there=False)
        return {f"{split}.{name}": value for name, value in values.items()}, failed

    def are_sums(self, name: str) -> bool:
        """Return whether a metric is an object whose states are sums."""
        with user_code(f"making {name}"):
            return name in self.makers and 0 < num_summed(self.makers[name]()) <= MAX_NUMBERS

    def _check(self, values: Mapping[str, float], *, all_there: bool = True) -> None:
        if len(values) > MAX_VALUES:
            text = f"{len(values)} values of metrics of your own; at most {MAX_VALUES} are allowed"
            raise InvalidInputError.at("evaluation.metrics", text)
        if all_there and self.best is not None and values and self.best not in values:
            names = ", ".join(values)
            text = f'"{self.best}" is no number that is measured; measured are {names}'
            raise InvalidInputError.at("evaluation.best", text)


def make_own_metrics(
    spec: EvaluationSpec | None, entrypoints: EntryPoints, numerics: int
) -> OwnMetrics | None:
    """Make the user's own metrics of a job; None without any, and before `numerics` 3."""
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
    """Return the names of the user's own metrics, which are entry points, among these."""
    return tuple(name for name in names if ":" in name)


def _maker_of(target: Any) -> Callable[[], Any] | None:
    """Return a maker of metric objects; None for a function of outputs and targets."""
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
    except (TypeError, ValueError):  # raised for some functions in C
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
            for key, item in value.items():
                yield from _named_numbers(f"{name}.{key}", item)
        case list() | tuple():
            for index, item in enumerate(value):
                yield from _named_numbers(f"{name}.{index}", item)
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
