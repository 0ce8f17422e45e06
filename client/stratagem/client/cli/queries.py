"""Define the commands that ask about runs and workers, or give a run one order."""

import json
import time
from collections.abc import Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import islice, zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from stratagem.client.cli.shared import (
    AccessOptions,
    Format,
    FormatOption,
    RunArgument,
    RunsArgument,
    WhichOption,
    complain,
    make_console,
    print_line,
)
from stratagem.client.course.members import time_text
from stratagem.client.course.population import Population, replayed
from stratagem.client.course.views import LogLine, Phase, RunStatus
from stratagem.client.terminal import tables
from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.common.base.text import counted, values_text

# ---- Queries and orders ----


def list_runs(
    access: AccessOptions,
    form: FormatOption = Format.TEXT,
    phase: Annotated[
        list[Phase] | None,
        typer.Option("--phase", case_sensitive=False, help="Only runs in this phase; repeatable."),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="PATTERN",
            help="Only runs whose name or id matches; * stands for any text.",
        ),
    ] = "*",
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", metavar="BEGIN", help="Only runs whose strategy name begins with this."
        ),
    ] = "",
    limit: Annotated[
        int,
        typer.Option(
            "--limit", metavar="N", min=0, help="Maximum number of runs to list; 0 for all."
        ),
    ] = 50,
) -> None:
    """List runs, newest first, one per line.

    On a terminal, lines are cut to its width; files and pipes get whole lines.
    """

    def is_wanted(run: RunStatus) -> bool:
        is_named = fnmatchcase(run.name, name) or fnmatchcase(run.run_id, name)
        is_so = run.strategy.lower().startswith(strategy.lower())
        return is_named and is_so and (not phase or run.phase in phase)

    with access.client() as client:
        listed = client.runs()
        runs = tuple(islice(filter(is_wanted, listed), limit or None))
        if listed and not runs:
            complain(_none_of(listed))
        if form is Format.JSON:
            print(tables.many_to_json(runs))
        else:
            tables.print_runs(make_console(), runs)


def _none_of(runs: Sequence[RunStatus]) -> str:
    """Return the message that no run matches a filter, with all runs' phases and strategies."""
    phases = ", ".join(sorted({str(run.phase) for run in runs}))
    strategies = ", ".join(sorted({run.strategy for run in runs}))
    return (
        f"none of {counted(len(runs), 'run')} matches; phases: {phases}; strategies: {strategies}"
    )


def status(
    run_id: RunArgument,
    access: AccessOptions,
    form: FormatOption = Format.TEXT,
) -> None:
    """Show a run: phase and reason, progress, metrics, commits."""
    with access.client() as client:
        run_status = client.get(run_id).status()
        if form is Format.JSON:
            print(tables.to_json(run_status))
        else:
            tables.print_status(make_console(), run_status)


def workers(
    access: AccessOptions,
    form: FormatOption = Format.TEXT,
    release: Annotated[
        str,
        typer.Option(
            "--release", metavar="NAME", help="Lift the quarantine of this worker instead."
        ),
    ] = "",
) -> None:
    """List registered workers, and refused ones with the reason."""
    with access.client() as client:
        if release:
            client.release_worker(release)
            complain(f"worker {release} is released, and gets work again")
            return
        listed, refused = client.workers(), client.refused_workers()
        if form is Format.JSON:
            print(tables.many_to_json([*listed, *refused]))
        else:
            tables.print_workers(make_console(), listed, refused)


def logs(
    run_id: RunArgument,
    access: AccessOptions,
    form: FormatOption = Format.TEXT,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends.")
    ] = False,
    worker: Annotated[
        str, typer.Option("--worker", metavar="NAME", help="Only lines of this worker.")
    ] = "",
) -> None:
    """Print the events of a run, and the output of your code.

    The output of your code comes from all workers, with their names.
    """
    with access.client() as client:
        console, run, is_empty = make_console(), client.get(run_id), True
        for line in run.logs(follow=follow, worker=worker):
            print_line(console, _log_text(line) if form is Format.TEXT else tables.to_json(line))
            is_empty = False
        if worker and is_empty:
            names = ", ".join(sorted({line.worker_id for line in run.logs()} - {""}))
            complain(f"no line of worker {worker!r}; there are lines of {names or 'no worker'}")


def stop(
    run_id: RunArgument,
    access: AccessOptions,
) -> None:
    """Stop a run. Its last commit is kept: `stratagem resume RUN` continues from it."""
    with access.client() as client:
        handle = client.get(run_id)
        phase = handle.status().phase
        if phase.is_final:
            complain(f"run {run_id} has ended already: {phase}")
            return
        handle.cancel()
        complain(f"run {run_id} is stopping; continue it later with: stratagem resume {run_id}")


def delete(
    run_id: RunArgument,
    access: AccessOptions,
) -> None:
    """Delete a run that has ended, with its states and its log."""
    with access.client() as client:
        client.get(run_id).delete()
        complain(f"run {run_id} is deleted")


def pin(
    run_id: RunArgument,
    access: AccessOptions,
) -> None:
    """Keep a run from expiring and being deleted, until unpinned."""
    with access.client() as client:
        client.get(run_id).pin()
        complain(f"run {run_id} is pinned")


def unpin(
    run_id: RunArgument,
    access: AccessOptions,
) -> None:
    """Unpin a run, so that it can expire and be deleted again."""
    with access.client() as client:
        client.get(run_id).pin(False)
        complain(f"run {run_id} is no longer pinned")


def backup(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="New folder, or the folder of an earlier backup."),
    ],
    access: AccessOptions,
) -> None:
    """Back up the journal and all states of a running coordinator.

    If the folder holds an earlier backup, only what is new is copied. Requires the scope admin.
    `stratagem restore` makes the data of a new coordinator from a backup.
    """
    with access.client() as client:
        done = client.back_up(folder)
    complain(
        f"{folder}: the journal of term {done.term} ({done.journal_bytes:,} bytes) and "
        f"{done.num_blobs} blobs, {done.num_copied} of them new"
    )


def download(  # noqa: PLR0913  (each parameter is an option of the command line)
    run_id: RunArgument,
    access: AccessOptions,
    which: WhichOption = "final",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File to write; by default RUN.safetensors."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="Write the trace that the workers recorded to this file instead.",
        ),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Write only the model, under all names of its state_dict()."),
    ] = False,
    shard_size: Annotated[
        str | None,
        typer.Option(
            "--shard-size",
            metavar="SIZE",
            help="Write the plain model as a folder of files with up to this much data each, such "
            "as 5GB.",
        ),
    ] = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Write a committed state of a run as a safetensors file.

    The file holds what the run continues from, including the state of the optimizer; tied weights
    are stored once. With --plain it holds the model's state_dict(), for any program that reads
    safetensors.

    With --shard-size that model is written to a new folder, by default RUN: files of whole tensors
    and model.safetensors.index.json, for from_pretrained and torch.distributed.checkpoint. A tensor
    larger than SIZE gets a file of its own.

    With --profile FILE the trace of a run with `execution.profiling: true` is written, as JSON for
    ui.perfetto.dev or chrome://tracing, with one row for each worker, all on one clock.
    """
    with access.client() as client:
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
        written = {"path": str(path), "size_bytes": sum(file.stat().st_size for file in files)}
        print_line(make_console(), str(path) if form is Format.TEXT else json.dumps(written))


def _log_text(line: LogLine) -> str:
    when = datetime.fromtimestamp(line.time_s).strftime("%H:%M:%S")
    return f"{when} {line.worker_id or 'coordinator'} {line.level} {line.text}"


# ---- Course of a run ----
#
# These commands show the report of a run, and the generations of a population.


def report(
    run_ids: RunsArgument,
    access: AccessOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write; by default RUN.html, or comparison.html for several runs.",
        ),
    ] = None,
) -> None:
    """Write a run, or a comparison of up to 8, as one HTML page.

    The page of one run holds curves, a panel for the strategy, the events and the job; an error in
    your code comes first. The page of several runs holds their results, the fields in which their
    jobs differ, and curves with one line per run. Neither page needs scripts or a network, and both
    print well. For a run that has not ended, a page shows what has happened so far.
    """
    with access.client() as client:
        if len(run_ids) == 1:
            path = client.get(run_ids[0]).report(output or Path(f"{run_ids[0]}.html"))
        else:
            path = output or Path("comparison.html")
            from stratagem.client.report.pages import comparison_page

            text = comparison_page(client.compare(run_ids), time_text(time.time()))
            path.write_text(text, encoding="utf-8")
        print_line(make_console(), str(path))


def population(
    run_id: RunArgument,
    access: AccessOptions,
    form: FormatOption = Format.TEXT,
    schedule: Annotated[
        Path | None,
        typer.Option(
            "--schedule",
            metavar="FILE",
            help="Write a job that trains the winner again to this file.",
        ),
    ] = None,
) -> None:
    """Show the generations of a population, and its winner.

    The lineage names, generation by generation, the member that the winner's state comes from; the
    schedule lists all hyperparameters that this state was trained with.

    --schedule writes the schedule as a job without a population: `stratagem run FILE` ends with the
    winner's state, bit for bit. FILE.json is written as JSON, any other name as YAML; an existing
    file is not overwritten.
    """
    with access.client() as client:
        if schedule is not None and schedule.exists():
            text = f"{schedule} exists already; nothing was written"
            raise InvalidInputError.at("--schedule", text)
        run = client.get(run_id)
        evolution = run.population()
        if not evolution.generations:
            raise NotFoundError(f"run {run_id} is not a population, or has not begun")
        if schedule is not None:
            document = replayed(evolution, run.status().job).document()
            is_json = schedule.suffix == ".json"
            import yaml

            text = json.dumps(document) if is_json else yaml.safe_dump(document, sort_keys=False)
            schedule.write_text(text, encoding="utf-8")
        if form is Format.JSON:
            print(json.dumps(_as_json(evolution), allow_nan=False))
        else:
            _print(make_console(), evolution)
            if schedule is not None:
                print_line(make_console(), f"schedule written to {schedule}")


def _print(console: Console, evolution: Population) -> None:
    table = Table("generation", "best", evolution.metric, "median", "copies", box=box.SIMPLE_HEAD)
    for generation, following in zip_longest(evolution.generations, evolution.generations[1:]):
        scores = sorted(m.score for m in generation.members if m.score is not None)
        best = None if generation.best is None else generation.of(generation.best)
        begun = () if following is None else following.members
        copies = [f"{m.member} from {m.parent}" for m in begun if m.parent != m.member]
        table.add_row(
            str(generation.number),
            "" if best is None else f"member {best.member}",
            "" if best is None or best.score is None else f"{best.score:.4g}",
            f"{scores[len(scores) // 2]:.4g}" if scores else "",
            ", ".join(copies),
        )
    console.print(table)
    winner = evolution.best
    if winner is None:
        return
    print_line(console, f"best: {winner}")
    lineage = evolution.lineage(winner.member, winner.generation)
    print_line(console, f"lineage: {' > '.join(f'member {member}' for member in lineage)}")
    for step, params in evolution.schedule(winner.member, winner.generation):
        print_line(console, f"from step {step}: {values_text(params)}")


def _as_json(evolution: Population) -> dict[str, object]:
    best = evolution.best
    generations = [
        {
            "generation": generation.number,
            "best": generation.best,
            "step": generation.step,
            "members": [
                {
                    "member": record.member,
                    "parent": record.parent,
                    "score": record.score,
                    "params": dict(record.params),
                }
                for record in generation.members
            ],
        }
        for generation in evolution.generations
    ]
    winner = None
    if best is not None:
        schedule = evolution.schedule(best.member, best.generation)
        winner = {
            "generation": best.generation,
            "member": best.member,
            "score": best.score,
            "params": dict(best.params),
            "lineage": evolution.lineage(best.member, best.generation),
            "schedule": [{"from_step": step, "params": dict(params)} for step, params in schedule],
        }
    return {
        "metric": evolution.metric,
        "mode": evolution.mode,
        "generations": generations,
        "best": winner,
    }
