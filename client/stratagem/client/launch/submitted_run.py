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
    unless it was there before, with workers of its own. The error says which, and so does the
    KeyboardInterrupt of who does not wait for the engine's answer: workers that it takes all the
    same leave a run that was stopped."""
    how = f"`stratagem cancel {run_id} --coordinator {client.address}` stops it"
    try:
        handle = client.submit(job, run_id, import_path=import_folders(job_path))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; run {run_id} may be submitted: {how}") from None
    try:
        yield
    except UnavailableError as error:
        raise UnavailableError(f"{error}; {_without_workers(handle, how)}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {_without_workers(handle, how)}") from None


def _without_workers(handle: RunHandle, how: str) -> str:
    """Stop a run whose workers nobody has taken, and return what has become of it. how: somebody
    else could."""
    if not handle.created:
        return f"run {handle.run_id}, which was there before, goes on"
    try:
        handle.cancel()
    except StratagemError as error:
        return f"and run {handle.run_id} could not be stopped: {error}; {how}"
    except KeyboardInterrupt:
        text = f"interrupted; run {handle.run_id} may not have been stopped: {how}"
        raise KeyboardInterrupt(text) from None
    return f"run {handle.run_id}, submitted for it, was stopped"
