"""Make a table of who may make which call, from the table by which servers decide."""

from collections.abc import Callable, Iterator, Mapping

from docs.tables import table
from stratagem.common.identity.callers import TABLE, Scope


def callers() -> str:
    """Calls that the same callers may make share a row."""
    rows: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for method, rule in TABLE.items():
        service, _, name = method.strip("/").rpartition("/")
        who = tuple(f"scope `{each}`" if each in tuple(Scope) else str(each) for each in rule.who)
        key = (service.rpartition(".")[2], who, rule.names)
        rows.setdefault(key, []).append(name)

    def cells() -> Iterator[tuple[str, ...]]:
        for (service, who, named), names in rows.items():
            yield service, ", ".join(f"`{name}`" for name in names), " or ".join(who), named

    return table(("service", "calls", "who", "may name"), cells())


RENDERED: Mapping[str, Callable[[], str]] = {"callers": callers}
"""The makers of the parts by the names of their markers."""
