"""The rules of a class of a document, beyond the types of its fields, and how they run over a value
of which some fields are wrong.

A rule is a method that yields violations. One that asks for a field that is wrong ends there: what
it would say is a consequence, or cannot be known yet. So each rule says what it can, and one answer
has all. Knows no document.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Final, TypeVar

from stratagem.common.base.errors import Violation

UNREAD: Final = object()
"""Stands for a field that is wrong."""
_MARK: Final = "is_rule_of_document"
_Made = TypeVar("_Made")
_Rule = TypeVar("_Rule", bound=Callable[[Any], Iterable[Violation]])


class UnreadFieldError(Exception):
    """A field that is wrong was asked for."""


class Partial:
    """A value of a document's class of which some fields are wrong; to ask for those raises."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is UNREAD:
            raise UnreadFieldError(name)
        return value


def rule(method: _Rule) -> _Rule:
    """Mark a method of a document's class as a rule: it yields what contradicts it."""
    setattr(method, _MARK, True)
    return method


def contradictions(made: Any) -> Iterator[Violation]:
    """Yield what the rules of a value's class find, of all that can be read of it."""
    return found_by((getattr(type(made), name) for name in _rules_of(made.__class__)), made)


def found_by(
    rules: Iterable[Callable[[_Made], Iterable[Violation]]], made: _Made
) -> Iterator[Violation]:
    """Yield what each of the rules finds before it asks for a field that is wrong."""
    for check in rules:
        try:
            yield from check(made)
        except UnreadFieldError:
            continue


def further(found: Iterable[Violation], known: Iterable[Violation]) -> list[Violation]:
    """Return what was found about other fields than those that are known to be wrong: of these it
    may be a consequence."""
    fields = {each.field for each in known}
    return [each for each in found if each.field not in fields]


def differing(made: object, default: object, names: Iterable[str]) -> Iterator[str]:
    """Yield those of the names whose fields are right and not as in another value."""
    for name in names:
        value = vars(made)[name]
        if value is not UNREAD and value != getattr(default, name):
            yield name


@cache
def _rules_of(cls: Any) -> tuple[str, ...]:
    classes = reversed(cls.__mro__)
    return tuple(
        dict.fromkeys(
            name for each in classes for name, value in vars(each).items() if hasattr(value, _MARK)
        )
    )


def partial(cls: Any, value: object, wrong: Mapping[str, Any]) -> Any:
    """Return what can be read of a mapping that stands for a class of a document; None for what is
    no mapping, or cannot be read even so.

    wrong: the fields that are wrong, each with what can be read of it, or UNREAD.
    """
    if not isinstance(value, Mapping) or issubclass(cls, Partial):
        return None
    kept = {key: item for key, item in value.items() if key not in wrong}
    try:
        made = partial_class(cls).__pydantic_validator__.validate_python(kept)
    except ValueError:
        return None
    made.__dict__.update(wrong)
    return made


@cache
def partial_class(cls: Any) -> Any:
    """Return the class of partial values: no field is needed, and unknown keys are ignored."""
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
