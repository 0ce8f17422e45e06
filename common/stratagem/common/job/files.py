"""Read a job file (YAML, TOML or JSON, by its suffix) and apply `a.b=c` overrides.

YAML is read as version 1.2 does, so that `lr: 1e-3` is a number and `mode: off` is text, and a key
that stands twice is refused in all three formats. The module knows no fields of the job except
those that hold the user's own mappings.
"""

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job.job import JobSpec
from stratagem.common.schema.json import JSON, check_json, item_of, load_json, no_item

_OF_THE_USER: Final = frozenset({"kwargs", "config"})
"""The keys of mappings whose content is for the user's code and has no built-in defaults."""
_SHORT_FORMS: Final = {
    "code": ("path", "path"),
    "loss": ("name", "entrypoint"),
    "optimizer.schedule": ("name", "entrypoint"),
    "data.order": ("by", "entrypoint"),
    "compression": ("codec", "codec"),
}
"""The two fields that bare text sets in each section with a short form: the first for plain text,
the second for "module:name"."""
_SUFFIXES: Final = ".yaml, .yml, .toml, .json"


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> JobSpec:
    """Return the validated job of a file, with overrides such as "optimizer.lr=0.01"."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path}: not UTF-8 text") from None
    try:
        document = check_json(_parse(path.suffix.lower(), text))
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise InvalidInputError(f"{path}: not a mapping of name, model, data, ...")
    for override in overrides:
        _apply(document, override)
    return JobSpec.parse(document)


def read_overrides(overrides: Iterable[str]) -> dict[str, JSON]:
    """Return the values of overrides as `load_job` takes them, by dotted path."""
    return dict(map(_read_override, overrides))


def parse_yaml(text: str) -> JSON:
    """Parse a YAML text that holds nothing but plain data."""
    try:
        loader = _Loader(text)
        try:
            return check_json(loader.get_single_data())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InvalidInputError(f"not valid YAML: {where}{error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidInputError(f"not valid YAML: {error}") from None


def _parse(suffix: str, text: str) -> object:
    match suffix:
        case ".yaml" | ".yml":
            return parse_yaml(text)
        case ".json":
            return load_json(text)
        case ".toml":
            try:
                return tomllib.loads(text)
            except tomllib.TOMLDecodeError as error:
                raise InvalidInputError(f"not valid TOML: {error}") from None
        case _:
            raise InvalidInputError(f"{suffix or 'no suffix'!r} is not one of {_SUFFIXES}")


def _apply(document: dict[str, JSON], override: str) -> None:
    """Set one value in place, creating missing mappings on the way. An item of a list is named by
    its index, from 0, or by its name. null removes a field, so that its default holds, but is
    passed on as an argument of a user's function."""
    dotted, value = _read_override(override)
    parts = dotted.split(".")
    target: dict[str, JSON] | list[JSON] = document
    for i, part in enumerate(parts[:-1]):
        inner = _inside(target, part, override, parts[:i])
        if not isinstance(inner, dict | list):
            at = ".".join(parts[: i + 1])
            text = f"override {override!r}: {at} is {inner!r}, neither a mapping nor a list"
            raise InvalidInputError(text)
        target = inner
    if isinstance(target, list):
        target[_place(target, parts[-1], override, parts[:-1])] = value
    elif value is None and not _OF_THE_USER.intersection(parts[:-1]):
        target.pop(parts[-1], None)
    else:
        target[parts[-1]] = value


def _inside(
    target: dict[str, JSON] | list[JSON], part: str, override: str, path: Sequence[str]
) -> JSON:
    """Return the child of `target` that one part of an override's path names; a child in short form
    is expanded, a missing one is created as an empty mapping."""
    if isinstance(target, list):
        return target[_place(target, part, override, path)]
    child, fields = target.get(part), _SHORT_FORMS.get(".".join([*path, part]))
    if child is None:
        target[part] = {}
    elif isinstance(child, str) and fields is not None:
        target[part] = {fields[":" in child]: child}
    return target[part]


def _place(items: list[JSON], part: str, override: str, path: Sequence[str]) -> int:
    place = item_of(items, part)
    if place is None:
        text = f"override {override!r}: {'.'.join(path)} {no_item(items, part)}"
        raise InvalidInputError(text)
    return place


def _read_override(override: str) -> tuple[str, JSON]:
    """Split an override "a.b=value" into its path and its parsed value."""
    dotted, equals, text = override.partition("=")
    dotted = dotted.strip()
    if not equals or not all(dotted.split(".")):
        raise InvalidInputError(f"override {override!r} is not of the form a.b=value")
    try:
        return dotted, parse_yaml(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"override {override!r}: {error}") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader (its only way to be configured is a subclass) for YAML 1.2 scalars."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = (key_node.tag, str(key_node.value))
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"duplicate key {key_node.value!r}", key_node.start_mark
            )
        seen.add(key)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0 if text.startswith(("0x", "0o")) else 10)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _resolve(tag: str, pattern: str, first: str) -> None:
    """Make the loader give the YAML type `tag` to unquoted text that matches the pattern. first:
    the characters with which such text may begin."""
    whole = re.compile(rf"(?:{pattern})\Z")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", whole, [*first] or [""])


_resolve("null", "~|null|Null|NULL", "~nN")
_resolve("null", "", "")
_resolve("bool", "true|True|TRUE|false|False|FALSE", "tTfF")
_resolve("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789")
_resolve(
    "float",
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "-+.0123456789",
)
_resolve("merge", "<<", "<")
_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
