"""The section `options.regions` of Federated: clients are grouped into regions, whose updates are
summed first, before the sums of all regions are added.

The grouping is part of the job and determines the bits of the sum; the place where a region is
summed does not.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, TypeAlias

from pydantic import PlainValidator

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.json import FrozenDict, frozen

_FIELD: Final = "options.regions"
_MAX_NAMED: Final = 8


def _read_regions(value: object) -> Mapping[str, Any] | None:
    """Validate the members of each region and return them: either all are client numbers, or all
    are names of sites."""
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
    """Return whether the members are names of sites rather than numbers of clients."""
    return any(isinstance(member, str) for members in regions.values() for member in members)


def members_of(regions: Mapping[str, Any]) -> list[Any]:
    """Return the members of all regions in one list, sorted by the name of their region."""
    return [member for region in sorted(regions) for member in regions[region]]


def check_members(regions: Mapping[str, Any], num_clients: int) -> Iterator[Violation]:
    """Yield an error if a client is in no region or in two, or a number is that of no client."""
    members = members_of(regions)
    if twice := [member for member, number in Counter(members).items() if number > 1]:
        yield Violation(_FIELD, f"{_said(twice)} in more than one place; each client is in one")
    elif not are_named(regions):
        if unknown := [number for number in members if number >= num_clients]:
            text = f"{_said(unknown)} no client; they are numbered from 0 to {num_clients - 1}"
            yield Violation(_FIELD, text)
        if missing := sorted(set(range(num_clients)) - set(members)):
            yield Violation(_FIELD, f"{_said(missing)} in no region; each client is in one")


def _said(members: list[Any]) -> str:
    named = ", ".join(map(str, members[:_MAX_NAMED]))
    more = f" and {len(members) - _MAX_NAMED} more" if len(members) > _MAX_NAMED else ""
    return f"{named}{more} {'is' if len(members) == 1 else 'are'}"
