"""Holds what all sections of our documents (job, graph) share: strict reading and usable errors.

Pydantic does the reading; what it finds wrong becomes one `InvalidInputError` with one violation
per wrong field, in our words. Its own messages never leave this module. Knows no document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeAlias, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    ValidationError,
)
from pydantic_core import ErrorDetails, core_schema

from stratagem.common.base.errors import MAX_VIOLATIONS, InvalidInputError, Violation
from stratagem.common.schema.frozen import FrozenDict, frozen
from stratagem.common.schema.json_text import (
    check_json,
    join,
    not_one_of,
    sort_keys,
    under,
    unknown_key,
)

MAX_COUNT: Final = 2**63 - 1  # what the journal's integer columns and torch's seeds can hold


class Section(BaseModel):
    """A mapping of the job document: frozen, strict about types, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )

    if not TYPE_CHECKING:  # type checkers see the constructor that pydantic derives from the fields

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise to_invalid_input(error, type(self)) from None

    @classmethod
    def parse(cls, value: object) -> Self:
        """The section from plain values, as JSON, YAML or TOML give them."""
        try:
            return cls.model_validate(check_json(value))
        except ValidationError as error:
            raise to_invalid_input(error, cls) from None


def _read_mapping(value: object) -> FrozenDict:
    read = sort_keys(check_json(value))
    if not isinstance(read, dict):
        raise InvalidInputError(f"{value!r} is not a mapping")
    return FrozenDict(frozen(read))


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


# Keyword arguments of the user's own code: any JSON. In key order: equal jobs have equal text.
Kwargs: TypeAlias = Annotated[
    Mapping[str, Any],
    GetPydanticSchema(
        lambda _source, _handler: core_schema.no_info_plain_validator_function(_read_mapping)
    ),
]
_Item = TypeVar("_Item")
# A list of the document.
Items: TypeAlias = Annotated[tuple[_Item, ...], BeforeValidator(_as_tuple)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Whole: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]


_MODULE_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _check_entrypoint(value: str) -> str:
    if len(value) > 256 or not _MODULE_PATH.fullmatch(value):
        raise InvalidInputError(f"{value!r} is not of the form package.module:name")
    return value


def _check_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise InvalidInputError(
            f"{value!r} is not 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-', a letter or digit first"
        )
    return value


EntrypointName: TypeAlias = Annotated[str, AfterValidator(_check_entrypoint)]
Name: TypeAlias = Annotated[str, AfterValidator(_check_name)]
MetricName: TypeAlias = Annotated[
    str, AfterValidator(lambda value: (_check_entrypoint if ":" in value else _check_name)(value))
]


def one_of(section: BaseModel, names: Sequence[str]) -> None:
    """Refuse the section unless exactly one of the named fields is set."""
    present = [name for name in names if getattr(section, name) is not None]
    if len(present) != 1:
        has = " and ".join(present) or "none"
        raise InvalidInputError(f"needs exactly one of {', '.join(names)}; has {has}")


def only_with(section: BaseModel, name: str, owner: str) -> list[Violation]:
    """The violation if a field that belongs to another one is set without it."""
    if not getattr(section, name) or getattr(section, owner) is not None:
        return []
    return [Violation(name, f"has a meaning only together with {owner}")]


def refuse(violations: Sequence[Violation]) -> None:
    """Raise what was found, if anything was."""
    if violations:
        raise InvalidInputError(violations=violations)


def to_invalid_input(error: ValidationError, root: type[BaseModel]) -> InvalidInputError:
    """Pydantic's findings in our words, one violation per wrong field."""
    found: list[Violation] = []
    for details in error.errors(include_url=False)[:MAX_VIOLATIONS]:
        found += _violations(details, root)
    return InvalidInputError(violations=found)


def _violations(details: ErrorDetails, root: type[BaseModel]) -> tuple[Violation, ...]:
    path = ""
    for part in details["loc"]:
        path = join(path, f"[{part}]" if isinstance(part, int) else str(part))
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError):
        return under(path, cause.violations or [Violation("", str(cause))])
    if details["type"] == "extra_forbidden":
        key = str(details["loc"][-1])
        return (Violation(path, unknown_key(key, _known_keys(root, details["loc"][:-1]))),)
    if details["type"] in _NOT_A_SECTION:
        keys = ", ".join(_known_keys(root, details["loc"]))
        said = f"{_short(details['input'])} is not a mapping{keys and ' of '}{keys}"
        return (Violation(path, said),)
    return (Violation(path, _sentence(details)),)


_NOT_A_SECTION: Final = ("model_type", "model_attributes_type")


_NOT_A: Final[Mapping[str, str]] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
}
_BOUNDS: Final[Mapping[str, tuple[str, str]]] = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def _sentence(details: ErrorDetails) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "missing":
        return "missing"
    if kind in _NOT_A:
        return f"{_short(value)} is not {_NOT_A[kind]}"
    if kind in _BOUNDS:
        sign, key = _BOUNDS[kind]
        return f"{value!r} is not allowed; must be {sign} {_bound(context[key])}"
    if kind == "literal_error":
        return not_one_of(value, re.findall(r"'([^']*)'", context["expected"]))
    return f"{_short(value)} is not allowed: {details['msg'].lower()}"


def _bound(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _known_keys(root: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The keys of the section at the location; none where no section is there."""
    model: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, int) or model is None:
            continue  # an item of a list: its section was found with the name of the list
        known = model.model_fields.get(part)
        model = _section_in(known.annotation) if known else None
    return list(model.model_fields) if model else []


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _section_in(arg))), None)
