"""What a launcher is asked for: so many workers for one run, and the command of each.

Pure. A launcher keeps no state: the run is the coordinator's, the processes are the engine's.
"""

from dataclasses import dataclass
from typing import Final

from stratagem.client.launch.worker_options import names_of
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import RunId
from stratagem.common.job import JobSpec, entry_points
from stratagem.common.rpc.channel import split_addresses

OF_THE_LAUNCHER: Final = ("--rendezvous", "--coordinator", "--for-run", "--name")


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """So many workers for a run."""

    run_id: RunId
    coordinator: str
    num_workers: int
    command: tuple[str, ...]
    """Of one worker, but for the launcher whose variables it reads."""

    def command_of(self, launcher: str) -> tuple[str, ...]:
        """Return the command of a worker that this launcher starts."""
        return (*self.command, "--rendezvous", launcher)


def check_addresses(option: str, addresses: str) -> None:
    """Raise InvalidInputError for what is not the addresses of a coordinator. option: that says
    them."""
    try:
        split_addresses(addresses)
    except ValueError as error:
        raise InvalidInputError.at(option, str(error)) from None


def launch_of(
    job: JobSpec,
    run_id: RunId,
    coordinator: str,
    num_workers: int,
    python: str,
    folders: tuple[str, ...],
    options: tuple[str, ...],
) -> WorkerLaunch:
    """Return the launch of workers for a run of a job.

    Workers may import what this job names, and nothing else, unless the options say `--allow`.
    python: the interpreter, at its place on the nodes. folders: the users' modules, at their places
    there. options: of each worker.
    Raises InvalidInputError for options that a worker does not have or the launch itself says, and
    for a job that brings code which no option lets in.
    """
    for name in OF_THE_LAUNCHER:
        if name in {option.partition("=")[0] for option in options}:
            raise InvalidInputError.at("--worker", f"{name} is said by the launch; leave it out")
    given = names_of(options)
    if job.code is not None and "--allow-code" not in given:
        problem = "the job brings code along; say which may run, as in --worker '--allow-code any'"
        raise InvalidInputError.at("--worker", problem)
    command = [python, "-m", "stratagem.worker", "--coordinator", coordinator, "--for-run", run_id]
    if "--allow" not in given and "--site" not in given:
        for name in entry_points(job):
            command += ["--allow", name]
    if "--import-path" not in given:
        for folder in folders:
            command += ["--import-path", folder]
    return WorkerLaunch(run_id, coordinator, num_workers, (*command, *options))
