"""A run that is submitted for workers that an engine starts, and stopped where it takes none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.run_handle import RunHandle
from stratagem.client.sdk.torch_process import import_folders
from stratagem.common.base.errors import StratagemError, UnavailableError
from stratagem.common.base.ids import RunId
from stratagem.common.job import JobSpec


@contextmanager
def submitted_run(client: Client, job: JobSpec, run_id: RunId, job_path: Path) -> Iterator[None]:
    """Submit the run, and then, in the body, its workers; without workers it is stopped again,
    unless it was there before, with workers of its own. The error says which."""
    handle = client.submit(job, run_id, import_path=import_folders(job_path))
    try:
        yield
    except UnavailableError as error:
        raise UnavailableError(f"{error}; {_without_workers(handle)}") from None


def _without_workers(handle: RunHandle) -> str:
    """Stop a run whose workers nobody has taken, and return what has become of it."""
    if not handle.created:
        return f"run {handle.run_id}, which was there before, goes on"
    try:
        handle.cancel()
    except StratagemError as error:
        return f"and run {handle.run_id} could not be stopped: {error}"
    return f"run {handle.run_id}, submitted for it, was stopped"
