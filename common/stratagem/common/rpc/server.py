"""Make servers of our services that apply the same rules to every call.

The caller may make the call (identity/callers.py), the protocol version is right, and requests
arrive in time and within the limits (admission.py). A request that does not parse is the caller's
fault (INVALID_ARGUMENT). Errors of common/base/errors.py become their status with the reason; any
other exception becomes INTERNAL with an id that is also in the log, never a traceback. Handlers
that stream answers must be async generators, and read requests from their iterator.
"""

import asyncio
import errno
import os
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc

from stratagem.common.base.errors import (
    InvalidInputError,
    StratagemError,
    UnavailableError,
    WrongStateError,
    sole,
    without_frames,
)
from stratagem.common.base.ids import PROTOCOL_KEY, PROTOCOL_VERSION
from stratagem.common.base.text import is_loopback
from stratagem.common.identity.callers import (
    TABLE,
    UNCHECKED,
    Authorizer,
    Caller,
    Names,
    current_caller,
    is_open,
)
from stratagem.common.identity.tls import TlsFiles, server_credentials
from stratagem.common.observe import tracing
from stratagem.common.observe.metrics_server import DEFECT, CallStats, name_of
from stratagem.common.observe.tracing import bind_ids
from stratagem.common.rpc.admission import (
    DEFAULT_LIMITS,
    MALFORMED,
    Admission,
    CallLimits,
    ParsedStream,
    only_request,
)
from stratagem.common.rpc.channel import SERVER_OPTIONS
from stratagem.common.rpc.health_service import HealthService
from stratagem.common.rpc.status_codes import to_status
from stratagem.common.rpc.streams import StallTimeout, takes_nothing
from stratagem.common.tensors.stream import reading_frames

# ---- Server ----

log = structlog.get_logger()

# As text: the classes of gRPC are generic only in its stubs.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

OnRefusal: TypeAlias = Callable[[Any, StratagemError], None]
"""A callback for refused calls of authorized callers, which gets the request and the error."""

_OUTAGES: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}
)
"""OS error codes of conditions that may pass: no space, files or memory, or an I/O error."""
PROBE_TIMEOUT_S: Final = 5.0
PROBES: Final = ("Check", "List")

# Standard services that know nothing of our protocol version.
_FOREIGN: Final = ("/grpc.health.", "/grpc.reflection.")


def make_server(
    limits: CallLimits = DEFAULT_LIMITS,
    *,
    gate: Authorizer | None = None,
    calls: CallStats | None = None,
    on_refusal: Mapping[str, OnRefusal] = MappingProxyType({}),
) -> grpc.aio.Server:
    """Return a gRPC server with our options and rules; add services to it, `bind` it, start it.

    gate: the authorizer; without it, as in servers without TLS, all callers are admitted. calls:
    counts the calls. on_refusal: functions keyed by the name of a call with one request, such as
    "RegisterWorker".
    """
    rules = _Rules(gate or Authorizer(), calls or CallStats(), Admission(limits), on_refusal)
    return grpc.aio.server(interceptors=[rules], options=SERVER_OPTIONS)


def make_health_server() -> grpc.aio.Server:
    """Return a server for health probes alone, which limits only the number of Watch calls."""
    limits = CallLimits(PROBE_TIMEOUT_S, DEFAULT_LIMITS.max_calls, unlimited=PROBES)
    return make_server(limits)


def add_health(server: grpc.aio.Server) -> HealthService:
    """Add a grpc.health.v1 service, SERVING at first; the caller sets the status later."""
    servicer = HealthService()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def bind(
    server: grpc.aio.Server, host: str, port: int, *, allow_insecure_network: bool = False
) -> int:
    """Listen in plaintext, port 0 meaning any free one; return the port. Nothing here is encrypted
    or authenticated, so other hosts are admitted only on request."""
    if not allow_insecure_network and not is_loopback(host):
        raise InvalidInputError.at(
            "host",
            f"{host!r} can be reached from other machines, and connections are neither encrypted "
            f"nor authenticated; give certificates (--tls-ca, --tls-cert, --tls-key), use "
            f"127.0.0.1, or allow the insecure network explicitly",
        )
    return _listen(host, port, server.add_insecure_port)


def bind_tls(
    server: grpc.aio.Server,
    host: str,
    port: int,
    files: TlsFiles,
    *,
    asks_for_certificate: bool = True,
) -> int:
    """Listen with TLS, port 0 meaning any free one; return the port. asks_for_certificate: refuse
    callers without a certificate of our CA; otherwise callers need a token."""
    credentials = server_credentials(files, asks_for_certificate=asks_for_certificate)
    return _listen(host, port, lambda address: server.add_secure_port(address, credentials))


def bind_socket(server: grpc.aio.Server, path: str, files: TlsFiles | None) -> None:
    """Listen on a unix socket, in a folder that only this process's user may enter: with TLS as
    `bind_tls` does, or in plaintext."""
    target = f"unix:{path}"
    if files is None:
        server.add_insecure_port(target)
    else:
        server.add_secure_port(target, server_credentials(files, asks_for_certificate=True))


def _listen(host: str, port: int, add: Callable[[str], int]) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return add(address)
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen on {address}: is the port taken?") from error


class _Rules(grpc.aio.ServerInterceptor):
    def __init__(
        self,
        gate: Authorizer,
        calls: CallStats,
        admission: Admission,
        on_refusal: Mapping[str, OnRefusal],
    ) -> None:
        self._gate, self._calls, self._admission = gate, calls, admission
        self._on_refusal = on_refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = _Call(
            details=handler_call_details,
            takes_stream=handler.request_streaming,
            gate=self._gate,
            calls=self._calls,
            admission=self._admission,
            on_refusal=self._on_refusal.get(handler_call_details.method.rpartition("/")[2]),
        )
        return _guarded(handler, call)


def _guarded(handler: Handler, call: "_Call") -> Handler:
    """Wrap a handler with our rules for calls; the result reads even one request as a stream."""
    behaviour = getattr(handler, _KINDS[(handler.request_streaming, handler.response_streaming)])
    make: Callable[..., Handler] = grpc.stream_unary_rpc_method_handler
    if handler.response_streaming:
        make, behaviour = grpc.stream_stream_rpc_method_handler, _streaming(behaviour, call)
    return make(
        _ruled(behaviour, call),
        request_deserializer=_tolerant(handler.request_deserializer),
        response_serializer=_unless_bytes(handler.response_serializer),
    )


_KINDS: Final[dict[tuple[bool, bool], str]] = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


@dataclass(frozen=True, slots=True)
class _Call:
    """One incoming call, with the rules for it before and while it is handled."""

    details: grpc.HandlerCallDetails
    takes_stream: bool
    gate: Authorizer
    calls: CallStats
    admission: Admission
    on_refusal: OnRefusal | None

    @property
    def method(self) -> str:
        """Return the full path of the call's method, "/package.Service/Method"."""
        method: str = self.details.method
        return method

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Context manager that counts this call as open. Raises LimitError if too many are."""
        name = name_of(self.method)
        began_s = self.calls.begin(name)
        try:
            with self.admission.entered(self.method):
                yield
        finally:
            self.calls.end(name, began_s)

    def admit(self, context: Context) -> None:
        """Check that the caller may make this call at all. Raises the error to refuse it with."""
        if not is_open(self.method):
            metadata = self.details.invocation_metadata or ()
            self.gate.admit(self.method, context.auth_context(), metadata)

    async def request(self, requests: AsyncIterator[Any]) -> Any:
        """Receive the request, or the stream of requests, to pass to the handler."""
        if not self.method.startswith(_FOREIGN):
            _check_version(self.details)
        if self.takes_stream:
            return ParsedStream(requests)
        request = await only_request(aiter(requests), self.admission.limits.idle_timeout_s)
        bind_ids(request)
        return request

    async def tell(self, error: StratagemError, request: Any, requests: AsyncIterator[Any]) -> None:
        """Report to `on_refusal` that an authorized caller's call was refused. request: None if it
        was not read yet, because the caller has another protocol version."""
        if self.on_refusal is None:
            return
        with suppress(StratagemError, TimeoutError):
            if request is None:
                request = await only_request(aiter(requests), self.admission.limits.idle_timeout_s)
            self.on_refusal(request, error)

    @property
    def stall_s(self) -> float | None:
        """Return the seconds within which the caller must take each answer; None for no limit."""
        limits = self.admission.limits
        is_hurried = self.method.rpartition("/")[2] not in limits.unhurried
        return limits.idle_timeout_s if is_hurried else None

    def served(self) -> tracing.Served:
        return tracing.Served(name_of(self.method), self.details.invocation_metadata or ())


def _check_version(call: grpc.HandlerCallDetails) -> None:
    versions = [value for key, value in call.invocation_metadata or () if key == PROTOCOL_KEY]
    if versions == [PROTOCOL_VERSION]:
        return
    said = f"says {', '.join(map(repr, versions[:4]))}" if versions else "says none"
    raise WrongStateError(
        f"protocol version: this side speaks {PROTOCOL_VERSION!r}, the caller {said} "
        f"(metadata key {PROTOCOL_KEY!r})"
    )


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    read = reading_frames(deserialize) if deserialize else bytes

    def decode(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return MALFORMED  # gRPC would turn an exception into UNKNOWN

    return decode


def _unless_bytes(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Return a serializer that returns bytes unchanged, since chunks are serialized already."""
    return lambda message: (
        message if isinstance(message, bytes) or serialize is None else serialize(message)
    )


def _ruled(
    behaviour: Callable[[Any, Context], Awaitable[Any]], rules: _Call
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            with rules.counted():
                rules.admit(context)
                request = None
                try:
                    request = await rules.request(requests)
                    with rules.served():
                        return await behaviour(request, context)
                except StratagemError as error:
                    await rules.tell(error, request, requests)
                    raise
        except asyncio.CancelledError:
            _check_not_cancelled()
            await _abort(context, rules.method, _ending(), rules.calls)
        except grpc.aio.BaseError:  # the handler has aborted
            raise
        except Exception as error:  # the RPC boundary
            await _abort(context, rules.method, error, rules.calls)

    async def call(requests: Any, context: Context) -> Any:
        try:
            return await answer(requests, context)
        except (grpc.aio.AbortError, asyncio.CancelledError) as end:
            # gRPC keeps the error with the call or its task, to which the error's frames refer.
            # Nobody reads these frames; gRPC logs other errors with theirs.
            end.__context__ = None
            raise without_frames(end) from None
        finally:
            with suppress(RuntimeError):  # a task of the handler is reading
                # Until this iterator ends, it and gRPC's reader refer to each other.
                await aiter(requests).aclose()
            del requests, context  # an error raised below has this frame

    return call


def _streaming(
    behaviour: Callable[[Any, Context], Any], rules: _Call
) -> Callable[[Any, Context], Awaitable[None]]:
    async def stream(request: Any, context: Context) -> None:
        responses = behaviour(request, context)
        if not hasattr(responses, "aclose"):  # a coroutine that writes by itself
            await responses
            return
        async with aclosing(responses), StallTimeout(rules.stall_s, takes_nothing) as caller:
            async for response in responses:
                with caller.waiting():  # until gRPC has room for more
                    await context.write(response)

    return stream


def _check_not_cancelled() -> None:
    """Raise CancelledError again if this call was cancelled, not only what it awaits."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise asyncio.CancelledError


def _ending() -> UnavailableError:
    """Return the error to end calls with when the server ends, since gRPC itself sends none."""
    return UnavailableError("this process ends, and what the call waited for with it")


def _outage(error: Exception) -> UnavailableError | None:
    """Convert an error for lack of space, files or memory to UnavailableError, without a path; None
    for other errors."""
    if isinstance(error, MemoryError):
        return UnavailableError("this process has no memory for it now")
    if isinstance(error, OSError) and error.errno in _OUTAGES:
        return UnavailableError(f"this process cannot store it now: {os.strerror(error.errno)}")
    return None


async def _abort(context: Context, method: str, raised: Exception, calls: CallStats) -> NoReturn:
    cause = sole(raised)
    error = cause if isinstance(cause, Exception) else raised
    status = to_status(_outage(error) or error)
    if status is not None:
        calls.refuse(name_of(method), status.code.name, type(error).__name__)
        log.info("call refused", method=method, code=status.code.name, reason=status.details)
        await context.abort_with_status(status)
    calls.refuse(name_of(method), *DEFECT)
    error_id = secrets.token_hex(6)
    log.error("call failed", method=method, error_id=error_id, exc_info=raised)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error {error_id}")


# ---- Ownership checks ----
#
# A servicer checks that the resources named in a request belong to its caller, before the handler
# sees the request.
#
# The rules of the table in identity/callers.py are put before all handlers of a servicer, or the
# class is not made. The servicer knows what belongs to whom.

Check = Callable[[Any, Any, Caller], Awaitable[None] | None]
"""A check, given the servicer, the (first) request and the caller, which raises if the caller may
not name the resource in the request."""

S = TypeVar("S")


def checks_what_is_named(
    service: ServiceDescriptor, checks: Mapping[Names, Check]
) -> Callable[[type[S]], type[S]]:
    """Return a class decorator that makes the methods of a servicer check that the caller may name
    the resource in the request. Raises KeyError, which names a call or check that is missing."""

    def decorate(servicer: type[S]) -> type[S]:
        for method in service.methods:
            names = TABLE[f"/{service.full_name}/{method.name}"].names
            if names not in UNCHECKED:
                handler = getattr(servicer, method.name)
                setattr(servicer, method.name, _checked(handler, method, checks[names]))
        return servicer

    return decorate


def _checked(handler: Any, method: MethodDescriptor, check: Check) -> Any:
    async def look(servicer: Any, request: Any) -> None:
        waiting = check(servicer, request, current_caller())
        if waiting is not None:
            await waiting

    if method.client_streaming:

        @wraps(handler)
        def call_stream(servicer: Any, requests: AsyncIterator[Any], context: Any) -> Any:
            first = _FirstChecked(requests, lambda request: look(servicer, request))
            return handler(servicer, first, context)

        return call_stream
    if method.server_streaming:

        @wraps(handler)
        def call_streaming(servicer: Any, request: Any, context: Any) -> Any:
            answers = handler(servicer, request, context)
            return _AnswersOnceChecked(answers, look(servicer, request))

        return call_streaming

    @wraps(handler)
    async def call(servicer: Any, request: Any, context: Any) -> Any:
        await look(servicer, request)
        return await handler(servicer, request, context)

    return call


class _FirstChecked:
    """A request stream that checks its first request before the handler gets it."""

    __slots__ = ("_look", "_requests")

    def __init__(
        self, requests: AsyncIterator[Any], look: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._requests = aiter(requests)
        self._look: Callable[[Any], Awaitable[None]] | None = look

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    def __anext__(self) -> Awaitable[Any]:
        return anext(self._requests) if self._look is None else self._first(self._look)

    async def _first(self, look: Callable[[Any], Awaitable[None]]) -> Any:
        request = await anext(self._requests)
        self._look = None
        await look(request)
        return request


class _AnswersOnceChecked:
    """A response stream that checks the request before it gives the first response."""

    __slots__ = ("_answers", "_look")

    def __init__(self, answers: AsyncGenerator[Any, None], look: Coroutine[Any, Any, None]) -> None:
        self._answers = answers
        self._look: Coroutine[Any, Any, None] | None = look

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    def __anext__(self) -> Awaitable[Any]:
        return anext(self._answers) if self._look is None else self._first()

    async def _first(self) -> Any:
        look, self._look = self._look, None
        if look is not None:
            await look
        return await anext(self._answers)

    async def aclose(self) -> None:
        """Close the handler's response stream."""
        if self._look is not None:
            self._look.close()
        await self._answers.aclose()
