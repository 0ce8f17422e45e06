"""Translate pydantic's validation errors into our own words: one violation per wrong field.

Each class of a document reports on its own fields; the violations of a nested class are put under
the field that holds it. Pydantic's own messages never leave this module.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from stratagem.common.base.errors import MAX_VIOLATIONS, InvalidInputError, Violation
from stratagem.common.schema.json import closest, join, not_one_of, suggest, under, unknown_key
from stratagem.common.schema.rules import (
    UNREAD,
    contradictions,
    example_of,
    for_example,
    further,
    metadata_of,
    partial,
    written,
)

BOUNDS: Final[Mapping[str, str]] = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
"""The names of numeric constraints, each with its comparison sign."""
TECHNICAL: Final = 2**62 - 1
"""Larger bounds have technical reasons (a column, a seed): messages name them only if exceeded."""
_BOUND_OF: Final = {
    "greater_than": "gt",
    "greater_than_equal": "ge",
    "less_than": "lt",
    "less_than_equal": "le",
}
_NOT_A: Final[Mapping[str, str]] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
}


def to_invalid_input(error: ValidationError, cls: Any, value: object = None) -> InvalidInputError:
    """Translate a validation error of `cls`, one class of a document, and add the violations that
    the class's rules find among its valid fields."""
    details = error.errors(include_url=False)[:MAX_VIOLATIONS]
    cause = details[0].get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError) and not details[0]["loc"] and cause.violations:
        cause.readable = cause.readable or partial(cls, value, {})
        return cause  # the class has said all about itself
    violations = [fault for one in _first_causes(details, cls) for fault in _violations(one, cls)]
    readable = partial(cls, value, _wrong_fields(details, cls))
    if readable is not None:
        violations += further(contradictions(readable), violations)
    invalid = InvalidInputError(violations=violations)
    invalid.readable = readable
    return invalid


def _wrong_fields(errors: Iterable[ErrorDetails], cls: Any) -> dict[str, Any]:
    """Return the invalid fields of a class, each with its readable part or UNREAD; a misspelt key
    counts as the field that it was meant for."""
    wrong: dict[str, Any] = {}
    for error in errors:
        name = _meant(error, cls) if error["loc"] else None
        if name is not None:
            cause = error.get("ctx", {}).get("error")
            is_item = any(isinstance(part, int) for part in error["loc"])
            readable = getattr(cause, "readable", None)
            is_whole = readable is not None and not is_item and name not in wrong
            wrong[name] = readable if is_whole else UNREAD
    return wrong


def _first_causes(errors: list[ErrorDetails], cls: Any) -> Iterator[ErrorDetails]:
    """Yield the errors without their consequences: a field that is missing because its key is
    misspelt, or a list that seems too short because pydantic does not count its invalid items."""
    holders = {error["loc"][:i] for error in errors for i in range(len(error["loc"]))}
    meant = {_meant(error, cls) for error in errors if error["type"] == "extra_forbidden"}
    for details in errors:
        is_short = details["type"] == "too_short" and details["loc"] in holders
        if not is_short and not (details["type"] == "missing" and details["loc"][0] in meant):
            yield details


def _meant(details: ErrorDetails, cls: Any) -> str | None:
    """Return the field that an error is about, or which a misspelt key probably meant."""
    key, fields = str(details["loc"][0]), cls.__pydantic_fields__
    if key in fields:
        return key
    is_elsewhere = any(path.endswith(f".{key}") for path in _elsewhere(key, fields))
    return None if is_elsewhere else closest(key, fields)


def _violations(details: ErrorDetails, cls: Any) -> Iterable[Violation]:
    fields: Mapping[str, FieldInfo] = cls.__pydantic_fields__
    path, info = _place(details, cls)
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError):
        return under(path, cause.violations or [Violation("", str(cause))])
    kind, value = details["type"], details["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return [Violation(path, unknown_key(path, fields, _elsewhere(path, fields)))]
    if kind == "missing":
        unknown = [key for key in value if key not in fields] if isinstance(value, Mapping) else []
        hint = suggest(path, unknown).replace("did you mean", "is it")
        return [Violation(path, f"missing{hint}{for_example(path, info) if info else ''}")]
    if kind in ("model_type", "model_attributes_type", "dataclass_type") and not path:
        keys = ", ".join(fields)
        return [Violation("", f"{_short(value)} is not a mapping{keys and ' of '}{keys}")]
    if info and (kind.startswith("union_tag") or kind == "model_attributes_type"):
        return [_wrong_tag(details, path, info)]
    return [Violation(path, _sentence(details, info))]


def _elsewhere(key: str, fields: Mapping[str, FieldInfo]) -> list[str]:
    """Return the paths in nested classes that end in this key, or in one that begins with it."""
    paths = dict.fromkeys(
        join(name, inner)
        for name, info in fields.items()
        for cls in _classes_beside(info.annotation)
        for inner in cls.__pydantic_fields__
        if inner == key or inner.startswith(f"{key}_")
    )
    return list(paths)


def _classes_beside(annotation: Any) -> Iterator[Any]:
    """Yield the document classes that a field may hold directly, not as items of a list."""
    if hasattr(annotation, "__pydantic_fields__"):
        yield annotation
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for part in get_args(annotation):
            yield from _classes_beside(part)


def _place(details: ErrorDetails, cls: Any) -> tuple[str, FieldInfo | None]:
    """Return the path of the field that an error is about, and the field's declaration."""
    if not details["loc"]:
        return "", None
    first, *further = details["loc"]
    if isinstance(first, int):  # made in code, by position
        names = cls.__match_args__
        first = names[first] if first < len(names) else f"[{first}]"
    path = first
    for part in further:
        if isinstance(part, int):  # text is the name of one type of a union, and no key
            path = join(path, f"[{part}]")
    return path, cls.__pydantic_fields__.get(first)


def _wrong_tag(details: ErrorDetails, path: str, info: FieldInfo) -> Violation:
    """Return the violation for a tag (the key that names an object's class) missing or unknown."""
    tags = (getattr(part, "discriminator", None) for part in metadata_of(info))
    tag = next(candidate for candidate in tags if candidate is not None)
    value, context = details["input"], details.get("ctx", {})
    names = re.findall(r"'([^']*)'", context.get("expected_tags", "")) or _tags(info, str(tag))
    if not isinstance(value, Mapping):
        name = closest(value, names) if isinstance(value, str) else None
        kinds = {
            cls.__pydantic_fields__[str(tag)].default: cls for cls in _classes(info.annotation)
        }
        example = written(example_of(kinds[name or names[0]]))
        return Violation(path, f"{_short(value)} is not a mapping such as {example}")
    if tag not in value:
        text = f"missing; one of {', '.join(names)}, for example {tag}: {names[0]}"
        return Violation(join(path, str(tag)), text)
    return Violation(join(path, str(tag)), not_one_of(value[tag], names))


def _tags(info: FieldInfo, tag: str) -> list[str]:
    return [kind.__pydantic_fields__[tag].default for kind in _classes(info.annotation)]


def _classes(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "__pydantic_fields__"):
        yield annotation
    for part in get_args(annotation):
        yield from _classes(part)


def _sentence(details: ErrorDetails, info: FieldInfo | None) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "finite_number" or (kind == "float_type" and type(value) is int):
        return f"{_short(value)} is not a finite number"
    if kind in _NOT_A:
        return f"{_short(value)} is not {_NOT_A[kind]}"
    if kind in _BOUND_OF:
        bound = _BOUND_OF[kind]
        return f"{value!r} is not allowed; must be {_range(bound, context[bound], info)}"
    if kind in ("too_short", "string_too_short") and context["min_length"] == 1:
        written = list(value) if isinstance(value, tuple) else value
        return f"{written!r} is not allowed; must not be empty"
    if kind in ("literal_error", "enum"):
        quoted = re.findall(r"'[^']*'|\d+", context["expected"])
        return not_one_of(value, [name.strip("'") for name in quoted])
    return f"{_short(value)} is not allowed: {details['msg'].lower()}"


def _range(bound: str, limit: float, info: FieldInfo | None) -> str:
    """Return the whole allowed range of a number that broke one of its bounds, as text."""
    limits = {
        name: value
        for part in (metadata_of(info) if info else ())
        for name in BOUNDS
        if (value := getattr(part, name, None)) is not None and abs(value) < TECHNICAL
    }
    if abs(limit) >= TECHNICAL or not limits:
        limits = {bound: limit}
    is_share = len(limits) == 2 and info is not None and float in _types(info.annotation)
    if is_share:
        low, high = sorted(limits.values())
        opening, closing = "[" if "ge" in limits else "(", "]" if "le" in limits else ")"
        return f"in {opening}{_number(low)}, {_number(high)}{closing}"
    return " and ".join(
        f"{BOUNDS[name]} {_number(limits[name])}" for name in BOUNDS if name in limits
    )


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _types(part)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
