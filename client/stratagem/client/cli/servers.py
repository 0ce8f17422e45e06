"""Define the commands that run servers, diagnose a cluster, or check the audit of a site."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from stratagem.client.cli.shared import (
    DATA_DIR,
    FAILED,
    AccessOptions,
    DataDirOption,
    Format,
    FormatOption,
    TagOption,
    ThreadsOption,
    WebOption,
    as_command,
    make_console,
    tag_arguments,
)
from stratagem.client.dashboard.start import DEFAULT_LISTEN, page_beside, page_of
from stratagem.client.local.cluster import LocalCluster, threads_each
from stratagem.client.sdk.client import DEFAULT_ADDRESS
from stratagem.client.sdk.doctor import examine
from stratagem.client.sdk.torch_process import finding_in
from stratagem.client.terminal import tables
from stratagem.common.base.errors import IntegrityError, InvalidInputError
from stratagem.common.base.text import counted, split_address
from stratagem.common.identity.audit import check_lines, hashes
from stratagem.common.observe.findings import Finding, Level
from stratagem.common.rpc.health_probe import TIMEOUT_S, health_of, is_healthy

# ---- Servers ----
#
# The servers are a whole local cluster, the dashboard, and single coordinator or worker
# processes.


def up(  # noqa: PLR0913  (each parameter is an option of the command line)
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Number of workers.")
    ] = 2,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="Address that the coordinator listens on."
        ),
    ] = DEFAULT_ADDRESS,
    data_dir: DataDirOption = DATA_DIR,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="MODULE:NAME",
            help="Entry point that jobs may name; by default all; repeatable.",
        ),
    ] = None,
    import_path: Annotated[
        list[Path] | None,
        typer.Option(
            "--import-path",
            metavar="DIR",
            help="Folder with your modules; by default the current folder; repeatable.",
        ),
    ] = None,
    threads: ThreadsOption = None,
    tag: TagOption = None,
    web: WebOption = False,
) -> None:
    """Run a coordinator and workers here, until Ctrl-C or SIGTERM."""
    cluster = LocalCluster(
        workers=workers,
        data_dir=data_dir,
        allow=allow or ("*:*",),
        import_path=import_path or (Path.cwd(),),
        data_root=import_path or (Path.cwd(),),
        threads=threads,
        listen=listen,
        worker_arguments=tag_arguments(tag or (), workers),
    )
    signal.signal(signal.SIGTERM, _interrupt)
    with cluster, page_beside(cluster.address, is_wanted=web):
        who = f"{counted(workers, 'worker')}, {threads_each(threads).each}"
        print(f"coordinator at {cluster.address}, {who}, state in {data_dir}")
        print("submit with: stratagem run JOB.yaml; stop with Ctrl-C or SIGTERM", flush=True)
        while True:
            signal.pause()


def dashboard(  # noqa: PLR0913  (each parameter is an option of the command line)
    access: AccessOptions,
    listen: Annotated[
        str,
        typer.Option("--listen", metavar="HOST:PORT", help="Address that the page is served on."),
    ] = DEFAULT_LISTEN,
    operate: Annotated[
        bool,
        typer.Option(
            "--operate",
            help="Add buttons that stop, resume and delete runs, with your permissions.",
        ),
    ] = False,
    page_token_file: Annotated[
        Path | None,
        typer.Option(
            "--page-token-file",
            metavar="FILE",
            help="File with the token that browsers must present; by default a new one is made at "
            "each start.",
        ),
    ] = None,
    page_tls_cert: Annotated[
        Path | None,
        typer.Option("--page-tls-cert", metavar="FILE", help="TLS certificate of the page."),
    ] = None,
    page_tls_key: Annotated[
        Path | None,
        typer.Option("--page-tls-key", metavar="FILE", help="Private key of --page-tls-cert."),
    ] = None,
    public_url: Annotated[
        str,
        typer.Option(
            "--public-url",
            metavar="URL",
            help="Public URL of the page, if browsers reach it at another address.",
        ),
    ] = "",
    behind_proxy: Annotated[
        bool,
        typer.Option("--behind-proxy", help="A proxy in front of the page terminates TLS."),
    ] = False,
) -> None:
    """Show runs and workers in the browser, until Ctrl-C or SIGTERM.

    The page is a client like any other, in a process of its own: it shows what the coordinator lets
    you read, and no run depends on it. The command prints the address to open, which contains a
    token. The page is read-only unless --operate is given; then whoever has the token acts as you.

    On 127.0.0.1 only this machine can reach the page. Any other address requires --page-token-file,
    and --page-tls-cert with --page-tls-key or --behind-proxy.
    """
    server = page_of(
        access.coordinator,
        access.proof,
        {
            "listen": listen,
            "operates": operate,
            "token_file": page_token_file,
            "tls_cert": page_tls_cert,
            "tls_key": page_tls_key,
            "public_url": public_url,
            "behind_proxy": behind_proxy,
        },
    )
    acts = " (its buttons act as you)" if operate else ""
    signal.signal(signal.SIGTERM, _interrupt)
    print(f"page of {access.coordinator} at {server.url}{acts}", flush=True)
    server.serve()


def health(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="Address of the health port, as set by --health-port."
        ),
    ],
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait for an answer."),
    ] = TIMEOUT_S,
) -> None:
    """Query the health port of a coordinator or worker.

    Exit code: 0 if it is serving, else 1.
    """
    try:
        split_address(address)
    except ValueError as error:
        raise InvalidInputError.at("address", str(error)) from None
    answer = health_of(address, timeout)
    print(answer)
    raise typer.Exit(0 if is_healthy(answer) else 1)


def coordinator(context: typer.Context) -> None:
    """Run one coordinator process, with the options that follow.

    `stratagem coordinator --help` lists them.
    """
    _become("stratagem.coordinator", context.args)


def worker(context: typer.Context) -> None:
    """Run one worker process, with the options that follow.

    `stratagem worker --help` lists them.
    """
    _become("stratagem.worker", context.args)


def restore(context: typer.Context) -> None:
    """Make the data of a new coordinator from a backup.

    `stratagem restore --help` lists the options, including those that the new coordinator will be
    started with.
    """
    _become("stratagem.coordinator.process.restore", context.args)


def _become(module: str, arguments: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# ---- Doctor ----

WORKER_SETTINGS: Final = "--worker-settings"


class DoctorCommand(TyperCommand):
    """A command that leaves the words after `--worker-settings` unparsed: options of a worker."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if WORKER_SETTINGS in args:
            args.insert(args.index(WORKER_SETTINGS) + 1, "--")
        return super().parse_args(ctx, args)


def doctor(
    access: AccessOptions,
    form: FormatOption = Format.TEXT,
    is_worker: Annotated[
        bool,
        typer.Option(
            WORKER_SETTINGS,
            help="Examine the settings of a worker on this machine instead: everything that "
            "follows is read as options of `stratagem worker`, in addition to STRATAGEM_WORKER_* "
            "in the environment.",
        ),
    ] = False,
    worker_options: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKER OPTION]...", hidden=True)
    ] = None,
) -> None:
    """Diagnose a cluster, and say how to fix what is wrong.

    Examines this client, the coordinator and all its workers: connection and latency, versions,
    certificates, clocks, disks, limits, torch, numerics, and whether workers can reach each other.
    Nothing is changed.

    Exit code: 0 if nothing has failed (there may be warnings), else 1.
    """
    if worker_options and not is_worker:
        raise typer.BadParameter(
            f"{worker_options[0]} is an option of a worker; write it after {WORKER_SETTINGS}"
        )
    if is_worker:
        findings = _of_worker(worker_options or [])
    else:
        findings = asyncio.run(examine(access.coordinator, access.proof))
    if form is Format.JSON:
        print(tables.many_to_json(findings))
    else:
        make_console().print(tables.findings_table(findings))
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(FAILED)


def _of_worker(options: Sequence[str]) -> list[Finding]:
    """Return findings about a worker with these settings, made by a process that loads torch and
    the user's modules."""
    if importlib.util.find_spec("torch") is None:
        advice = "pip install 'stratagem[worker]', or run this where the worker runs"
        return [Finding("torch", "worker", Level.FAIL, "is not installed here", advice)]
    command = [sys.executable, "-m", "stratagem.tools.doctor", *options]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not ended.stdout.startswith("["):  # --help, or a failure that stderr explains
        print(ended.stdout, end="")
        raise typer.Exit(ended.returncode)
    return list(map(finding_in, json.loads(ended.stdout)))


# ---- Audit ----
#
# The command reads a file on this machine and opens no connection.

audit = typer.Typer(help="The audit log that a site keeps.", no_args_is_help=True)


@audit.callback()
def _audit() -> None:
    pass


@audit.command("verify")
@as_command
def verify(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Audit log file, such as audit.jsonl.")
    ],
    head: Annotated[
        str,
        typer.Option(metavar="HASH", help="Last hash noted earlier, which must be in the file."),
    ] = "",
) -> None:
    """Check that an audit log was not tampered with.

    Names the first line that was changed, removed or inserted. Removal of the last lines cannot be
    detected: note the last hash elsewhere, and pass it as --head later.
    """
    try:
        with file.open("rb") as lines:
            checked = check_lines(lines)
        if head and not _has(file, head):
            raise IntegrityError(f"no line has the hash {head}: lines have been removed")
    except OSError as error:
        raise InvalidInputError(f"{file}: {error.strerror}") from None
    except IntegrityError as error:
        raise IntegrityError(f"{file}: {error}") from None
    print(f"{file}: {counted(checked.num_lines, 'line')}, none changed; last hash {checked.head}")
    if checked.num_torn:
        print(f"the file notes {counted(checked.num_torn, 'line')} that a crash cut off")
    if checked.is_torn:
        print("it ends in a line that a crash cut off: nothing of that line has left the site")


def _has(file: Path, head: str) -> bool:
    with file.open("rb") as lines:
        return head in hashes(lines)
