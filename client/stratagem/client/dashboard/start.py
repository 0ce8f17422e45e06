"""Start a page, for the command that serves one and alongside other work.

What serving needs is imported only if a page is wanted, because most commands serve none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import typer

from stratagem.common.base.errors import UnavailableError
from stratagem.common.rpc.channel import PLAINTEXT, Proof

if TYPE_CHECKING:
    from stratagem.client.dashboard.server import PageServer

DEFAULT_LISTEN: Final = "127.0.0.1:7080"
ANY_PORT: Final = "127.0.0.1:0"


@contextmanager
def page_beside(
    coordinator: str, proof: Proof = PLAINTEXT, *, is_wanted: bool = True
) -> Iterator[None]:
    """Context manager that serves a coordinator's page from here, if wanted, and prints its
    address."""
    if not is_wanted:
        yield
        return
    try:
        server = page_of(coordinator, proof, {"listen": DEFAULT_LISTEN})
    except UnavailableError:  # another page has the port
        server = page_of(coordinator, proof, {"listen": ANY_PORT})
    with server.beside():
        typer.echo(f"page at {server.url}", err=True)
        yield


def page_of(coordinator: str, proof: Proof, options: dict[str, object]) -> "PageServer":
    """Return the page of a coordinator. Raises UnavailableError if the extra is missing."""
    try:
        from stratagem.client.dashboard.server import PageOptions, PageServer
    except ModuleNotFoundError as error:
        text = f"the page needs {error.name}: pip install 'stratagem[web]'"
        raise UnavailableError(text) from None
    return PageServer(PageOptions(**options), coordinator, proof)  # type: ignore[arg-type]
