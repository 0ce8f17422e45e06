"""Define the commands that follow a run to its end: run, attach, watch, resume.

Ctrl-C stops a run on a cluster that the command itself started, and the run can be resumed; a run
on another coordinator continues.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from stratagem.client.cli.shared import (
    DATA_DIR,
    AccessOptions,
    DataDirOption,
    Detail,
    DetailOptions,
    Format,
    FormatOption,
    LocalOption,
    LogToOption,
    RunArgument,
    RunDisplay,
    TagOption,
    ThreadsOption,
    View,
    WebOption,
    complain,
    make_console,
    print_items,
    print_line,
    show,
    tag_arguments,
)
from stratagem.client.course.views import Event, is_of_verifier
from stratagem.client.dashboard.start import page_beside
from stratagem.client.local.cluster import LocalCluster, LocalRun, threads_each
from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.client.sdk.torch_process import import_folders
from stratagem.client.sinks.sink import Sink, sinks_of
from stratagem.client.terminal import tables
from stratagem.client.terminal.completion import event_kinds
from stratagem.client.terminal.followed import FollowedRun
from stratagem.common.base.errors import InvalidInputError, RunFailedError
from stratagem.common.base.ids import check_run_id, new_run_id
from stratagem.common.base.text import counted
from stratagem.common.job import entry_points, load_job, with_fields
from stratagem.common.process.cpu_threads import ThreadChoice

LOCAL_PLACEMENT_TIMEOUT_S: Final = 30.0
"""The placement timeout on a local cluster, where a killed worker is back in a few seconds."""

JobArgument = Annotated[
    Path, typer.Argument(metavar="JOB", help="Job file, in YAML, TOML or JSON.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=VALUE",
        help="Override a field of the job; null sets its default; repeatable.",
    ),
]
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Print the run id and return; the run continues.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the final state to this file."),
]
ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", help="Write an HTML page about the run to this file at its end."
    ),
]
RunIdOption = Annotated[
    str | None,
    typer.Option(
        "--run-id", metavar="ID", help="Id of the run; by default made from the name of the job."
    ),
]


def run(  # noqa: PLR0913  (each parameter is an option of the command line)
    job_path: JobArgument,
    *,
    local: LocalOption = None,
    access: AccessOptions,
    overrides: SetOption = None,
    detach: DetachOption = False,
    output: OutputOption = None,
    report: ReportOption = None,
    run_id: RunIdOption = None,
    data_dir: DataDirOption = DATA_DIR,
    form: FormatOption = Format.TEXT,
    tag: TagOption = None,
    threads: ThreadsOption = None,
    log_to: LogToOption = None,
    detail: DetailOptions,
    web: WebOption = False,
) -> None:
    """Submit a job and follow its run to the end.

    On a terminal, one line shows the progress of the run, and each segment, round or generation
    leaves a line; elsewhere a line is printed every 5 s, and one for everything that goes wrong.
    Logging with --log-to affects neither the run nor the exit code.

    With --local N everything runs on this machine, for this command only; workers import your
    modules from this folder and from the folder of the job file. Ctrl-C then stops the run: its
    last commit is kept, and `stratagem resume RUN --local N` continues from it. No further workers
    will join, so a run fails after 30 s if none of the workers is suitable, unless
    placement_timeout_s is set.

    Against a coordinator Ctrl-C only detaches: the run continues, and `stratagem attach RUN` shows
    it again.

    Exit code: 0 completed, 1 failed, 130 interrupted.
    """
    if local is not None and detach:
        raise InvalidInputError("--detach needs a coordinator that stays; leave out --local")
    if detach and report is not None:
        raise InvalidInputError("--report is written at the end of the run; leave out --detach")
    for option, given in (("--tag", tag), ("--threads", threads)):
        if local is None and given:
            raise InvalidInputError(f"{option} only concerns local workers; give --local N")
    if detach and log_to:
        raise InvalidInputError(
            "--detach does not follow the run, so it logs nothing; "
            "use `stratagem export RUN --to SINK:TARGET --follow`"
        )
    view = View(form, detail)
    sinks = sinks_of(log_to or ())
    job = load_job(job_path, overrides or [])
    chosen = new_run_id(job.name) if run_id is None else check_run_id(run_id)

    def submit(client: Client, where: str = "") -> _Following:
        with view.doing(f"submitting {chosen}{where}"):
            handle = client.submit(job, chosen, import_path=import_folders(job_path))
        return _Following(handle, view, output, report=report, sinks=sinks)

    if local is None:
        address = access.coordinator
        with access.client() as client, page_beside(address, access.proof, is_wanted=web):
            _follow_remote(submit(client, f" to {address}"), address, detach=detach)
        return
    if job.placement_timeout_s is None:
        job = with_fields(job, {"placement_timeout_s": LOCAL_PLACEMENT_TIMEOUT_S})
    folders = tuple(map(str, import_folders(job_path)))
    allow_code = "none" if job.code is None else "any"
    choice = threads_each(threads)
    settings = LocalRun(entry_points(job), folders, tuple(tag or ()), allow_code, choice.number)
    with (
        _local_client(settings, choice, local, data_dir, view) as client,
        page_beside(client.address, is_wanted=web),
    ):
        settings.save(data_dir, chosen)
        _follow_local(replace(submit(client), threads=choice.number), local, data_dir)


def attach(
    run_id: RunArgument,
    access: AccessOptions,
    *,
    form: FormatOption = Format.TEXT,
    detail: DetailOptions,
) -> None:
    """Follow a run until it ends. Ctrl-C detaches; the run continues.

    Earlier events are counted but not printed; `stratagem watch RUN` prints them.
    """
    with access.client() as client:
        handle = client.get(run_id)
        shows_earlier = detail is Detail.EVENTS or form is Format.JSON
        first_event = 0 if shows_earlier else handle.status().event_index + 1
        following = _Following(handle, View(form, detail), first_event=first_event)
        _follow_remote(following, access.coordinator)


def watch(
    run_id: RunArgument,
    access: AccessOptions,
    form: FormatOption = Format.TEXT,
    from_index: Annotated[
        int,
        typer.Option("--from-index", metavar="N", min=0, help="Index of the first event to print."),
    ] = 0,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="Only events of this kind, such as SegmentFinished; repeatable.",
            autocompletion=event_kinds,
        ),
    ] = None,
    newest: Annotated[
        int | None,
        typer.Option(
            "--newest",
            metavar="N",
            min=1,
            help="Print only the newest N events, newest first, and exit.",
        ),
    ] = None,
) -> None:
    """Print the events of a run as they happen, until it ends.

    Ctrl-C only stops printing. Of a verification the results are printed; --kind and JSON have all.
    """
    with access.client() as client:
        run, kinds, backwards = client.get(run_id), kind or (), newest is not None
        items = run.watch(from_index, kinds=kinds, limit=newest, newest_first=backwards)
        console = make_console()
        for item in items:
            if form is Format.JSON:
                print_items(console, [item])
            elif isinstance(item, Event) and (kinds or not is_of_verifier(item)):
                print_line(console, f"{item.index:>5}  {item.phase:<10}  {item.sentence}")


def resume(  # noqa: PLR0913  (each parameter is an option of the command line)
    run_id: RunArgument,
    *,
    local: LocalOption = None,
    access: AccessOptions,
    detach: DetachOption = False,
    data_dir: DataDirOption = DATA_DIR,
    form: FormatOption = Format.TEXT,
    from_segment: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="SEGMENT",
            min=0,
            help="Continue from the commit of this segment; later steps are trained again. "
            "`status` lists the commits.",
        ),
    ] = None,
    overrides: SetOption = None,
    new_run_id: Annotated[
        str | None,
        typer.Option("--run-id", metavar="ID", help="Id of the new run that --set creates."),
    ] = None,
    detail: DetailOptions,
) -> None:
    """Continue a run that has ended, or train it for longer.

    It continues from its last commit, or from the one that --from names, and is followed to its
    end. A run that has not ended continues anyway: it is only followed, as by `stratagem attach`.

    With --set a new run continues from that commit, with its optimizer, its schedule and its step:
    `resume RUN --set epochs=20`. You can change the length of the training, the numeric settings of
    the optimizer, its schedule and the evaluation; model, data, batch size, seed and strategy stay
    the same.

    Use --local N for a run that was started with --local, in the same folder. Each worker has as
    many threads as it had then, so results stay bit-identical, whatever the number of workers.
    """
    if new_run_id is not None and not overrides:
        raise InvalidInputError("--run-id names the new run that --set creates; give --set")
    view = View(form, detail)

    def begin(client: Client) -> tuple[RunHandle, int]:
        if not overrides:
            return _resume_run(client, run_id, from_segment)
        segment = from_segment
        return client.resume_as(run_id, overrides, from_segment=segment, new_run_id=new_run_id), 0

    if local is None:
        with access.client() as client:
            handle, from_index = begin(client)
            following = _Following(handle, view, from_index=from_index)
            _follow_remote(following, access.coordinator, detach=detach)
        return
    local_run = LocalRun.load(data_dir, check_run_id(run_id)).with_code_in(overrides or [])
    threads = local_run.threads_of(local)
    local_run = replace(local_run, threads=threads.number)
    with _local_client(local_run, threads, local, data_dir, view) as client:
        handle, from_index = begin(client)
        local_run.save(data_dir, handle.run_id)
        following = _Following(handle, view, from_index=from_index, threads=local_run.threads)
        _follow_local(following, local, data_dir)


def _resume_run(client: Client, run_id: str, segment: int | None) -> tuple[RunHandle, int]:
    """Resume the run; return its handle and the index of the event that comes next."""
    handle = client.get(run_id)
    before = handle.status()
    # If its cluster was killed while it ran, it continues by itself.
    if not before.phase.is_final and segment is None:
        return handle, before.event_index
    handle.resume(segment)
    return handle, before.event_index + 1


# ---- Following ----


@dataclass(frozen=True, slots=True)
class _Following:
    """A run that a command follows and displays until it ends, with an HTML report and sinks."""

    handle: RunHandle
    view: View
    output: Path | None = None
    from_index: int = 0
    first_event: int = 0
    """The index of the first event to show; earlier ones are only counted."""
    report: Path | None = None
    """The path of the HTML report, which is written however the run ends; None for no report."""
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    """The sinks that log the run, keyed by their command-line text."""
    threads: int | None = None
    """The number of threads per worker, if this command started the workers."""

    def say_why(self) -> None:
        """Print the remarks on the submission, such as why the strategy was chosen, if any."""
        if self.handle.note:
            complain(self.handle.note)

    def to_the_end(self) -> None:
        """Display the run until it ends, then its result. Raises what RunHandle.result() raises."""
        handle, console, form = self.handle, make_console(), self.view.form
        self.say_why()
        display = RunDisplay(FollowedRun.of(handle.status()), self.view.detail, self.first_event)
        items = handle.watch(self.from_index)
        with ExitStack() as stack:
            if self.sinks:
                from stratagem.client.sinks.outlet import LogOutlets

                outlets = stack.enter_context(LogOutlets(handle, self.sinks, complain))
                items = map(outlets.take, items)
            show(console, form, items, display)
        if form is Format.JSON:
            print_line(console, tables.to_json(handle.status(), type="status"))
        if self.report is not None:
            handle.report(self.report)
        result = handle.result()
        if self.output is not None:
            result.download(self.output)
        if form is Format.TEXT:
            tables.print_status(console, result.status, self.threads)
            if self.output is not None:
                print_line(console, f"state written to {self.output}")
            if self.report is not None:
                print_line(console, f"report written to {self.report}")


def _follow_remote(following: _Following, coordinator: str, *, detach: bool = False) -> None:
    run_id = following.handle.run_id
    if detach:
        following.say_why()
        text = run_id if following.view.form is Format.TEXT else json.dumps({"run_id": run_id})
        print_line(make_console(), text)
        return
    try:
        following.to_the_end()
    except KeyboardInterrupt:
        complain(f"detached; run {run_id} continues at {coordinator}")
        complain(f"see it again with: stratagem attach {run_id} --coordinator {coordinator}")
        raise


def _follow_local(following: _Following, local: int, data_dir: Path) -> None:
    handle = following.handle
    try:
        following.to_the_end()
    except KeyboardInterrupt:
        complain(f"stopping run {handle.run_id}")
        handle.cancel()
        with suppress(RunFailedError):  # we have cancelled it
            handle.result()
        commit = handle.status().commit()
        outcome = "nothing was committed yet" if commit is None else f"step {commit.step} is kept"
        where = "" if data_dir == DATA_DIR else f" --data-dir {shlex.quote(str(data_dir))}"
        resume = f"stratagem resume {handle.run_id} --local {local}{where}"
        complain(f"stopped; {outcome}; continue with: {resume}")
        raise


@contextmanager
def _local_client(
    local_run: LocalRun, threads: ThreadChoice, workers: int, data_dir: Path, view: View
) -> Iterator[Client]:
    cluster = LocalCluster(
        workers=workers,
        data_dir=data_dir,
        allow=local_run.allow,
        allow_code=local_run.allow_code,
        import_path=tuple(Path(folder) for folder in local_run.import_path),
        threads=threads.number,
        worker_arguments=tag_arguments(local_run.tags, workers),
    )
    who = f"a coordinator and {counted(workers, 'worker')} on this machine, {threads.each}"
    with ExitStack() as stack:
        with view.doing(f"starting {who}", stays=True):
            stack.enter_context(cluster)
        yield stack.enter_context(cluster.client())
