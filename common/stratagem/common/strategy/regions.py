"""The regions of a federation: which clients are added up together before all are, the section
`options.regions` of Federated.

The tree of the sum is part of the job, and decides its bits; where a region is added up does not.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from pydantic import PlainValidator

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.json import FrozenDict, frozen

if TYPE_CHECKING:
    from stratagem.common.strategy.federated import FederatedOptions

_FIELD: Final = "options.regions"
_MAX_NAMED: Final = 8


def _read_regions(value: object) -> Mapping[str, Any] | None:
    """Read the members by region: all client numbers, or all names of sites."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise InvalidInputError(f"{value!r} is no mapping of at least one region to its clients")
    kinds = set()
    for region, members in value.items():
        if not isinstance(region, str) or not region:
            raise InvalidInputError(f"{region!r} is no name of a region")
        if not isinstance(members, list | tuple) or not members:
            raise InvalidInputError(f"{region}: {members!r} is no list of at least one client")
        for member in members:
            is_number = type(member) is int and member >= 0
            if not is_number and not (isinstance(member, str) and member):
                text = f"{region}: {member!r} is neither the number of a client nor the name of one"
                raise InvalidInputError(text)
            kinds.add(type(member))
    if len(kinds) > 1:
        raise InvalidInputError("has numbers of clients and names of sites; use one of them")
    return FrozenDict({region: frozen(value[region]) for region in sorted(value)})


Regions: TypeAlias = Annotated[Mapping[str, Any] | None, PlainValidator(_read_regions)]


def are_named(regions: Mapping[str, Any]) -> bool:
    """Return whether members are names of sites, and not numbers of clients."""
    return any(isinstance(member, str) for members in regions.values() for member in members)


def members_of(regions: Mapping[str, Any]) -> list[Any]:
    """Return all members, region by region in order of name."""
    return [member for region in sorted(regions) for member in regions[region]]


def check_regions(options: "FederatedOptions", num_clients: int) -> Iterator[Violation]:
    """Yield what is wrong with the regions: clients in none or in two, and what does not go
    together with them."""
    if options.regions is None:
        return
    wrong = [*check_members(options.regions, num_clients)]
    num_members = len(members_of(options.regions))
    yield from wrong
    if not wrong and num_members != num_clients:  # of sites: numbers have been counted
        text = f"has {num_members} sites, and num_clients is {num_clients}; name each of them"
        yield Violation(_FIELD, text)
    for name, text in against_regions(options).items():
        yield Violation(f"options.{name}", f"is not possible with regions: {text}")


def check_members(regions: Mapping[str, Any], num_clients: int) -> Iterator[Violation]:
    """Yield the clients that are in none of the regions, or in two, and numbers of none."""
    members = members_of(regions)
    if twice := [member for member, number in Counter(members).items() if number > 1]:
        yield Violation(_FIELD, f"{_said(twice)} in more than one place; each client is in one")
    elif not are_named(regions):
        if unknown := [number for number in members if number >= num_clients]:
            text = f"{_said(unknown)} no client; they are numbered from 0 to {num_clients - 1}"
            yield Violation(_FIELD, text)
        if missing := sorted(set(range(num_clients)) - set(members)):
            yield Violation(_FIELD, f"{_said(missing)} in no region; each client is in one")


def against_regions(options: "FederatedOptions") -> dict[str, str]:
    """Return the other options that a sum by regions has no meaning for, and why."""
    found = {}
    if options.robust is not None:
        found["robust"] = "a robust rule compares all updates, and a region tells only their sum"
    if options.q is not None:
        found["q"] = "a client's weight depends on the losses of all others"
    if options.normalize is not None:
        found["normalize"] = "how far a round goes depends on the steps of all clients"
    if options.control is not None:
        found["control"] = "the common state of scaffold is that of all clients together"
    if options.late_updates != "refuse":
        found["late_updates"] = "a late update has another base than the sum of its region"
    if options.secure_aggregation is not None:
        found["secure_aggregation"] = "masks go out of the sum of all clients alone"
    for name in ("personal", "ditto"):
        if getattr(options, name) is not None:
            found[name] = "what clients keep to themselves is not defined by region"
    if options.open_roster is not None:
        found["roster.open"] = "who joins later is in none"
    return found


def _said(members: list[Any]) -> str:
    named = ", ".join(map(str, members[:_MAX_NAMED]))
    more = f" and {len(members) - _MAX_NAMED} more" if len(members) > _MAX_NAMED else ""
    return f"{named}{more} {'is' if len(members) == 1 else 'are'}"
