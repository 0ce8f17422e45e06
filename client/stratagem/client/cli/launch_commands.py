"""`stratagem launch`: a run, and workers for it that an engine starts on many machines."""

import sys
from pathlib import Path
from shlex import split
from typing import Annotated, Final

import typer

from stratagem.client.cli.options import CoordinatorOption, with_proof
from stratagem.client.cli.query_commands import client_of
from stratagem.client.cli.reporting import complain, reporting
from stratagem.client.cli.run_commands import JobArgument, RunIdOption, SetOption
from stratagem.client.launch import slurm_script
from stratagem.client.launch.worker_launch import WorkerLaunch, launch_of
from stratagem.client.sdk.async_client import DEFAULT_ADDRESS
from stratagem.client.sdk.torch_process import import_folders
from stratagem.common.base.errors import StratagemError
from stratagem.common.base.host_port import is_loopback, split_address
from stratagem.common.base.ids import check_run_id, new_run_id
from stratagem.common.job import JobSpec, load_job
from stratagem.common.rpc.channel import PLAINTEXT, Proof
from stratagem.common.rpc.leader_channel import split_addresses

TAKES_OPTIONS: Final = {"allow_extra_args": True, "ignore_unknown_options": False}

NumOption = Annotated[
    int, typer.Option("-n", "--workers", metavar="N", min=1, help="How many workers.")
]
WorkerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--worker",
        metavar="OPTIONS",
        help="Options of each worker, as '--threads 4 --tags fast'; repeatable.",
    ),
]
PrintOption = Annotated[
    bool,
    typer.Option("--print", help="Only print what would be handed over; submit nothing."),
]

launch = typer.Typer(
    help="Submit a job, and let an engine start workers for it.", no_args_is_help=True
)


@launch.callback()
def _launch() -> None:
    pass


def slurm(  # noqa: PLR0913  (each parameter is an option of the command line)
    context: typer.Context,
    job_path: JobArgument,
    workers: NumOption,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    overrides: SetOption = None,
    run_id: RunIdOption = None,
    worker: WorkerOption = None,
    only_print: PrintOption = False,
) -> None:
    """Submit a job, and a batch job of Slurm with workers for it.

    The script, RUN.sbatch in this folder, is what sbatch is given: read it, change it, hand it over
    again. Options after -- are sbatch's, as in `-- --partition=gpu --gpus-per-task=1`. Workers
    leave when the run has ended; those that are preempted commit, leave, and their job is put back
    into the queue.
    """
    with reporting():
        job = load_job(job_path, overrides or [])
        chosen = new_run_id(job.name) if run_id is None else check_run_id(run_id)
        options = tuple(piece for text in worker or () for piece in split(text))
        folders = tuple(str(folder.resolve()) for folder in import_folders(job_path))
        wanted = launch_of(job, chosen, coordinator, workers, sys.executable, folders, options)
        text = slurm_script.slurm_script(wanted, tuple(context.args))
        if only_print:
            print(text, end="")
            return
        _warn_of_loopback(coordinator)
        script = Path(f"{chosen}.sbatch")
        script.write_text(text)
        number = _submit(job, wanted, proof, job_path, script)
        print(f"run {chosen}; Slurm's job {number}, of {script}")
        print(f"follow it with: stratagem attach {chosen} --coordinator {coordinator}")


def _submit(job: JobSpec, wanted: WorkerLaunch, proof: Proof, job_path: Path, script: Path) -> str:
    """Submit the run, then its workers; without workers the run is stopped again."""
    with client_of(wanted.coordinator, proof) as client:
        handle = client.submit(job, wanted.run_id, import_path=import_folders(job_path))
        try:
            return slurm_script.submit(script)
        except StratagemError:
            handle.cancel()
            raise


def _warn_of_loopback(coordinator: str) -> None:
    hosts = [split_address(address)[0] for address in split_addresses(coordinator)]
    if any(map(is_loopback, hosts)):
        complain(f"{coordinator} is this machine alone: workers elsewhere do not reach it")


launch.command("slurm", context_settings=TAKES_OPTIONS)(with_proof(slurm))
