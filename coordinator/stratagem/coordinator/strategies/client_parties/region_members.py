"""Which clients each region has, and the workers that they live on."""

from collections.abc import Sequence

from stratagem.common.base.ids import Party, WorkerId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.common.strategy.nested_regions import clients_by_region, region_names
from stratagem.coordinator.core.facts import ClientBinding, RosterFormed
from stratagem.coordinator.core.state import WorkerRecord
from stratagem.coordinator.strategies.federated.federated_run import spec_of
from stratagem.coordinator.strategies.scheduling.fold_tree import sites_of


def inside(job: JobSpec) -> Federated:
    """Return the strategy of each region."""
    inner = spec_of(job).options.inner
    assert isinstance(inner, Federated), "the job was checked"
    return inner


def members_of_regions(job: JobSpec) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the clients of each region, of all clients from 0 on."""
    return clients_by_region(spec_of(job), inside(job))


def named(job: JobSpec, fact: RosterFormed) -> RosterFormed:
    """Return the roster of the regions, each with its name in place of a worker: it lives on
    several."""
    names = region_names(spec_of(job))
    clients = tuple(
        ClientBinding(client=region, worker_id=WorkerId(name), tags=())
        for region, name in enumerate(names)
    )
    return fact.model_copy(update={"clients": clients})


def roster_of_region(
    job: JobSpec, party: Party, region: int, workers: Sequence[WorkerRecord]
) -> RosterFormed | None:
    """Bind the clients of a region: sites to themselves, whether they are here or not; others to
    workers, in turn over all regions. None while there is no worker."""
    members, sites = members_of_regions(job)[region], sorted(sites_of(spec_of(job)) or ())
    names = sites or sorted(worker.member.worker_id for worker in workers)
    if not names:
        return None
    clients = tuple(
        ClientBinding(client=at, worker_id=WorkerId(names[number % len(names)]), tags=())
        for at, number in enumerate(members)
    )
    return RosterFormed(party=party, clients=clients)
