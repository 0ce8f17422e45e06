"""Two small JSON forms that travel with strategies: a `Value` and a `Distribution`.

A Value is {"type": <kind>, "data": <content>}; a Distribution is "Local", "Any" or
{"Remote": <target>}. Owns their reading and writing and what makes a tensor value sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema.json_forms import (
    ANY_JSON,
    REAL,
    TEXT,
    UNSIGNED,
    JsonForm,
    ObjectForm,
    list_of,
    plain,
    read_object,
)
from stratagem.common.schema.json_text import JSON, join, not_one_of
from stratagem.common.strategy import RemoteTarget
from stratagem.common.strategy.json_form import TARGET


@dataclass(frozen=True, slots=True)
class Tensor:
    """Numbers in row-major order with their shape."""

    values: tuple[float, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.shape, default=0) < 0 or math.prod(self.shape) != len(self.values):
            text = f"{list(self.shape)} does not hold {len(self.values)} values"
            raise InvalidInputError.at("shape", text)


@dataclass(frozen=True, slots=True)
class Text:
    """A text."""

    data: str


@dataclass(frozen=True, slots=True)
class Json:
    """Any JSON value."""

    data: JSON


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes, written as a list of numbers."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Object:
    """A list of JSON values that belong to an object of the caller's."""

    data: tuple[JSON, ...]


@dataclass(frozen=True, slots=True)
class Empty:
    """No value."""


Value: TypeAlias = Tensor | Text | Json | Bytes | Object | Empty


class Place(StrEnum):
    """The place where something may run when no worker is named."""

    LOCAL = "Local"
    ANY = "Any"


@dataclass(frozen=True, slots=True)
class Remote:
    """A distribution over the workers that the target names."""

    target: RemoteTarget


Distribution: TypeAlias = Place | Remote


def parse_value(source: object, path: str = "value") -> Value:
    """A value from its JSON object."""
    entries = read_object(source, path)
    kind = entries.get("type")
    if kind == "Empty":
        return Empty()
    if not isinstance(kind, str) or kind not in _VALUES:
        raise InvalidInputError.at(join(path, "type"), not_one_of(kind, [*_VALUES, "Empty"]))
    if "data" not in entries:
        raise InvalidInputError.at(join(path, "data"), "missing")
    make, form = _VALUES[kind]
    return make(form.read(entries["data"], join(path, "data")))


def dump_value(value: Value) -> dict[str, JSON]:
    """Return the JSON object of a value."""
    kind = type(value).__name__
    match value:
        case Empty():
            return {"type": kind}
        case Tensor():
            return {"type": kind, "data": _TENSOR.write(value)}
        case _:
            return {"type": kind, "data": _VALUES[kind][1].write(value.data)}


def parse_distribution(source: object, path: str = "distribution") -> Distribution:
    """A distribution from its JSON value."""
    if isinstance(source, str):
        if source not in [*Place]:
            raise InvalidInputError.at(path, not_one_of(source, [*Place, "Remote"]))
        return Place(source)
    entries = read_object(source, path)
    if list(entries) != ["Remote"]:
        raise InvalidInputError.at(path, "needs exactly one key, Remote")
    target: RemoteTarget = TARGET.read(entries["Remote"], join(path, "Remote"))
    return Remote(target)


def dump_distribution(distribution: Distribution) -> JSON:
    """The JSON value of a distribution."""
    match distribution:
        case Remote(target):
            return {"Remote": TARGET.write(target)}
        case place:
            return str(place)


def _read_bytes(value: object, path: str) -> bytes:
    numbers = list_of(UNSIGNED).read(value, path)
    try:
        return bytes(numbers)
    except ValueError:
        raise InvalidInputError.at(path, "holds a number that is no byte, 0 to 255") from None


_TENSOR: Final = plain(ObjectForm(Tensor, {"values": list_of(REAL), "shape": list_of(UNSIGNED)}))
_VALUES: Final[Mapping[str, tuple[Callable[[Any], Value], JsonForm]]] = {
    "Tensor": (lambda tensor: tensor, _TENSOR),
    "Text": (Text, TEXT),
    "Json": (Json, ANY_JSON),
    "Bytes": (Bytes, JsonForm(_read_bytes, list)),
    "Object": (Object, list_of(ANY_JSON)),
}
