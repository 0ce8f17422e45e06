"""Serve the page, in this process until it is stopped, or in a thread alongside other work."""

import logging
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import uvicorn

from stratagem.client.dashboard.app import Page, PageSettings
from stratagem.client.dashboard.gate import PageGate, PageSessions, address_of, token_in
from stratagem.client.sdk.client import AsyncClient
from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.common.base.text import split_address
from stratagem.common.identity.tls import certificates_in, names_of
from stratagem.common.rpc.channel import PLAINTEXT, Proof

PATIENCE_S: Final = 10.0
"""The time for which a request waits for an absent coordinator; the banner reports it sooner."""
BANNER_PATIENCE_S: Final = 2.0
"""The time for which the banner's status call waits for the coordinator."""
DEFAULT_PORT: Final = 7080
_ENDING_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class PageOptions:
    """The settings of a page from the command line."""

    listen: str
    operates: bool = False
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    public_url: str = ""
    behind_proxy: bool = False


class PageServer:
    """The web server of the dashboard, for one coordinator."""

    def __init__(self, options: PageOptions, coordinator: str, proof: Proof = PLAINTEXT) -> None:
        """Prepare a page. Raises InvalidInputError if its options may not be combined."""
        try:
            host, port = split_address(options.listen)
        except ValueError as error:
            text = f"{error}; write such as {options.listen}:{DEFAULT_PORT}"
            raise InvalidInputError.at("--listen", text) from None
        if (options.tls_cert is None) != (options.tls_key is None):
            raise InvalidInputError.at("--page-tls-cert", "goes with --page-tls-key")
        has_tls, file = options.tls_cert is not None, options.token_file
        token = secrets.token_urlsafe(24) if file is None else token_in(file)
        rules = partial(
            address_of,
            host,
            has_tls=has_tls,
            public_url=options.public_url,
            has_token=file is not None,
            behind_proxy=options.behind_proxy,
            names=() if options.tls_cert is None else _named_in(options.tls_cert),
        )
        rules(port)  # before anything listens
        self._socket = _bound(host, port)
        port = self._socket.getsockname()[1]
        address = rules(port)
        is_secure = address.printed.startswith("https:")
        settings = PageSettings(address, PageSessions(token, port), options.operates, is_secure)
        client, asking = (
            AsyncClient(coordinator, patience_s=wait_s, tls=proof.tls, token_file=proof.token_file)
            for wait_s in (PATIENCE_S, BANNER_PATIENCE_S)
        )
        self.url = address.printed if file else f"{address.printed}/#token={token}"
        """The address to open, with the token unless the user has it in a file."""
        self._server = _Server(Page(settings, client, asking).app(), options)

    def serve(self) -> None:
        """Serve the page until SIGINT or SIGTERM."""
        self._server.run([self._socket])

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context manager that serves the page in a thread. Raises UnavailableError if it fails."""
        thread = threading.Thread(target=self.serve, name="page", daemon=True)
        thread.start()
        while not self._server.started and thread.is_alive():
            thread.join(0.01)
        if not self._server.started:
            raise UnavailableError("the page cannot be served; the log above says why")
        try:
            yield
        finally:
            self._server.should_exit = True
            thread.join(_ENDING_S)


class _Server(uvicorn.Server):
    """A uvicorn server that ends open streams at shutdown, instead of waiting for them."""

    def __init__(self, gate: PageGate, options: PageOptions) -> None:
        self._gate = gate
        super().__init__(
            uvicorn.Config(
                gate,
                log_level="warning",
                access_log=False,
                server_header=False,
                ssl_certfile=options.tls_cert,
                ssl_keyfile=options.tls_key,
                timeout_graceful_shutdown=1,
                lifespan="on",
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gate.end()
        # The remaining connections are slow to be closed by browsers, which is not an error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


def _named_in(path: Path) -> tuple[str, ...]:
    """Return the host names in a certificate, without wildcards."""
    from cryptography import x509

    certificate = certificates_in("--page-tls-cert", path)[0]
    names = [*names_of(certificate, x509.DNSName), *names_of(certificate, x509.IPAddress)]
    return tuple(name for name in names if "*" not in name)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address. Raises UnavailableError if that fails."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise UnavailableError(f"--listen: {host}:{port}: {error.strerror or error}") from None
