"""Reads and writes the JSON form of a strategy, shared with the Rust programs that speak it.

Variants are objects with their name under a tag key ("type", "method", "protocol"), except a
RemoteTarget, which is an object with one key; the classes say the rest.
"""

from stratagem.common.schema.document import Section
from stratagem.common.schema.json_text import JSON, dump_json, load_json
from stratagem.common.strategy.kinds import Strategy, StrategyField


class _Document(Section):
    """What holds a strategy, so that errors name it."""

    strategy: StrategyField


def parse_strategy(source: object) -> Strategy:
    """A strategy from its JSON text or from the parsed object."""
    value = load_json(source, "strategy") if isinstance(source, str) else source
    return _Document.parse({"strategy": value}).strategy


def dump_strategy(strategy: Strategy) -> dict[str, JSON]:
    """The JSON object, tag first, then the fields in order; without extras the shared form."""
    written = _Document(strategy=strategy).document()["strategy"]
    assert isinstance(written, dict)
    return written


def dumps_strategy(strategy: Strategy) -> str:
    """The compact JSON text of a strategy."""
    return dump_json(dump_strategy(strategy))
