"""Servers of our services.

Owns what holds for every call of every service: the caller may make it (see `authorization.py`),
the protocol version is right, what does not parse is the caller's fault (INVALID_ARGUMENT), errors
of our tree become their status with the reason, any other exception becomes INTERNAL with an id
that stands in the log, never a traceback. Handlers that stream answers must be async generators,
and read requests from their iterator.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2_grpc

from stratagem.common import tracing
from stratagem.common.errors import InvalidInputError, UnavailableError, WrongStateError
from stratagem.common.metrics.calls import CallStats, name_of
from stratagem.common.rpc.addresses import is_loopback
from stratagem.common.rpc.authorization import Gate, is_open
from stratagem.common.rpc.credentials import server_credentials
from stratagem.common.rpc.ids import bind_ids
from stratagem.common.rpc.options import PROTOCOL_KEY, PROTOCOL_VERSION, SERVER_OPTIONS
from stratagem.common.rpc.status import to_status
from stratagem.common.rpc.tls import TlsFiles
from stratagem.common.tensors.frames import reading_frames

log = structlog.get_logger()

# As text: the classes of gRPC are generic only in its stubs.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_MALFORMED: Final = object()
# Standard services that know nothing of our protocol version.
_FOREIGN: Final = ("/grpc.health.", "/grpc.reflection.")


def make_server(
    *,
    gate: Gate | None = None,
    calls: CallStats | None = None,
    max_concurrent_rpcs: int | None = None,
) -> grpc.aio.Server:
    """A server with our options and rules; add services, `bind`, start.

    gate: who is let in; everybody unless given, which is for servers without TLS. calls: counts.
    """
    return grpc.aio.server(
        interceptors=[_Rules(gate or Gate(), calls or CallStats())],
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=max_concurrent_rpcs,
    )


def add_health(server: grpc.aio.Server) -> health.aio.HealthServicer:
    """Add grpc.health.v1; SERVING at once. The caller sets the status while it drains."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def bind(
    server: grpc.aio.Server, host: str, port: int, *, allow_insecure_network: bool = False
) -> int:
    """Listen in plaintext, port 0 meaning any free one; answers the port.

    Nothing here is encrypted or authenticated, so other hosts are let in only on demand.
    """
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
    """Listen with TLS, port 0 meaning any free one; answers the port.

    asks_for_certificate: refuse who has none of our CA; else callers must have a token.
    """
    credentials = server_credentials(files, asks_for_certificate=asks_for_certificate)
    return _listen(host, port, lambda address: server.add_secure_port(address, credentials))


def _listen(host: str, port: int, add: Callable[[str], int]) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return add(address)
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen on {address}: is the port taken?") from error


class _Rules(grpc.aio.ServerInterceptor):
    def __init__(self, gate: Gate, calls: CallStats) -> None:
        self._gate = gate
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or is_open(handler_call_details.method):
            return handler
        return _guarded(handler, handler_call_details, self._gate, self._calls)


def _guarded(
    handler: Handler, call: grpc.HandlerCallDetails, gate: Gate, calls: CallStats
) -> Handler:
    """The same handler under our rules."""
    is_foreign = call.method.startswith(_FOREIGN)
    refusal = None if is_foreign else _version_refusal(call)
    metadata = call.invocation_metadata or ()

    def check(request: Any, context: Context) -> Any:
        gate.admit(call.method, context.auth_context(), metadata)
        return _checked(request, refusal, handler.request_streaming)

    make, kind = _KINDS[(handler.request_streaming, handler.response_streaming)]
    wrap = _streaming if handler.response_streaming else _answering
    return make(
        wrap(getattr(handler, kind), call, check, calls),
        request_deserializer=_tolerant(handler.request_deserializer),
        response_serializer=_unless_bytes(handler.response_serializer),
    )


_KINDS: Final[dict[tuple[bool, bool], tuple[Callable[..., Handler], str]]] = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}


def _version_refusal(call: grpc.HandlerCallDetails) -> WrongStateError | None:
    versions = [value for key, value in call.invocation_metadata or () if key == PROTOCOL_KEY]
    if versions == [PROTOCOL_VERSION]:
        return None
    said = f"says {', '.join(map(repr, versions))}" if versions else "says none"
    return WrongStateError(
        f"protocol version: this side speaks {PROTOCOL_VERSION!r}, the caller {said} "
        f"(metadata key {PROTOCOL_KEY!r})"
    )


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    read = reading_frames(deserialize) if deserialize else bytes

    def decode(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return _MALFORMED  # gRPC would make UNKNOWN of an exception

    return decode


def _unless_bytes(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Chunks come serialized already."""
    return lambda message: (
        message if isinstance(message, bytes) or serialize is None else serialize(message)
    )


def _parsed(request: Any) -> Any:
    if request is _MALFORMED:
        raise InvalidInputError.at("request", "does not parse as the message of this call")
    return request


def _named(request: Any) -> Any:
    bind_ids(request)
    return request


class _Parsed:
    """A stream of requests that raises at the first one that does not parse."""

    __slots__ = ("_requests",)

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return _parsed(await anext(self._requests))


def _checked(request: Any, refusal: WrongStateError | None, streaming: bool) -> Any:
    if refusal is not None:
        raise refusal
    return _Parsed(request) if streaming else _named(_parsed(request))


def _answering(
    behaviour: Callable[[Any, Context], Awaitable[Any]],
    details: grpc.HandlerCallDetails,
    check: Callable[[Any, Context], Any],
    calls: CallStats,
) -> Callable[[Any, Context], Awaitable[Any]]:
    method, name = details.method, name_of(details.method)

    async def call(request: Any, context: Context) -> Any:
        began_s = calls.begin(name)
        try:
            checked = check(request, context)
            with tracing.Served(name, details.invocation_metadata or ()):
                return await behaviour(checked, context)
        except grpc.aio.BaseError:  # the handler has aborted by itself
            raise
        except Exception as error:  # the RPC boundary
            await _abort(context, method, error, calls)
        finally:
            calls.end(name, began_s)

    return call


def _streaming(
    behaviour: Callable[[Any, Context], Any],
    details: grpc.HandlerCallDetails,
    check: Callable[[Any, Context], Any],
    calls: CallStats,
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    method, name = details.method, name_of(details.method)

    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        began_s = calls.begin(name)
        try:
            checked = check(request, context)
            with tracing.Served(name, details.invocation_metadata or ()):
                responses = behaviour(checked, context)
                async with aclosing(responses):
                    async for response in responses:
                        yield response
        except grpc.aio.BaseError:  # the handler has aborted by itself
            raise
        except Exception as error:  # the RPC boundary
            await _abort(context, method, error, calls)
        finally:
            calls.end(name, began_s)

    return call


async def _abort(context: Context, method: str, error: Exception, calls: CallStats) -> NoReturn:
    status = to_status(error)
    if status is not None:
        calls.refuse(name_of(method), status.code.name, type(error).__name__)
        log.info("call refused", method=method, code=status.code.name, reason=status.details)
        await context.abort_with_status(status)
    calls.refuse(name_of(method), grpc.StatusCode.INTERNAL.name, "internal")
    error_id = secrets.token_hex(6)
    log.error("call failed", method=method, error_id=error_id, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error {error_id}")
