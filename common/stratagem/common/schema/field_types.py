"""The types that fields of several documents have, each with its constraints.

A constraint is pydantic's own where it has one; a name or a spelling is checked by a function that
says what is allowed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    PlainValidator,
)
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from stratagem.common.base import limits
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema.document import DocumentValue
from stratagem.common.schema.frozen import FrozenDict, frozen, thawed
from stratagem.common.schema.json_text import JSON, check_json, not_one_of, sort_keys

MAX_COUNT: Final = 2**63 - 1  # what the journal's integer columns and torch's seeds can hold
MAX_UNSIGNED: Final = 2**64 - 1  # what the shared form of strategies can hold


def _read_mapping(value: object) -> FrozenDict:
    read = sort_keys(check_json(value))
    if not isinstance(read, dict):
        raise InvalidInputError(f"{value!r} is not a mapping")
    return FrozenDict(frozen(read))


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


# Keyword arguments of the user's own code: any JSON. In key order: equal jobs have equal text.
Kwargs: TypeAlias = Annotated[Mapping[str, Any], PlainValidator(_read_mapping)]
if TYPE_CHECKING:
    FrozenJSON: TypeAlias = JSON
else:  # any JSON, as it stands; written in key order
    FrozenJSON = Annotated[
        Any,
        PlainValidator(lambda value: frozen(check_json(value))),
        PlainSerializer(lambda value: sort_keys(thawed(value))),
    ]
_Item = TypeVar("_Item")
# A list of the document.
Items: TypeAlias = Annotated[tuple[_Item, ...], BeforeValidator(_as_tuple)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Whole: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
# A count of the shared form of strategies.
SharedCount: TypeAlias = Annotated[int, Field(ge=1, le=MAX_UNSIGNED)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
ZeroToOne: TypeAlias = Annotated[float, Field(ge=0, le=1)]
ZeroToBelowOne: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
NonEmptyText: TypeAlias = Annotated[str, Field(min_length=1)]
NonEmptyItems: TypeAlias = Annotated[
    tuple[_Item, ...], Field(min_length=1), BeforeValidator(_as_tuple)
]

_MODULE_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _check_entrypoint(value: str) -> str:
    if len(value) > 256 or not _MODULE_PATH.fullmatch(value):
        hint = colon_hint(value)
        raise InvalidInputError(f"{value!r} is not of the form package.module:name{hint}")
    return value


def colon_hint(value: str) -> str:
    """Return "; did you mean module:name?" for a text that is an entry point but for its colon,
    else ""."""
    module, _, name = value.rpartition(".")
    meant = f"{module}:{name}"
    if not _MODULE_PATH.fullmatch(meant):
        return ""
    return f"; an entry point is written module:name, did you mean {meant}?"


def _check_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise InvalidInputError(
            f"{value!r} is not 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-', a letter or digit first"
        )
    return value


EntrypointName: TypeAlias = Annotated[
    str, AfterValidator(_check_entrypoint), Field(examples=["my_module:my_function"])
]
Name: TypeAlias = Annotated[str, AfterValidator(_check_name), Field(examples=["my-name"])]
MetricName: TypeAlias = Annotated[
    str, AfterValidator(lambda value: (_check_entrypoint if ":" in value else _check_name)(value))
]


@dataclass(frozen=True, slots=True)
class UpTo:
    """The bound of a count of things that are kept one by one: without an end it would be an
    attack. It is lifted with the other limits, for jobs that were accepted before."""

    le: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: int) -> int:
        if value > self.le and limits.are_checked():
            raise PydanticKnownError("less_than_equal", {"le": self.le})
        return value


@dataclass(frozen=True, slots=True)
class OneKey:
    """The form of a value with one field as an object with one key, such as {Tag: gpu}: the key
    names the class, its value is the field. `words`: what may stand there as bare text."""

    kinds: Mapping[str, type[DocumentValue]]
    words: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(
        self, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._read, serialization=core_schema.plain_serializer_function_ser_schema(self._write)
        )

    def forms(self) -> tuple[str, ...]:
        """Return what may stand in the document, n for a number."""
        held = {
            name: next(iter(kind.__pydantic_fields__.values())) for name, kind in self.kinds.items()
        }
        letters = {name: "n" if info.annotation is int else "text" for name, info in held.items()}
        return (*self.words, *(f"{{{name}: {letter}}}" for name, letter in letters.items()))

    def _read(self, value: object) -> str | DocumentValue:
        if isinstance(value, DocumentValue) and type(value) in self.kinds.values():
            return value
        if isinstance(value, str) and value in self.words:
            return value
        if not isinstance(value, Mapping) or len(value) != 1:
            raise InvalidInputError(not_one_of(value, self.forms()))
        name, held = next(iter(value.items()))
        if name not in self.kinds:
            raise InvalidInputError(not_one_of(name, self.kinds))
        try:
            return self.kinds[name](held)  # type: ignore[call-arg]
        except InvalidInputError as error:
            # The one field of the class has no name of its own in the document.
            raise InvalidInputError.at(name, error.violations[0].message) from None

    def _write(self, value: str | DocumentValue) -> JSON:
        if isinstance(value, str):
            return value
        name = next(name for name, kind in self.kinds.items() if type(value) is kind)
        (held,) = value.__pydantic_serializer__.to_python(value, mode="json").values()
        return {name: held}
