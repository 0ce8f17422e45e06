"""Serve the metrics of a process over HTTP: only `GET /metrics`, on a separate port.

Values of the event loop are read on it, which takes microseconds; the text is made in a thread.
Requests are bounded in size, time and number, so no peer can hold up the process.
"""

import asyncio
import hmac
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final, Protocol, Self

import structlog
from google.protobuf.descriptor import ServiceDescriptor

from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.common.base.files import WatchedFiles, check_private
from stratagem.common.base.ids import PROTOCOL_VERSION
from stratagem.common.base.text import is_loopback
from stratagem.common.identity.tls import (
    AUTHORITY,
    DEFAULT_TRUST_DOMAIN,
    ChainCertificate,
    Material,
    TlsFiles,
    first_to_end,
    links_of,
)
from stratagem.common.observe.metrics import Durations, LoopLag, Metric, Readings, Values, one
from stratagem.common.tensors import stream

# ---- Protection ----
#
# The scrape is protected by TLS, a scraper's certificate, and a token.
#
# The files are checked again at each handshake and each request, so they can be renewed while the
# process runs. A file that cannot be used is logged, and its old content is used meanwhile.

MIN_TOKEN_CHARS: Final = 16
_SCHEME: Final = b"bearer "


class MetricsSettings(Protocol):
    """The metrics settings that coordinator and worker share."""

    @property
    def tls_ca(self) -> Path | None: ...
    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def metrics_tls(self) -> bool: ...
    @property
    def metrics_tls_cert(self) -> Path | None: ...
    @property
    def metrics_tls_key(self) -> Path | None: ...
    @property
    def metrics_client_ca(self) -> Path | None: ...
    @property
    def metrics_token_file(self) -> Path | None: ...
    @property
    def metrics_deployment(self) -> str: ...


def deployment_of(settings: MetricsSettings) -> str:
    """Return the deployment's name: the setting if given, else the certificate's trust domain."""
    if settings.metrics_deployment:
        return settings.metrics_deployment
    if settings.tls_ca is None or settings.tls_cert is None:
        return DEFAULT_TRUST_DOMAIN
    files = TlsFiles(settings.tls_ca, settings.tls_cert, settings.tls_key)
    return files.identity().trust_domain


@dataclass(frozen=True, slots=True)
class Guard:
    """The access rules of a metrics endpoint (TLS, token); without files it is plain and open."""

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    """The authorities of which one must have signed the scraper's certificate; None: no check."""
    token_file: Path | None = None
    """The file with the token that scrapers must send as `Authorization: Bearer`."""

    @classmethod
    def of(cls, settings: MetricsSettings) -> Self:
        """Return the endpoint's access rules: with its own certificate, or else that of the process
        unless TLS is switched off. Raises InvalidInputError if settings do not fit together."""
        cert, key = settings.metrics_tls_cert, settings.metrics_tls_key
        if (cert is None) != (key is None):
            missing = "metrics_tls_key" if key is None else "metrics_tls_cert"
            raise InvalidInputError.at(missing, "is needed: certificate and key go together")
        if cert is None and settings.metrics_tls:
            cert, key = settings.tls_cert, settings.tls_key
        if cert is not None and not settings.metrics_tls:
            raise InvalidInputError.at("metrics_tls_cert", "is of no use with --no-metrics-tls")
        if cert is None and settings.metrics_client_ca is not None:
            message = "needs TLS: give --metrics-tls-cert and --metrics-tls-key"
            raise InvalidInputError.at("metrics_client_ca", message)
        return cls(cert, key, settings.metrics_client_ca, settings.metrics_token_file)

    @property
    def has_tls(self) -> bool:
        return self.cert is not None

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for the endpoint's listener; None for plaintext. Raises
        InvalidInputError, which names an unusable file."""
        if self.cert is None:
            return None
        files = [path for path in (self.cert, self.key, self.client_ca) if path is not None]
        watched = WatchedFiles(
            files, self._read_context, unusable="new files of the metrics cannot be used yet"
        )

        def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            """Make a handshake use the newest files; called before its certificate is shown."""
            connection.context = watched.newest()

        watched.content.sni_callback = renew
        return watched.content

    def admits(self, head: bytes) -> bool:
        """Return whether a request's head carries the required token; True if none is required."""
        if self.token_file is None:
            return True
        return any(
            hmac.compare_digest(value.strip()[len(_SCHEME) :].strip(), self.token())
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
            if name.strip().lower() == b"authorization"
            and value.strip().lower().startswith(_SCHEME)
        )

    def token(self) -> bytes:
        """Read the token that scrapers must send. Raises InvalidInputError for a bad file."""
        assert self.token_file is not None
        try:
            token = self.token_file.read_bytes().strip()
        except OSError as error:
            raise _unusable("metrics_token_file", self.token_file, error) from None
        if len(token) < MIN_TOKEN_CHARS:
            reason = f"has {len(token)} characters, and must have at least {MIN_TOKEN_CHARS}"
            raise _unusable("metrics_token_file", self.token_file, reason)
        return token

    def _read_context(self) -> ssl.SSLContext:
        assert self.cert is not None
        assert self.key is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # of which ssl.SSLError is one
            both = f"{self.cert} and {self.key}"
            raise _unusable("metrics_tls_cert", both, error) from None
        check_private("metrics_tls_key", self.key)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise _unusable("metrics_client_ca", self.client_ca, error) from None
        return context


PLAIN: Final = Guard()


def _no_password() -> str:
    raise ValueError("the key has a password, which no one can type here")


def _unusable(field: str, file: object, reason: object) -> InvalidInputError:
    if isinstance(reason, OSError):
        reason = reason.strerror or reason
    return InvalidInputError.at(field, f"{file}: {reason}")


# ---- Endpoint ----

MAX_REQUEST_BYTES: Final = 8 << 10
MAX_CONNECTIONS: Final = 16
REQUEST_TIMEOUT_S: Final = 10.0
CHALLENGE: Final = "WWW-Authenticate: Bearer\r\n"

Sample = Callable[[], Callable[[], Readings]]
"""A function that copies the current values on the event loop; it returns a function that turns
them into readings in any thread."""

log = structlog.get_logger()


@asynccontextmanager
async def metrics_served(
    sample: Sample,
    lag: LoopLag,
    host: str,
    port: int | None,
    *,
    guard: Guard = PLAIN,
    deployment: str = DEFAULT_TRUST_DOMAIN,
    allow_insecure_network: bool,
) -> AsyncIterator[str]:
    """Context manager that serves metrics; yields host:port, or "" if port is None, which disables
    metrics. Port 0 is any free port. Plaintext is for loopback, unless the operator allows more.

    deployment: the label of all metrics of this process; the coordinators and workers of one
    cluster share it, and no other cluster has it.
    """
    if port is None:
        yield ""
        return
    if not (guard.has_tls or allow_insecure_network or is_loopback(host)):
        raise InvalidInputError.at(
            "metrics_port",
            f"metrics are not encrypted, and {host!r} can be reached from other machines; give a "
            f"certificate (--metrics-tls-cert, --metrics-tls-key), listen on 127.0.0.1, or allow "
            f"the insecure network explicitly",
        )
    context = guard.ssl_context()
    if guard.token_file is not None:
        guard.token()  # report its faults at the start
    try:
        server = await asyncio.start_server(
            _Handler(sample, guard, deployment).serve,
            host.strip("[]"),
            port,
            limit=MAX_REQUEST_BYTES,
            ssl=context,
            ssl_handshake_timeout=None if context is None else REQUEST_TIMEOUT_S,
        )
    except OSError as error:
        raise UnavailableError(f"cannot serve metrics on {host}:{port}: {error}") from error
    address = f"{host}:{server.sockets[0].getsockname()[1]}"
    scheme = "https" if guard.has_tls else "http"
    log.info("metrics", address=f"{scheme}://{address}/metrics")
    measuring = asyncio.create_task(lag.run())
    try:
        yield address
    finally:
        measuring.cancel()
        server.close()
        await asyncio.gather(measuring, return_exceptions=True)


class _Handler:
    def __init__(self, sample: Sample, guard: Guard, deployment: str) -> None:
        self._sample, self._guard, self._deployment = sample, guard, deployment
        self._num_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the single request of this HTTP connection, and close the connection."""
        self._num_open += 1
        try:
            if self._num_open <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer(head))
                    await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            pass  # not a request, or the peer no longer waits for the answer
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET\n")
        if rest.partition(b" ")[0].partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", b"only /metrics\n")
        try:
            is_let_in = self._guard.admits(head)
        except InvalidInputError as error:
            log.warning("nobody can scrape", reason=str(error))
            is_let_in = False
        if not is_let_in:
            return _response("401 Unauthorized", b"needs a token\n", more=CHALLENGE)
        from stratagem.common.observe.exposition import CONTENT_TYPE, render

        try:
            text = await asyncio.to_thread(render, self._sample(), self._deployment)
        except Exception:  # the boundary: a defect must not end in silence
            log.exception("metrics cannot be read")
            return _response("500 Internal Server Error", b"see the log\n")
        return _response("200 OK", text, CONTENT_TYPE, with_body=method == b"GET")


def _response(
    status: str,
    body: bytes,
    content_type: str = "text/plain",
    *,
    with_body: bool = True,
    more: str = "",
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")


# ---- Calls ----
#
# These metrics count the calls that a server answers: their duration, the open ones, and the
# causes of refusals.
#
# They are plain numbers on the event loop, two additions per call. Methods are those of the server,
# errors those of common/base/errors.py: a caller can invent neither.

BOUNDS_S: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)
DEFECT: Final = ("INTERNAL", "internal")
"""The gRPC code and error name under which calls that failed through a bug are counted."""
_PACKAGE: Final = "/stratagem.v1."


class CallStats:
    """The counts and durations of the calls to one server. `refused` is keyed by (method, gRPC
    code, error)."""

    def __init__(self, methods: Iterable[str] = ()) -> None:
        """Set all counts to 0. methods: those of the server, which are exported before their first
        call, because a scraper does not see an increase in a count that first appears as 1."""
        self.seconds = {method: Durations(BOUNDS_S) for method in methods}
        self.num_open = Counter[str](dict.fromkeys(self.seconds, 0))
        self.refused = Counter[tuple[str, str, str]]({(m, *DEFECT): 0 for m in self.seconds})

    def begin(self, method: str) -> float:
        """Count the start of a call; return the start time to pass to `end`."""
        self.num_open[method] += 1
        return time.perf_counter()

    def end(self, method: str, began_s: float) -> None:
        """Count the end of a call, successful or not, and its duration."""
        self.num_open[method] -= 1
        seconds = self.seconds.get(method)
        if seconds is None:
            seconds = self.seconds[method] = Durations(BOUNDS_S)
        seconds.add(time.perf_counter() - began_s)

    def refuse(self, method: str, code: str, error: str) -> None:
        """Count a call that was refused or has failed, under its gRPC code and error name."""
        self.refused[method, code, error] += 1


def methods_of(*services: ServiceDescriptor) -> list[str]:
    """Return the names under which calls of these services' methods are counted."""
    return [f"{service.name}/{method.name}" for service in services for method in service.methods]


def name_of(path: str) -> str:
    """Convert the path of a gRPC method, "/package.Service/Method", to "Service/Method"."""
    return path.removeprefix(_PACKAGE).lstrip("/")


# ---- Certificate expiry ----
#
# The expiry of the certificates of a process is exposed, for alerts that come before it.
#
# The values are points in time, with the beginning of the validity: an alert's distance from the
# end depends on the length of the validity. Files are read during a scrape, in its thread; an
# unreadable file gives no values here, and its user reports it.

EXPIRY: Final = Metric(
    "stratagem_certificate_expiry_seconds",
    "gauge",
    "when a certificate ends, in seconds since 1970: the process's own under its role, `authority` "
    "the first to end of those above it, `metrics` what --metrics-tls-cert names",
    ("role",),
)
START: Final = Metric(
    "stratagem_certificate_start_seconds",
    "gauge",
    "since when the same certificate is valid, in seconds since 1970",
    ("role",),
)
METRICS: Final = "metrics"


def expiries(settings: MetricsSettings) -> Iterator[tuple[Metric, Values]]:
    """Yield two metrics, the begin and the end of the validity of this process's certificates,
    labelled by role; without values if there are none."""
    links = _links(settings)
    yield EXPIRY, {(role,): link.ends.timestamp() for role, link in links.items()}
    yield START, {(role,): link.starts.timestamp() for role, link in links.items()}


def _links(settings: MetricsSettings) -> dict[str, ChainCertificate]:
    links = {}
    material = _material(settings)
    if material is not None and material.cert_id is not None:
        links[str(material.cert_id.role)] = material.chain[0]
        authority = first_to_end(material.chain[1:])
        if authority is not None:
            links[AUTHORITY] = authority
    if settings.metrics_tls_cert is not None:
        with suppress(InvalidInputError):
            links[METRICS] = links_of("metrics_tls_cert", settings.metrics_tls_cert)[0]
    return links


def _material(settings: MetricsSettings) -> Material | None:
    if settings.tls_ca is None or settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        return TlsFiles(settings.tls_ca, settings.tls_cert, settings.tls_key).read()
    except InvalidInputError:
        return None


# ---- Process metrics ----
#
# Coordinator and worker have these metrics in common, under the same names. Prometheus's own
# library adds the standard `process_*` metrics (CPU time, memory, open files).

BUILD_INFO: Final = Metric(
    "stratagem_build_info",
    "gauge",
    "1; the labels say which version runs, and which protocol it speaks",
    ("version", "protocol"),
)
RPC_SECONDS: Final = Metric(
    "stratagem_rpc_seconds", "histogram", "how long calls took, streams to their end", ("method",)
)
RPC_OPEN: Final = Metric("stratagem_rpc_open", "gauge", "calls under way", ("method",))
RPC_REFUSED: Final = Metric(
    "stratagem_rpc_refused_total",
    "counter",
    "calls refused or failed, by gRPC code and error; error `internal` is a defect of ours",
    ("method", "code", "error"),
)
LOOP_LAG: Final = Metric(
    "stratagem_event_loop_lag_seconds",
    "histogram",
    "how late the event loop was, looked at four times a second",
)
STREAM_BYTES: Final = Metric(
    "stratagem_stream_bytes_total",
    "counter",
    "tensor bytes over gRPC, or read on one machine: state, update, gradients, data, mesh",
    ("direction", "kind"),
)
SHARED: Final = (
    BUILD_INFO,
    RPC_SECONDS,
    RPC_OPEN,
    RPC_REFUSED,
    LOOP_LAG,
    STREAM_BYTES,
    EXPIRY,
    START,
)


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """The source of the metrics that coordinator and worker have in common."""

    settings: MetricsSettings
    calls: CallStats = field(default_factory=CallStats)
    lag: LoopLag = field(default_factory=LoopLag)

    def readings(self) -> Iterator[tuple[Metric, Values]]:
        """Yield the current values of the metrics in `SHARED`."""
        yield BUILD_INFO, {(version("stratagem"), PROTOCOL_VERSION): 1.0}
        yield (
            RPC_SECONDS,
            {(method,): histogram for method, histogram in list(self.calls.seconds.items())},
        )
        yield RPC_OPEN, {(method,): n for method, n in list(self.calls.num_open.items())}
        yield RPC_REFUSED, {key: n for key, n in list(self.calls.refused.items())}
        yield LOOP_LAG, one(self.lag.seconds)
        yield STREAM_BYTES, {key: n for key, n in stream.stream_bytes().items()}
        yield from expiries(self.settings)
