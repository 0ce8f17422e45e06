"""The tree in which the updates of a round are added up: by region, and the regions by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.common.strategy import Federated
from stratagem.common.strategy.regions import are_named, members_of
from stratagem.coordinator.core.facts import Accepted, ClientBinding


def places_by_region(
    strategy: Federated, updates: Sequence[Accepted], roster: Sequence[ClientBinding]
) -> tuple[tuple[int, ...], ...]:
    """Return which accepted updates, by their places in client order, each region adds up.

    Regions stand in order of name; those without an update are left out. Without regions: ().
    """
    regions = strategy.options.regions
    if regions is None or isinstance(strategy.options.inner, Federated):
        return ()  # of regions that are clients each update is a sum already
    region_of = _region_by_member(regions)
    are_names = are_named(regions)
    places: dict[str, list[int]] = {region: [] for region in sorted(regions)}
    for place, accepted in enumerate(updates):
        binding = roster[accepted.client]
        places[region_of[binding.worker_id if are_names else binding.client]].append(place)
    return tuple(tuple(of_region) for of_region in places.values() if of_region)


def sites_of(strategy: Federated) -> frozenset[str] | None:
    """Return the sites that the regions name, of which alone the roster is made; None where they
    name none."""
    regions = strategy.options.regions
    if regions is None or not are_named(regions):
        return None
    return frozenset(members_of(regions))


def _region_by_member(regions: Mapping[str, Any]) -> dict[Any, str]:
    return {member: region for region, members in regions.items() for member in members}
