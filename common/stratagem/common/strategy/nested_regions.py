"""A federation of federations: the clients of the outer one are regions, and those of each region
are the clients of the strategy in `options.inner`, which is Federated as well.

A region tells the sums of its clients, so the model is that of `options.regions` over the same
tree. Says who is in which region, and what goes together with it.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from stratagem.common.base.errors import Violation
from stratagem.common.schema.rules import differing
from stratagem.common.strategy.choices import All, FedAvg, FedProx, Random
from stratagem.common.strategy.federated import FederatedOptions
from stratagem.common.strategy.regions import (
    against_regions,
    are_named,
    check_members,
    members_of,
)

if TYPE_CHECKING:
    from stratagem.common.strategy.strategies import Federated

_INNER: Final = "options.inner"
_OF_A_REGION: Final = (
    "local_epochs",
    "quorum",
    "round_deadline_s",
    "over_select",
    "on_client_error",
    "on_missing_quorum",
)
"""Options of the inner federation; the others need single updates, or all of them together."""


def region_names(outer: "Federated") -> tuple[str, ...]:
    """Return the names of the regions, in their order; those of regions that the job does not name
    are numbers."""
    regions = outer.options.regions
    return tuple(sorted(regions)) if regions else tuple(map(str, range(outer.num_clients)))


def clients_by_region(outer: "Federated", inner: "Federated") -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the clients of each region, ascending, of all clients from 0 on.

    Named sites are numbered in order of name. Unless the job says who is where, each region has as
    many clients as the next.
    """
    regions, size = outer.options.regions, inner.num_clients
    if regions is None:
        return tuple(tuple(range(at * size, (at + 1) * size)) for at in range(outer.num_clients))
    numbers: dict[Any, int] = {name: at for at, name in enumerate(sorted(members_of(regions)))}
    if not are_named(regions):
        numbers = {number: number for number in numbers}
    return tuple(tuple(sorted(map(numbers.__getitem__, regions[name]))) for name in sorted(regions))


def check_nested(outer: "Federated", inner: "Federated") -> Iterator[Violation]:
    """Yield what is wrong with regions that are federations of their own."""
    yield from _members(outer, inner)
    for name, text in against_regions(outer.options).items():
        yield Violation(f"options.{name}", f"is not possible with regions: {text}")
    if isinstance(outer.aggregation, FedProx):
        text = "FedProx changes the steps of clients, and those of this one are regions; use FedAvg"
        yield Violation("aggregation.method", f"{text} or FedYogi")
    if not isinstance(outer.client_selection, All | Random):
        text = "ByCapability needs clients that live on one worker; use All or Random"
        yield Violation("client_selection.method", text)
    if outer.options.local_epochs != 1:
        text = "is of clients that train, which are those of options.inner; set it there"
        yield Violation("options.local_epochs", text)
    if outer.options.strikes is not None:
        yield Violation("options.strikes", "is of single clients, and these are regions")
    if outer.options.on_missing_quorum != "fail":
        text = 'a region that has failed is not asked again in its round; use "fail"'
        yield Violation("options.on_missing_quorum", text)
    yield from _inside(inner)
    yield from _deadlines(outer, inner)


def _members(outer: "Federated", inner: "Federated") -> Iterator[Violation]:
    regions = outer.options.regions
    if regions is None:
        return
    if len(regions) != outer.num_clients:
        text = f"has {len(regions)} regions, and num_clients is {outer.num_clients}; with a "
        text += "federation as options.inner each region is a client"
        yield Violation("options.regions", text)
    largest = max(len(members) for members in regions.values())
    if inner.num_clients != largest:
        text = f"{inner.num_clients} is not {largest}, the clients of the largest of the regions"
        yield Violation(f"{_INNER}.num_clients", text)
    yield from check_members(regions, len(members_of(regions)))


def _inside(inner: "Federated") -> Iterator[Violation]:
    if not isinstance(inner.aggregation, FedAvg):
        text = f"{type(inner.aggregation).__name__} makes no sum of clients; in a region use FedAvg"
        yield Violation(f"{_INNER}.aggregation.method", text)
    if not isinstance(inner.client_selection, All | Random):
        text = "in a region use All or Random"
        yield Violation(f"{_INNER}.client_selection.method", text)
    default = FederatedOptions()
    others = sorted({field.name for field in fields(FederatedOptions)} - {*_OF_A_REGION})
    for name in differing(inner.options, default, others):
        possible = ", ".join(_OF_A_REGION)
        text = f"is not possible in a region, which tells sums of its clients; {possible} are"
        yield Violation(f"{_INNER}.options.{name}", text)


def _deadlines(outer: "Federated", inner: "Federated") -> Iterator[Violation]:
    whole, part = outer.options.round_deadline_s, inner.options.round_deadline_s
    if whole is not None and part is not None and part * inner.rounds >= whole:
        rounds = f"{inner.rounds} rounds of {part:g} s" if inner.rounds > 1 else f"{part:g} s"
        text = f"{rounds} in a region must be over before its own round, after {whole:g} s"
        yield Violation(f"{_INNER}.options.round_deadline_s", text)
