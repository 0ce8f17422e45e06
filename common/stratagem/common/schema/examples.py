"""Lines that can be pasted into a document, made of what its fields declare: for who has left one
out.

A field says its own example where the least value of its type would teach nothing. Knows no
document.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from stratagem.common.schema.json_text import JSON


def for_example(name: str, info: FieldInfo, *, is_choice: bool = True) -> str:
    """Return what may stand in a field, as the end of a sentence: its choices, and a line."""
    choices = ", ".join(map(str, _choices(info))) if is_choice else ""
    return f"; {choices and f'one of {choices}, '}for example {name}: {written(_of_field(info))}"


def metadata_of(info: FieldInfo) -> Iterator[Any]:
    """Yield what a field declares beside its type, that of the items of a list and of the types
    of a union included."""
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
    """Yield the names of the classes, or the words, that one field is chosen from."""
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
    """Return the outermost example among what is declared beside a type; None without one."""
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
    """Return the mapping of a class: its name, where it has one, and the fields that it needs."""
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
    """Return a type without what is declared beside it, and without None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def written(value: JSON) -> str:
    """Return a value as YAML writes it in one line."""
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
