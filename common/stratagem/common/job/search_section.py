"""The search space as a job file writes it: job fields by dotted path, each with its range.

    search_space:
      optimizer.lr: {low: 1.0e-4, high: 1.0, scale: log}
      optimizer.name: {choices: [sgd, adam]}
      optimizer.momentum: {low: 0.0, high: 0.99, when: {optimizer.name: [sgd]}}
      batch_size: {choices: [16, 32, 64], ordered: true}
      model.kwargs.depth: {low: 1, high: 4}      # whole bounds: a whole number
      model.kwargs.norm: {choices: [a, b], structural: true}

The form of the Rust programs (an object with `dimensions`) is read as well, and is the canonical
one. Knows no strategy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.json_forms import collecting, read_object
from stratagem.common.schema.json_text import JSON, check_json, join, not_one_of, unknown_key
from stratagem.common.strategy.search_space import SearchSpace, parse_search_space

_SCALES: Final = {"linear": "Linear", "log": "Log", "reverse_log": "ReverseLog"}
_RANGE_KEYS: Final = ("low", "high", "scale", "structural", "when")
_CHOICE_KEYS: Final = ("choices", "ordered", "structural", "when")
_CANONICAL: Final = re.compile(r"dimensions\[(\d+)\](?:\.dimension)?(?:\.(.+))?")


def read_search_space(value: object) -> SearchSpace:
    """A search space in either form."""
    if isinstance(value, SearchSpace):
        return value
    entries = read_object(value, "")
    if "dimensions" in entries:
        return parse_search_space(dict(entries), "")
    violations: list[Violation] = []
    dimensions = []
    for name, given in entries.items():
        with collecting(violations):
            dimensions.append(_dimension(str(name), read_object(given, str(name))))
    if violations:
        raise InvalidInputError(violations=violations)
    try:
        return parse_search_space({"dimensions": dimensions, "frozen": {}}, "").in_order()
    except InvalidInputError as error:
        names = [str(dimension["name"]) for dimension in dimensions]
        found = [
            Violation(_as_written(each.field, names), each.message) for each in error.violations
        ]
        raise InvalidInputError(violations=found) from None


def _as_written(field: str, names: Sequence[str]) -> str:
    """The place in this form of what is wrong at a place of the canonical one."""
    place = _CANONICAL.fullmatch(field)
    if place is None:
        return field
    return join(names[int(place[1])], (place[2] or "").removeprefix("options."))


SearchSpaceField: TypeAlias = Annotated[
    SearchSpace,
    GetPydanticSchema(
        lambda _source, _handler: core_schema.no_info_plain_validator_function(read_search_space)
    ),
]


def _dimension(name: str, given: Mapping[str, Any]) -> dict[str, JSON]:
    known = _CHOICE_KEYS if "choices" in given else _RANGE_KEYS
    for key in given:
        if key not in known:
            raise InvalidInputError.at(join(name, str(key)), unknown_key(str(key), known))
    inner = _choice(name, given) if "choices" in given else _range(name, given)
    if "structural" in given:
        inner["options"] = {"structural": given["structural"]}
    if "when" not in given:
        return inner
    condition = read_object(given["when"], join(name, "when"))
    if len(condition) != 1:
        message = f"names {len(condition)} fields; must name one, with the values it needs"
        raise InvalidInputError.at(join(name, "when"), message)
    ((parent, values),) = condition.items()
    return {
        "dim_type": "Conditional",
        "name": name,
        "parent": str(parent),
        "parent_values": check_json(values if isinstance(values, list) else [values]),
        "dimension": inner,
    }


def _choice(name: str, given: Mapping[str, Any]) -> dict[str, JSON]:
    ordered = given.get("ordered", False)
    if not isinstance(ordered, bool):
        raise InvalidInputError.at(join(name, "ordered"), f"{ordered!r} is not true or false")
    kind = "Ordinal" if ordered else "Categorical"
    return {"dim_type": kind, "name": name, "choices": given["choices"]}


def _range(name: str, given: Mapping[str, Any]) -> dict[str, JSON]:
    for key in ("low", "high"):
        if key not in given:
            raise InvalidInputError.at(join(name, key), "missing; or give choices")
    scale = given.get("scale", "linear")
    if scale not in _SCALES:
        raise InvalidInputError.at(join(name, "scale"), not_one_of(scale, _SCALES))
    is_whole = type(given["low"]) is int and type(given["high"]) is int
    return {
        "dim_type": "Int" if is_whole else "Float",
        "name": name,
        "low": given["low"],
        "high": given["high"],
        "scale": _SCALES[scale],
    }
