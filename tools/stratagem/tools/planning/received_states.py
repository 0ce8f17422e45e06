"""How many states a worker keeps in memory for the clients of federations: of those that it is
sent, and copies of their updates that a coordinator on the same machine reads."""

from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated, PopulationBased, Strategy
from stratagem.common.tensors.local_files import MAX_COPY_BYTES
from stratagem.worker.host.blobs import MAX_FEDERATIONS, NUM_STATES
from stratagem.worker.process.settings import MAX_BLOB_MEMORY_BYTES


def num_received(job: JobSpec, state_bytes: int) -> int:
    """Return how many states of this size are kept, with the settings that a worker has unless it
    is given others; 0 where no clients train."""
    num = NUM_STATES * min(_num_federations(job.strategy), MAX_FEDERATIONS)
    has_room_for = MAX_BLOB_MEMORY_BYTES // max(state_bytes, 1)
    return min(num, max(NUM_STATES, has_room_for))


def num_copied(job: JobSpec, update_bytes: int) -> int:
    """Return of how many updates of this size there is a copy as well, until the coordinator has
    read it: of one for each federation; 0 where updates are sent."""
    if update_bytes > MAX_COPY_BYTES:
        return 0
    return min(_num_federations(job.strategy), MAX_FEDERATIONS)


def _num_federations(strategy: Strategy | None) -> int:
    """Return how many federations there are whose clients are no parties themselves."""
    match strategy:
        case PopulationBased(population_size=size, options=options):
            return size * _num_federations(options.inner)
        case Federated(options=options) if options.inner is None:
            return 1
        case Federated(num_clients=num_regions, options=options):
            return num_regions * _num_federations(options.inner)
        case _:
            return 0
