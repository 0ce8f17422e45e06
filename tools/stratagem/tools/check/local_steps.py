"""Says how many steps the clients of a federation make, as far as that is known before a round."""

from stratagem.common.job import JobSpec
from stratagem.common.numerics.shards import split_rows
from stratagem.common.strategy import Federated
from stratagem.tools.planning.job_site import Site
from stratagem.worker.data.sources import ClientData


def local_steps(job: JobSpec, strategy: Federated, site: Site, num_rows: int) -> str:
    """Return the sentence on the steps of a client.

    Their number is known where clients get equal pieces of the rows: not where these are divided
    by label, are made for each client or at its worker, or are drawn for privacy.
    """
    count, partition = strategy.num_clients, job.partition
    clients = f"{count:,} clients" if count != 1 else "1 client"
    is_divided = (
        job.data.worker_local is None
        and (partition is None or partition.method == "contiguous")
        and job.privacy is None
        and not ClientData(job, site.entrypoints, site.sources).is_made_per_client
    )
    if not is_divided:
        return f"{clients}; the steps of each follow from its own rows"
    assert job.batch_size is not None
    steps = [-(-len(rows) // job.batch_size) for rows in split_rows(num_rows, count)]
    least, most = min(steps), max(steps)
    each = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    words = "step" if most == 1 else "steps"
    epochs = strategy.options.local_epochs
    in_round = f", {epochs:,} of which are a round" if epochs > 1 else ""
    return f"{clients}, {each} {words} to a local epoch{in_round}"
