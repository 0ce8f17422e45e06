"""The command that serves the page on which runs can be watched."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from stratagem.client.cli.options import CoordinatorOption
from stratagem.client.cli.reporting import reporting
from stratagem.client.sdk.async_client import DEFAULT_ADDRESS
from stratagem.common.base.errors import UnavailableError
from stratagem.common.rpc.channel import PLAINTEXT, Proof

if TYPE_CHECKING:
    from stratagem.client.dashboard.page_server import PageServer

DEFAULT_LISTEN: Final = "127.0.0.1:7080"
ANY_PORT: Final = "127.0.0.1:0"
WebOption = Annotated[
    bool,
    typer.Option("--web", help="Also show it on a page in the browser, while this command runs."),
]


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
    """Show runs and workers on a page in the browser, until Ctrl-C.

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
        acts = "; its buttons act as you" if operate else ""
        print(f"page of {coordinator} at {server.url}{acts}", flush=True)
        server.serve()


@contextmanager
def page_beside(
    coordinator: str, proof: Proof = PLAINTEXT, *, is_wanted: bool = True
) -> Iterator[None]:
    """Serve a page of the coordinator from this process, if one is wanted, and say where."""
    if not is_wanted:
        yield
        return
    try:
        server = page_of(coordinator, proof, {"listen": DEFAULT_LISTEN})
    except UnavailableError:  # another page is there
        server = page_of(coordinator, proof, {"listen": ANY_PORT})
    with server.beside():
        typer.echo(f"page at {server.url}", err=True)
        yield


def page_of(coordinator: str, proof: Proof, options: dict[str, object]) -> "PageServer":
    """Return the page of a coordinator. Raises UnavailableError where the extra is missing."""
    try:
        from stratagem.client.dashboard.page_server import PageOptions, PageServer
    except ModuleNotFoundError as error:
        text = f"the page needs {error.name}: pip install 'stratagem[web]'"
        raise UnavailableError(text) from None
    return PageServer(PageOptions(**options), coordinator, proof)  # type: ignore[arg-type]
