"""Commands that look ahead: how much memory a job will need, and which settings fit.

They submit nothing and need no coordinator; the model is built here, in a process of its own.
"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from stratagem.client.cli.options import Format, FormatOption, OptionalCoordinatorOption
from stratagem.client.cli.query_commands import client_of
from stratagem.client.cli.reporting import reporting
from stratagem.client.cli.run_commands import JobArgument, SetOption
from stratagem.client.sdk.planning import estimate_memory
from stratagem.client.sdk.planning import recommend as recommend_settings
from stratagem.client.sdk.torch_process import import_folders
from stratagem.client.sdk.views import Worker
from stratagem.common.base.units import size_bytes
from stratagem.common.job import load_job
from stratagem.common.rpc.channel import PLAINTEXT, Proof

DeviceOption = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="cpu or cuda; what this machine has if not set."),
]


def estimate(
    job_path: JobArgument,
    overrides: SetOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            help="How many share the job; as many as it has room for if not set.",
        ),
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Only run the model, over one batch.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Do a few real steps here and correct by them.")
    ] = False,
    device: DeviceOption = "",
    form: FormatOption = Format.TEXT,
) -> None:
    """Say how much memory a worker of this job will need.

    The steps are played with tensors that have shapes and no memory, so the model may be larger
    than this machine. Shapes come from one row of the job's data.
    """
    with reporting():
        memory = estimate_memory(
            load_job(job_path, overrides or []),
            num_workers=workers,
            inference=inference,
            measure=measure,
            device=device,
            import_path=import_folders(job_path),
        )
        print(json.dumps(asdict(memory)) if form is Format.JSON else memory)


def recommend(  # noqa: PLR0913  (each parameter is an option of the command line)
    job_path: JobArgument,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Of each worker, such as 8GB or 512MiB; with --coordinator what they have.",
        ),
    ] = None,
    overrides: SetOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            help="How many; 1 if not set, with --coordinator all there are.",
        ),
    ] = None,
    coordinator: OptionalCoordinatorOption = None,
    proof: Proof = PLAINTEXT,
    device: DeviceOption = "",
    form: FormatOption = Format.TEXT,
) -> None:
    """Say with which settings a job fits its workers' memory.

    Exit code: 0 when it fits, 1 when nothing does.
    """
    with reporting():
        settings = recommend_settings(
            load_job(job_path, overrides or []),
            memory_bytes=None if memory is None else size_bytes(memory, "memory"),
            num_workers=workers,
            workers=workers_of(coordinator, proof),
            device=device,
            import_path=import_folders(job_path),
        )
        if form is Format.JSON:
            print(json.dumps(asdict(settings)))
        else:
            print("\n".join(settings.reasons))
            print(f"execution: {json.dumps(settings.execution)}")
            print(f"strategy: {json.dumps(settings.strategy)}")
            print(settings.estimate)
    if not settings.fits:
        raise typer.Exit(1)


def workers_of(coordinator: str | None, proof: Proof) -> tuple[Worker, ...] | None:
    """Return the workers of a coordinator; None without one."""
    if coordinator is None:
        return None
    with client_of(coordinator, proof) as client:
        return tuple(client.workers())
