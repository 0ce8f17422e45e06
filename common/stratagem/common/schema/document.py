"""This module holds what all document classes (job, graph, strategy) share: strict reading, clear
errors, one canonical form.

A field is declared once, with its type, its constraints and its default; pydantic and the
reference documentation use that declaration. Errors become one `InvalidInputError` with one
violation per wrong field, in our words.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    Self,
    TypeAlias,
    TypeVar,
    dataclass_transform,
)

import structlog
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, SchemaSerializer, core_schema

from stratagem.common.base import ids
from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.json import (
    JSON,
    FrozenDict,
    check_json,
    frozen,
    in_order,
    join,
    not_one_of,
    sort_keys,
    suggest,
    thawed,
)
from stratagem.common.schema.messages import to_invalid_input
from stratagem.common.schema.rules import Partial, contradictions, for_example, partial_class

# ---- Documents ----

_log = structlog.get_logger(__name__)


class Section(BaseModel):
    """A mapping of the job document: frozen, strict about types, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # and refused where they are written, not made null
        arbitrary_types_allowed=True,
    )

    if not TYPE_CHECKING:  # type checkers see the constructor that pydantic derives from the fields

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:  # also where a mapping is read: pydantic comes here
                raise to_invalid_input(error, type(self)) from None

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return the section from plain values, as JSON, YAML or TOML give them."""
        plain = check_json(value)
        try:
            section = cls.model_validate(plain)
        except ValidationError as error:
            raise _said(error, cls, plain) from None
        for key, hint in _ignored_keys(plain, section, ""):
            _log.warning(f"unknown key is ignored{hint}", key=key)
        return section

    def document(self) -> dict[str, JSON]:
        """Return the section as plain values: fields in declared order, kwargs sorted by key,
        absent values left out. Raises InvalidInputError for a number that is not finite."""
        written: dict[str, JSON] = check_json(self.model_dump(mode="json"))  # type: ignore[assignment]
        return written

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated as a whole; None removes a field."""
        if isinstance(self, Partial):
            return self.altered(**changes)
        given = {name: vars(self)[name] for name in self.model_fields_set}
        fields = {**given, **changes}
        return type(self)(**{name: value for name, value in fields.items() if value is not None})

    def altered(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, each validated alone but not against the others:
        for trial values that nobody writes as a document."""
        given = {name: value for name, value in changes.items() if value is not None}
        try:
            read = partial_class(type(self)).model_validate(given)
        except ValidationError as error:
            raise _said(error, type(self)) from None
        fields = type(self).model_fields
        return super().model_copy(
            update={
                name: vars(read)[name] if name in given else fields[name].get_default()
                for name in changes
            }
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy as pydantic's method does, but validate the updated fields."""
        return self.with_changes(**update) if update else super().model_copy(deep=deep)

    @model_validator(mode="wrap")
    @classmethod
    def _say_what_is_wrong(cls, value: object, read: Callable[[object], Self]) -> Self:
        try:
            made = read(value)
        except ValidationError as error:
            raise to_invalid_input(error, cls, value) from None
        is_new = made is not value and not isinstance(made, Partial)
        if is_new and (violations := [*contradictions(made)]):
            wrong = InvalidInputError(violations=violations)
            wrong.readable = partial_class(cls).model_construct(made.model_fields_set, **vars(made))
            raise wrong
        return made

    @model_serializer(mode="wrap")
    def _without_what_is_absent(self, write: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        return {name: plain for name, plain in write(self).items() if plain is not None}


class _MadeInCode(type):
    """Metaclass of document values: for invalid arguments they raise InvalidInputError, not
    pydantic's error."""

    if not TYPE_CHECKING:  # type checkers see the constructor that is derived from the fields

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValidationError as error:
                raise _said(error, cls) from None


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class DocumentValue(metaclass=_MadeInCode):
    """A frozen value of the document that code constructs with positional arguments and
    destructures with `match`.

    In JSON it is an object: if it has a `tag`, that key holds the name of the class (or `name`);
    then come the fields as declared. Unknown keys are ignored and logged, as other programs that
    read strategies do. Extras (`is_extras`) exist only in this project: in them unknown keys are
    refused, fields equal to their defaults are not written, and extras without any field to write
    are left out.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __pydantic_fields__: ClassVar[dict[str, FieldInfo]]
    __pydantic_serializer__: ClassVar[SchemaSerializer]

    def __init_subclass__(cls, *, tag: str = "", name: str = "", is_extras: bool = False) -> None:
        if tag:
            name = name or cls.__name__
            cls.__annotations__ = {tag: Literal[name], **cls.__annotations__}
            setattr(cls, tag, dataclasses.field(default=name, kw_only=True, repr=False))
        config = ConfigDict(
            strict=True,
            allow_inf_nan=False,
            ser_json_inf_nan="constants",
            extra="forbid" if is_extras else "ignore",
        )
        pydantic_dataclass(frozen=True, config=config)(cls)

    def __post_init__(self) -> None:
        if not isinstance(self, Partial):
            refuse([*contradictions(self)])

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Self], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = dict(handler(source))
        if schema["type"] != "dataclass":
            return schema  # made before, for another class that holds this one
        schema["strict"] = False  # a mapping may stand for the instance; its fields stay strict
        return core_schema.no_info_wrap_validator_function(
            cls._read,
            schema,
            ref=schema.pop("ref"),  # a strategy in a strategy is read in the same way
            serialization=core_schema.wrap_serializer_function_ser_schema(
                cls._write, schema=schema
            ),
        )

    @classmethod
    def _read(cls, value: object, read: Callable[[object], Self]) -> Self:
        try:
            return read(value)
        except ValidationError as error:
            raise to_invalid_input(error, cls, value) from None

    @classmethod
    def _write(cls, made: Self, write: Callable[[Self], dict[str, JSON]]) -> dict[str, JSON]:
        is_extras = cls.__pydantic_config__["extra"] == "forbid"  # type: ignore[attr-defined]
        written = {}
        for name, plain in write(made).items():
            info, value = cls.__pydantic_fields__[name], getattr(made, name)
            is_default = value == info.get_default(call_default_factory=True)
            has_nothing_left = isinstance(value, DocumentValue) and not plain and is_default
            if not (has_nothing_left or (is_extras and is_default and not info.kw_only)):
                written[name] = plain
        return written


def _said(error: ValidationError, cls: type, document: JSON = None) -> InvalidInputError:
    """Convert a pydantic error to InvalidInputError, with violations in the document's order."""
    violations = to_invalid_input(error, cls).violations
    return InvalidInputError(violations=in_order(violations, document))


def _ignored_keys(value: object, made: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each key of the document that was ignored, with a hint at the field that
    may have been meant."""
    if isinstance(value, list) and isinstance(made, tuple):
        for i, (item, inner) in enumerate(zip(value, made, strict=True)):
            yield from _ignored_keys(item, inner, f"{path}[{i}]")
    if not isinstance(value, Mapping) or not isinstance(made, Section | DocumentValue):
        return
    fields = type(made).__pydantic_fields__
    if not value.keys() & fields.keys():
        return  # a form of its own, such as {Tag: gpu}
    if any(value.get(tag, name) != name for tag, name in _tags(made)):
        return  # written in another form since it was read: its keys are those of another class
    for key, inside in value.items():
        if key in fields:
            yield from _ignored_keys(inside, getattr(made, key), join(path, key))
        elif isinstance(made, DocumentValue):
            yield join(path, key), suggest(key, fields)


def _tags(made: object) -> Iterator[tuple[str, object]]:
    """Yield the tag of a document value: the field that holds its class's name, and the name."""
    return ((key, name) for key, name in vars(made).items() if key in ("type", "method"))


class NoOptions(DocumentValue, is_extras=True):
    """The options of a value that has no options."""


def one_of(section: BaseModel, names: Sequence[str]) -> list[Violation]:
    """Return a violation unless exactly one of the named fields is set."""
    present = [name for name in names if getattr(section, name) is not None]
    if len(present) == 1:
        return []
    first = type(section).__pydantic_fields__[names[0]]
    has = " and ".join(present) or f"none{for_example(names[0], first, is_choice=False)}"
    return [Violation("", f"needs exactly one of {', '.join(names)}; has {has}")]


def only_with(section: BaseModel, name: str, owner: str) -> list[Violation]:
    """Return a violation if the field `name` is set without the field `owner` that it needs."""
    if not getattr(section, name) or getattr(section, owner) is not None:
        return []
    return [Violation(name, f"has a meaning only together with {owner}")]


def refuse(violations: Sequence[Violation]) -> None:
    """Raise InvalidInputError with the violations, if there are any."""
    if violations:
        raise InvalidInputError(violations=violations)


# ---- Field types ----
#
# Fields of several documents have these types, each with its constraints. A constraint is
# pydantic's own where it has one; a function checks a name or a spelling and says what is
# allowed.

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
    """Return "; did you mean module:name?" if the text looks like an entry point without colon,
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
    """An upper bound on the number of items that are kept one by one, so that no document can
    exhaust memory. The bound is lifted, as other limits are, for jobs accepted before."""

    le: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: int) -> int:
        if value > self.le and ids.are_checked():
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
        """Return the forms in which the document accepts the value, with n for a number."""
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
