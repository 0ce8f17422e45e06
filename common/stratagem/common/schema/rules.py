"""Run the rules of a document class on a value that may have invalid fields, and build examples of
valid values.

A rule is a method that yields violations, beyond the types of the fields. A rule that reads an
invalid field ends there: its answer would be a consequence, or cannot be known yet. Each rule thus
reports what it can, and one answer has all violations.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from stratagem.common.base.errors import Violation
from stratagem.common.schema.json import JSON

# ---- Rules ----

UNREAD: Final = object()
"""Placeholder for the value of an invalid field in a Partial."""
_MARK: Final = "is_rule_of_document"
_Made = TypeVar("_Made")
_Rule = TypeVar("_Rule", bound=Callable[[Any], Iterable[Violation]])


class UnreadFieldError(Exception):
    """A rule has read a field whose value is invalid; the rule is then abandoned."""


class Partial:
    """A document value with some invalid fields; reading one of them raises UnreadFieldError."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is UNREAD:
            raise UnreadFieldError(name)
        return value


def rule(method: _Rule) -> _Rule:
    """Mark a method of a document class as a rule: a generator of violations."""
    setattr(method, _MARK, True)
    return method


def contradictions(made: Any) -> Iterator[Violation]:
    """Yield the violations that a value's rules find, as far as its valid fields can tell."""
    return found_by((getattr(type(made), name) for name in _rules_of(made.__class__)), made)


def found_by(
    rules: Iterable[Callable[[_Made], Iterable[Violation]]], made: _Made
) -> Iterator[Violation]:
    """Yield the violations that each rule finds, until the rule reads an invalid field."""
    for check in rules:
        try:
            yield from check(made)
        except UnreadFieldError:
            continue


def further(violations: Iterable[Violation], earlier: Iterable[Violation]) -> list[Violation]:
    """Return the violations that concern fields without an earlier violation, because others may
    only be a consequence of it."""
    fields = {violation.field for violation in earlier}
    return [violation for violation in violations if violation.field not in fields]


def differing(made: object, default: object, names: Iterable[str]) -> Iterator[str]:
    """Yield the names of the valid fields whose values differ from those of `default`."""
    for name in names:
        value = vars(made)[name]
        if value is not UNREAD and value != getattr(default, name):
            yield name


@cache
def _rules_of(cls: Any) -> tuple[str, ...]:
    classes = reversed(cls.__mro__)
    return tuple(
        dict.fromkeys(
            name for base in classes for name, value in vars(base).items() if hasattr(value, _MARK)
        )
    )


def partial(cls: Any, value: object, wrong: Mapping[str, Any]) -> Any:
    """Return a Partial with the readable fields of a mapping, or None if the value is not a mapping
    or cannot be read even without the invalid fields.

    wrong: the invalid fields, each with its readable part or UNREAD.
    """
    if not isinstance(value, Mapping) or issubclass(cls, Partial):
        return None
    readable = {key: item for key, item in value.items() if key not in wrong}
    try:
        made = partial_class(cls).__pydantic_validator__.validate_python(readable)
    except ValueError:
        return None
    made.__dict__.update(wrong)
    return made


@cache
def partial_class(cls: Any) -> Any:
    """Return the Partial subclass of a document class: no field required, unknown keys ignored."""
    annotations: dict[str, Any] = {}
    namespace: dict[str, Any] = {"model_config": {"extra": "ignore"}}
    for name, info in cls.__pydantic_fields__.items():
        annotations[name] = info.annotation  # not those of the class: they may name what follows it
        namespace[name] = copy(info)
        if info.is_required():
            namespace[name].default = UNREAD
    namespace |= {"__annotations__": annotations, "__module__": cls.__module__}
    bases = (cls,) if issubclass(cls, Partial) else (Partial, cls)
    made = type(cls)(cls.__name__, bases, namespace)
    if is_dataclass(cls):  # what rules ask of the fields
        made.__dataclass_fields__ = cls.__dataclass_fields__
    return made


# ---- Examples ----
#
# If a required field is missing, the error shows a line that can be pasted into the document,
# made from the field's declaration. A field declares its own example where the least value of its
# type would not be instructive.


def for_example(name: str, info: FieldInfo, *, is_choice: bool = True) -> str:
    """Return the end of an error message about a field: the choices, and an example line."""
    choices = ", ".join(map(str, _choices(info))) if is_choice else ""
    return f"; {choices and f'one of {choices}, '}for example {name}: {written(_of_field(info))}"


def metadata_of(info: FieldInfo) -> Iterator[Any]:
    """Yield the declared metadata of a field, including that of its list items and union
    members."""
    yield info
    yield from info.metadata
    yield from _metadata_inside(info.annotation)


def _metadata_inside(annotation: Any) -> Iterator[Any]:
    for part in (*getattr(annotation, "__metadata__", ()), *get_args(annotation)):
        if isinstance(part, FieldInfo):
            yield part
            yield from part.metadata
        yield from _metadata_inside(part)


def _choices(info: FieldInfo) -> Iterator[JSON]:
    """Yield the words, or names of classes, among which the value of a field is chosen."""
    annotation = _plain(info.annotation)
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif info.discriminator is not None:
        for kind in get_args(annotation):
            yield kind.__pydantic_fields__[info.discriminator].default


def _of_field(info: FieldInfo) -> JSON:
    if info.examples:
        example: JSON = info.examples[0]
        return example
    return _said_by(info.metadata) or _of_type(info.annotation, info)


def _said_by(metadata: Sequence[Any]) -> JSON:
    """Return the outermost example declared in the metadata of a type; None if there is none."""
    for part in reversed(metadata):
        if isinstance(part, FieldInfo) and part.examples:
            example: JSON = part.examples[0]
            return example
        if hasattr(part, "forms"):
            return str(part.forms()[0])
    return None


def _of_type(annotation: Any, info: FieldInfo) -> JSON:
    while get_origin(annotation) is Annotated:
        if example := _said_by(annotation.__metadata__):
            return example
        annotation = get_args(annotation)[0]
    inside = get_args(annotation)
    if hasattr(annotation, "__pydantic_fields__"):
        return example_of(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return _of_type(inside[0], info)
    if get_origin(annotation) is Literal:
        return str(inside[0])
    if get_origin(annotation) is tuple:
        return [_of_type(inside[0], info)]
    if annotation in (int, float):
        return _number(annotation, info)
    return True if annotation is bool else "NAME" if annotation is str else {}


def example_of(cls: Any) -> dict[str, JSON]:
    """Return an example document of a class: its tag, if it has one, and its required fields."""
    fields: Mapping[str, FieldInfo] = cls.__pydantic_fields__
    tags = {name: info.default for name, info in fields.items() if info.kw_only}
    return tags | {name: _of_field(info) for name, info in fields.items() if info.is_required()}


def _number(kind: type, info: FieldInfo) -> int | float:
    bounds: dict[str, float] = {
        name: bound
        for part in metadata_of(info)
        for name in ("gt", "ge", "lt", "le")
        if (bound := getattr(part, name, None)) is not None
    }
    least, most = bounds.get("gt", bounds.get("ge", 0)), bounds.get("lt", bounds.get("le"))
    if kind is int:
        return int(max(1, least))
    return max(0.1, least) if most is None else (least + most) / 2


def _plain(annotation: Any) -> Any:
    """Return a type without its Annotated metadata."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def written(value: JSON) -> str:
    """Format a value as YAML in one line."""
    match value:
        case dict():
            return f"{{{', '.join(f'{key}: {written(item)}' for key, item in value.items())}}}"
        case list():
            return f"[{', '.join(map(written, value))}]"
        case bool():
            return str(value).lower()
        case str() if value[:1].isdigit():
            return f"'{value}'"
        case _:
            return str(value)
