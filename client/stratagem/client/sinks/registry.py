"""Finds the sink that a text such as "csv:metrics.csv" names."""

from importlib.metadata import entry_points

from stratagem.client.sinks.contract import GROUP, Sink
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema.json import not_one_of


def sink_names() -> list[str]:
    """Return the names of all sinks that are installed."""
    return sorted(point.name for point in entry_points(group=GROUP))


def sink_of(text: str) -> Sink:
    """Return the sink that NAME:TARGET names. Raises InvalidInputError where there is none."""
    name, _, target = text.partition(":")
    found = entry_points(group=GROUP, name=name)
    if not found:
        raise InvalidInputError.at("sink", not_one_of(name, sink_names()))
    if not target:
        raise InvalidInputError.at("sink", f"{text!r} names no target; write {name}:TARGET")
    try:
        sink: Sink = next(iter(found)).load()(target)
    except ImportError as error:
        text = f"{name} needs a package that is not installed: {error}"
        raise InvalidInputError.at("sink", text) from None
    return sink
