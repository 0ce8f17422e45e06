"""Commands that ask about runs and workers, or give a run one order."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from stratagem.client.cli.options import (
    CoordinatorOption,
    Format,
    FormatOption,
    RunArgument,
    WhichOption,
)
from stratagem.client.cli.progress import print_line
from stratagem.client.cli.reporting import complain, make_console, reporting
from stratagem.client.sdk.async_client import DEFAULT_ADDRESS
from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.views import LogLine, Phase, RunStatus
from stratagem.client.terminal import tables
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import counted
from stratagem.common.rpc.channel import PLAINTEXT, Proof


@contextmanager
def connected(coordinator: str, proof: Proof) -> Iterator[Client]:
    """A client whose errors end the command."""
    with reporting(), client_of(coordinator, proof) as client:
        yield client


def client_of(coordinator: str, proof: Proof) -> Client:
    """A client of a coordinator that is shown a proof."""
    return Client(coordinator, tls=proof.tls, token_file=proof.token_file)


def list_runs(
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    form: FormatOption = Format.TEXT,
    phase: Annotated[
        list[Phase] | None,
        typer.Option("--phase", case_sensitive=False, help="Only runs in this phase; repeatable."),
    ] = None,
    name: Annotated[
        str,
        typer.Option("--name", metavar="PATTERN", help="Only runs of this name; * is any text."),
    ] = "*",
    strategy: Annotated[
        str,
        typer.Option("--strategy", metavar="BEGIN", help="Only of a strategy that begins so."),
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="At most so many; 0 for all.")
    ] = 50,
) -> None:
    """List the runs, newest first: one line per run.

    A line is cut where a terminal is narrower; a file gets all of it.
    """

    def is_wanted(run: RunStatus) -> bool:
        is_named = fnmatchcase(run.name, name) or fnmatchcase(run.run_id, name)
        is_so = run.strategy.lower().startswith(strategy.lower())
        return is_named and is_so and (not phase or run.phase in phase)

    with connected(coordinator, proof) as client:
        known = client.runs()
        runs = tuple(islice(filter(is_wanted, known), limit or None))
        if known and not runs:
            complain(_none_of(known))
        if form is Format.JSON:
            print(tables.many_to_json(runs))
        else:
            tables.print_runs(make_console(), runs)


def _none_of(known: Sequence[RunStatus]) -> str:
    """Return that no run is as asked for, and what the runs are."""
    phases = ", ".join(sorted({str(run.phase) for run in known}))
    strategies = ", ".join(sorted({run.strategy for run in known}))
    return f"of {counted(len(known), 'run')} none is so; phases: {phases}; strategies: {strategies}"


def status(
    run_id: RunArgument,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    form: FormatOption = Format.TEXT,
) -> None:
    """Show a run: phase and why, progress, metrics, commits."""
    with connected(coordinator, proof) as client:
        run_status = client.get(run_id).status()
        if form is Format.JSON:
            print(tables.to_json(run_status))
        else:
            tables.print_status(make_console(), run_status)


def workers(
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    form: FormatOption = Format.TEXT,
) -> None:
    """List the workers: registered, and refused with the reason."""
    with connected(coordinator, proof) as client:
        listed, refused = client.workers(), client.refused_workers()
        if form is Format.JSON:
            print(tables.many_to_json([*listed, *refused]))
        else:
            tables.print_workers(make_console(), listed, refused)


def logs(
    run_id: RunArgument,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    form: FormatOption = Format.TEXT,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines come, until the run ends.")
    ] = False,
    worker: Annotated[
        str, typer.Option("--worker", metavar="NAME", help="Only lines of this worker.")
    ] = "",
) -> None:
    """Print the events of a run, and what your code has printed.

    What your code has printed comes from all workers, with their names.
    """
    with connected(coordinator, proof) as client:
        console, run, is_empty = make_console(), client.get(run_id), True
        for line in run.logs(follow=follow, worker=worker):
            print_line(console, _log_text(line) if form is Format.TEXT else tables.to_json(line))
            is_empty = False
        if worker and is_empty:
            known = ", ".join(sorted({line.worker_id for line in run.logs()} - {""}))
            complain(f"no line of worker {worker!r}; there are lines of {known or 'no worker'}")


def stop(
    run_id: RunArgument,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
) -> None:
    """Stop a run. Its last commit stays: `stratagem resume RUN` goes on from there."""
    with connected(coordinator, proof) as client:
        handle = client.get(run_id)
        phase = handle.status().phase
        if phase.is_final:
            complain(f"run {run_id} has ended already: {phase}")
            return
        handle.cancel()
        complain(f"run {run_id} is stopping; go on later with: stratagem resume {run_id}")


def delete(
    run_id: RunArgument,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
) -> None:
    """Delete a run that has ended, with its states and its log."""
    with connected(coordinator, proof) as client:
        client.get(run_id).delete()
        complain(f"run {run_id} is deleted")


def pin(
    run_id: RunArgument,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
) -> None:
    """Keep a run from expiring and being deleted, until unpinned."""
    with connected(coordinator, proof) as client:
        client.get(run_id).pin()
        complain(f"run {run_id} is pinned")


def unpin(
    run_id: RunArgument,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
) -> None:
    """Let a pinned run be deleted again, and expire."""
    with connected(coordinator, proof) as client:
        client.get(run_id).pin(False)
        complain(f"run {run_id} is not pinned any more")


def backup(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A new folder, or that of an earlier backup.")
    ],
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
) -> None:
    """Copy the journal and all states while the coordinator goes on.

    Into the folder of an earlier backup only what is new is copied. Needs the scope admin. Make a
    coordinator's data of it with `stratagem restore`.
    """
    with connected(coordinator, proof) as client:
        done = client.back_up(folder)
    complain(
        f"{folder}: the journal of term {done.term} ({done.journal_bytes:,} bytes) and "
        f"{done.num_blobs} blobs, {done.num_copied} of them new"
    )


def download(  # noqa: PLR0913  (each parameter is an option of the command line)
    run_id: RunArgument,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    which: WhichOption = "final",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="RUN.safetensors if not named."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Write what the workers recorded instead."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Only the model, under all names of its state_dict().")
    ] = False,
    shard_size: Annotated[
        str | None,
        typer.Option(
            "--shard-size",
            metavar="SIZE",
            help="The plain model as a folder of files of this much data each, such as 5GB.",
        ),
    ] = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Write a committed state of a run as a safetensors file.

    It holds what the run goes on from: the optimizer's state, too, and tied weights once. With
    --plain it is the model's state_dict(), for any program that reads safetensors.

    With --shard-size that model is a new folder, RUN if not named: files of whole tensors and
    model.safetensors.index.json, for from_pretrained and torch.distributed.checkpoint. A tensor
    larger than SIZE has a file of its own.

    With --profile FILE the trace of a run with `execution.profiling: true`, as JSON for
    ui.perfetto.dev or chrome://tracing: one row for each worker, in one clock.
    """
    with connected(coordinator, proof) as client:
        run = client.get(run_id)
        if profile is not None and shard_size is not None:
            text = "a trace is one file; not with --profile"
            raise InvalidInputError.at("--shard-size", text)
        if profile is not None:
            path = run.download_profile(profile)
        else:
            named = output or Path(f"{run_id}.safetensors" if shard_size is None else run_id)
            path = run.download(named, which, plain=plain, shard_size=shard_size)
        files = path.iterdir() if path.is_dir() else (path,)
        written = {"path": str(path), "size_bytes": sum(each.stat().st_size for each in files)}
        print_line(make_console(), str(path) if form is Format.TEXT else json.dumps(written))


def _log_text(line: LogLine) -> str:
    when = datetime.fromtimestamp(line.time_s).strftime("%H:%M:%S")
    return f"{when} {line.worker_id or 'coordinator'} {line.level} {line.text}"
