"""Forms: how one kind of JSON value is read, with its place in the document, and written.

The strict readings of the shared JSON live here: a bool is no integer, 4.0 is no unsigned
integer, NaN is neither read nor written, objects are never given as arrays. A `Shape` says which
dataclass an object stands for. Knows no document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.field_rules import MAX_UNSIGNED, field_violations
from stratagem.common.schema.json_text import (
    JSON,
    check_json,
    check_text,
    join,
    not_one_of,
    sort_keys,
    suggest,
    under,
    unknown_key,
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JsonForm:
    """The reader (value, path) and the writer of one kind of value; an optional field may be
    missing."""

    read: Callable[[object, str], Any]
    write: Callable[[Any], JSON]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """The fields of an object, in the order in which they are written, and the class it stands for.

    Unknown keys are ignored and logged, as the other readers of the shared form do. An object of
    extras is ours alone: there they are errors, and what equals its default is not written.
    """

    cls: type
    fields: Mapping[str, JsonForm] = field(default_factory=dict)
    extras: ObjectForm | None = None
    is_extras: bool = False


@dataclass(frozen=True, slots=True)
class _NoExtras:
    """The extras of a class that has none."""


_NO_EXTRAS: Final = ObjectForm(_NoExtras, is_extras=True)


@contextmanager
def collecting(violations: list[Violation]) -> Iterator[None]:
    """Add what is wrong inside the block to the list, and continue after the block."""
    try:
        yield
    except InvalidInputError as error:
        violations += error.violations


def read_unsigned(value: object, path: str) -> int:
    """A whole number; that it is not below the least allowed one is the rule of its field."""
    # bool is an int for Python, 4.0 is equal to 4: neither is an unsigned integer in the form
    if type(value) is not int:
        raise InvalidInputError.at(path, f"{value!r} is not a whole number")
    if value > MAX_UNSIGNED:
        raise InvalidInputError.at(path, f"{value} is not allowed; must be below 2^64")
    return value


def read_flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInputError.at(path, f"{value!r} is not true or false")
    return value


def read_real(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInputError.at(path, f"{value!r} is not a number")
    return write_real(value, path)


def write_real(value: int | float, path: str = "") -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidInputError.at(path, f"{number} is not a finite number")
    return number


def read_text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidInputError.at(path, f"{value!r} is not text")
    return check_text(value, path)


def list_of(form: JsonForm) -> JsonForm:
    def read(value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise InvalidInputError.at(path, f"{value!r} is not a list")
        items: list[Any] = []
        violations: list[Violation] = []
        for i, each in enumerate(value):
            with collecting(violations):
                items.append(form.read(each, f"{path}[{i}]"))
        if violations:
            raise InvalidInputError(violations=violations)
        return tuple(items)

    return JsonForm(read, lambda items: [form.write(each) for each in items])


def read_object(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InvalidInputError.at(path, f"{value!r} is not an object")
    return value


UNSIGNED: Final = JsonForm(read_unsigned, lambda value: value)
REAL: Final = JsonForm(read_real, write_real)
FLAG: Final = JsonForm(read_flag, bool)
TEXT: Final = JsonForm(read_text, str)
TEXTS: Final = list_of(TEXT)
ANY_JSON: Final = JsonForm(check_json, lambda value: sort_keys(check_json(value)))


def tagged(
    tag: str, *shapes: ObjectForm, extras_key: str = "", spelling: Callable[[str], str] = str
) -> JsonForm:
    """Return the form of one of several shapes: an object that carries the name of the class under
    the tag.

    spelling: of the names of classes in the document.
    """
    by_name = {spelling(shape.cls.__name__): shape for shape in shapes}
    by_class = {shape.cls: shape for shape in shapes}

    def read(value: object, path: str) -> object:
        entries = read_object(value, path)
        if tag not in entries:
            raise InvalidInputError.at(join(path, tag), f"missing; one of {', '.join(by_name)}")
        name = entries[tag]
        if not isinstance(name, str) or name not in by_name:
            raise InvalidInputError.at(join(path, tag), not_one_of(name, by_name))
        return _read_fields(by_name[name], entries, path, tag, extras_key)

    def write(value: Any) -> JSON:
        shape = by_class[type(value)]
        return {tag: spelling(shape.cls.__name__), **_write_fields(shape, value, extras_key)}

    return JsonForm(read, write)


def plain(shape: ObjectForm) -> JsonForm:
    """The shape as an object without a tag."""
    return JsonForm(
        lambda value, path: _read_fields(shape, read_object(value, path), path),
        lambda value: _write_fields(shape, value),
    )


def _read_fields(
    shape: ObjectForm, entries: Mapping[str, object], path: str, tag: str = "", extras_key: str = ""
) -> Any:
    """An instance of the class; what is wrong with any of its entries is raised at once."""
    unknown = [str(key) for key in entries if key not in (tag, extras_key, *shape.fields)]
    values: dict[str, object] = {}
    violations: list[Violation] = []
    for name, form in shape.fields.items():
        with collecting(violations):
            if name in entries:
                values[name] = form.read(entries[name], join(path, name))
            elif not form.is_optional and not shape.is_extras:
                near = suggest(name, unknown).replace("did you mean", "is it")
                raise InvalidInputError.at(join(path, name), f"missing{near}")
    if extras_key and extras_key in entries:
        with collecting(violations):
            extras = plain(shape.extras or _NO_EXTRAS)
            values[extras_key] = extras.read(entries[extras_key], join(path, extras_key))
        if shape.extras is None:
            values.pop(extras_key, None)
    for key in unknown:
        if shape.is_extras:
            violations.append(Violation(join(path, key), unknown_key(key, shape.fields)))
        else:
            hint = suggest(key, shape.fields)
            _log.warning(f"unknown key is ignored{hint}", key=join(path, key))
    return _make(shape.cls, values, violations, path)


def _make(cls: type, values: dict[str, object], violations: list[Violation], path: str) -> Any:
    """The instance, if neither the reading nor the rules of the class found anything wrong."""
    violations = violations + list(under(path, field_violations(cls, values)))
    if violations:
        raise InvalidInputError(violations=violations)
    try:
        return cls(**values)
    except InvalidInputError as error:
        raise InvalidInputError(violations=under(path, error.violations)) from None


def _write_fields(shape: ObjectForm, value: Any, extras_key: str = "") -> dict[str, JSON]:
    kept = list(shape.fields)
    if shape.is_extras:
        default = shape.cls()
        kept = [name for name in kept if getattr(value, name) != getattr(default, name)]
    written = {name: shape.fields[name].write(getattr(value, name)) for name in kept}
    if shape.extras is not None:
        extras = _write_fields(shape.extras, getattr(value, extras_key))
        if extras:  # without extras the document is the shared form
            written[extras_key] = extras
    return written
