"""Commands that run servers: a whole local cluster, a page, one coordinator or worker process."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from stratagem.client.cli.options import (
    DATA_DIR,
    CoordinatorOption,
    DataDirOption,
    TagOption,
    ThreadsOption,
    WebOption,
    tag_arguments,
)
from stratagem.client.cli.reporting import reporting
from stratagem.client.dashboard.page_start import DEFAULT_LISTEN, page_beside, page_of
from stratagem.client.local.local_cluster import LocalCluster, threads_each
from stratagem.client.sdk.async_client import DEFAULT_ADDRESS
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import counted, split_address
from stratagem.common.rpc.channel import PLAINTEXT, Proof
from stratagem.common.rpc.health_probe import TIMEOUT_S, health_of, is_healthy


def up(  # noqa: PLR0913  (each parameter is an option of the command line)
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="How many workers.")
    ] = 2,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where the coordinator serves.")
    ] = DEFAULT_ADDRESS,
    data_dir: DataDirOption = DATA_DIR,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="MODULE:NAME",
            help="Entry points that jobs may name; all if none is given; repeatable.",
        ),
    ] = None,
    import_path: Annotated[
        list[Path] | None,
        typer.Option(
            "--import-path",
            metavar="DIR",
            help="A folder of your modules; this one if none is given; repeatable.",
        ),
    ] = None,
    threads: ThreadsOption = None,
    tag: TagOption = None,
    web: WebOption = False,
) -> None:
    """Run a coordinator and workers here, until Ctrl-C or SIGTERM."""
    with reporting():
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
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where the page is served.")
    ] = DEFAULT_LISTEN,
    operate: Annotated[
        bool,
        typer.Option("--operate", help="Buttons stop, resume and delete runs, as you may."),
    ] = False,
    page_token_file: Annotated[
        Path | None,
        typer.Option(
            "--page-token-file",
            metavar="FILE",
            help="What browsers have to show; unless given, made for this start.",
        ),
    ] = None,
    page_tls_cert: Annotated[
        Path | None,
        typer.Option("--page-tls-cert", metavar="FILE", help="The certificate of the page."),
    ] = None,
    page_tls_key: Annotated[
        Path | None, typer.Option("--page-tls-key", metavar="FILE", help="Its key.")
    ] = None,
    public_url: Annotated[
        str,
        typer.Option(
            "--public-url", metavar="URL", help="How browsers reach it, where that differs."
        ),
    ] = "",
    behind_proxy: Annotated[
        bool,
        typer.Option("--behind-proxy", help="A proxy in front of it speaks TLS to browsers."),
    ] = False,
) -> None:
    """Show runs and workers in the browser, until Ctrl-C or SIGTERM.

    The page is a client like any other, in a process of its own: what it shows is what the
    coordinator lets you read, and nothing of a run depends on it. It prints the address to open,
    with a token in it. It only shows, unless --operate is given; then whoever has the token acts
    as you.

    On 127.0.0.1 only this machine reaches it. Elsewhere it takes --page-token-file, and
    --page-tls-cert with --page-tls-key or --behind-proxy.
    """
    with reporting():
        server = page_of(
            coordinator,
            proof,
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
        print(f"page of {coordinator} at {server.url}{acts}", flush=True)
        server.serve()


def health(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="A --health-port.")],
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait for an answer."),
    ] = TIMEOUT_S,
) -> None:
    """Ask the health port of a coordinator or worker.

    Exit code: 0 if it serves, else 1.
    """
    with reporting():
        try:
            split_address(address)
        except ValueError as error:
            raise InvalidInputError.at("address", str(error)) from None
    answer = health_of(address, timeout)
    print(answer)
    raise typer.Exit(0 if is_healthy(answer) else 1)


def coordinator(context: typer.Context) -> None:
    """Run one coordinator process; its options follow.

    `stratagem coordinator --help` lists them.
    """
    _become("stratagem.coordinator", context.args)


def worker(context: typer.Context) -> None:
    """Run one worker process; its options follow.

    `stratagem worker --help` lists them.
    """
    _become("stratagem.worker", context.args)


def restore(context: typer.Context) -> None:
    """Make a new coordinator's data of a backup; options follow.

    `stratagem restore --help` lists them: those of the coordinator that is started then.
    """
    _become("stratagem.coordinator.process.restore", context.args)


def _become(module: str, arguments: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
