"""Open channels to our services, and follow the leader of several coordinators.

Each call carries the protocol version, the caller's token and its trace; chunks are read without
copies, and a new certificate is used from the next call on. A wrapper around gRPC's channel does
this, not gRPC's interceptors: those put a queue and two tasks between a caller and every message
of a stream. Deadlines and retries are the caller's.
"""

import asyncio
import math
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Final, Self
from weakref import WeakSet

import grpc
import grpc.aio
from google.protobuf.message import Message

from stratagem.common.base.errors import (
    ConflictError,
    InvalidInputError,
    StandbyError,
    UnavailableError,
)
from stratagem.common.base.ids import PROTOCOL_KEY, PROTOCOL_VERSION
from stratagem.common.base.text import is_loopback, split_address
from stratagem.common.identity.callers import TokenFile
from stratagem.common.identity.tls import (
    DEFAULT_TRUST_DOMAIN,
    FreshFiles,
    TlsFiles,
    channel_credentials,
    worker_name,
)
from stratagem.common.observe import tracing
from stratagem.common.rpc.status_codes import name_of
from stratagem.common.tensors.stream import reading_frames

# ---- gRPC options ----
#
# Clients and servers must agree on these settings of gRPC.
#
# Limits on messages are finite on purpose: a peer must not be able to make this process buffer
# arbitrary amounts. Measurements of gRPC's other options showed no effect.

MAX_MESSAGE_BYTES: Final = 4 * 2**20
_KEEPALIVE_MS: Final = 30_000

Options = tuple[tuple[str, int], ...]

_COMMON: Final[Options] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 2**10),
    ("grpc.absolute_max_metadata_size", 32 * 2**10),
    # Keepalive finds half-open connections; liveness of workers is the heartbeats' business.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CLIENT_OPTIONS: Final[Options] = (
    *_COMMON,
    # A restarted coordinator or worker should be reached within its first second or two.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Its IP address may have changed; by default gRPC resolves the name only every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
)

# For readers that are slower than their streams, such as those that write to a disk. gRPC otherwise
# buffers as much as the network could carry: tens of megabytes a stream on a loopback.
SHALLOW_OPTIONS: Final[Options] = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 2**20),
)
# The same within a machine, where the next bytes arrive at once.
NEAR_OPTIONS: Final[Options] = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**20),
)

SERVER_OPTIONS: Final[Options] = (
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Two coordinators must not silently share a port.
    ("grpc.so_reuseport", 0),
)


# ---- Channel ----

_PROTOCOL: Final = ((PROTOCOL_KEY, PROTOCOL_VERSION),)
_LOOK_EVERY_S: Final = 1.0
"""The shortest time between two checks of a channel's TLS files; calls trigger the checks."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The files (certificates, token) by which a process proves itself to servers and verifies
    them; without files the process uses plaintext."""

    tls: TlsFiles | None = None
    token_file: str | PathLike[str] | None = None


PLAINTEXT: Final = Proof()


def open_channel(
    address: str,
    proof: Proof = PLAINTEXT,
    *,
    own_connection: bool = False,
    is_shallow: bool = False,
    to_worker: str | None = None,
    proxy: str = "",
) -> grpc.aio.Channel:
    """Return a channel to `host:port`, or to `unix:PATH`; it connects at the first call.

    own_connection: share no TCP connection with other channels of this process to the address, so
    that small calls (heartbeats) do not queue behind tensors.
    is_shallow: receive at most 4 MiB of a stream ahead of its reader, 1 MiB of one that does not
    leave this machine. It costs 6 % more CPU per GB, and slows distant streams to 4 MiB per round
    trip.
    to_worker: the worker whose certificate the server must have, "" for any worker's, since workers
    are identified by name, not by address. Unless given, the certificate must name the address's
    host.
    proxy: URL of the HTTP proxy to connect through; unless given the one of the environment, if any
    (https_proxy, no_proxy).
    Raises InvalidInputError if a file cannot be used.
    """
    options: list[tuple[str, int | str]] = [
        *CLIENT_OPTIONS,
        *(_shallow_options(address) if is_shallow else ()),
        ("grpc.use_local_subchannel_pool", int(own_connection)),
        *((("grpc.http_proxy", proxy),) if proxy else ()),
    ]
    name = f"worker {to_worker}" if address.startswith("unix:") else address
    token = None
    if proof.token_file is not None:
        if proof.tls is None and not is_loopback(address.rpartition(":")[0]):
            raise InvalidInputError.at(
                "token_file", f"a token would go to {address} in plaintext; tls_ca is needed"
            )
        token = TokenFile(proof.token_file)
        token.metadata()
    if proof.tls is None:
        plain = grpc.aio.insecure_channel(address, options=options)
        return _ProtocolChannel(name, plain, token)
    files = FreshFiles(proof.tls)
    if to_worker is not None:
        cert_id = files.material.cert_id
        trust_domain = DEFAULT_TRUST_DOMAIN if cert_id is None else cert_id.trust_domain
        options.append(("grpc.ssl_target_name_override", worker_name(trust_domain, to_worker)))
    return _ProtocolChannel(name, _RenewedChannel(address, files, options), token)


def _shallow_options(address: str) -> Options:
    """Return an address's read-ahead limits; a unix socket counts as remote: it may be a tunnel."""
    is_near = not address.startswith("unix:") and is_loopback(address.rpartition(":")[0])
    return NEAR_OPTIONS if is_near else SHALLOW_OPTIONS


async def write_message(call: Any, message: Message | bytes) -> None:
    """Write to a connected stream; if the other side has refused, raise its reason.

    `call.write` replaces the status of the other side by INTERNAL if it arrives during a write, as
    it does in a stream of tensors. This function therefore writes one level below, where a message
    may be serialized already. Raises the status as AioRpcError.
    """
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    try:
        await call._cython_call.send_serialized_message(raw)
    except grpc.aio.InternalError:
        await call.code()  # it follows at once
        await call.read()  # raises the status, unless it is OK
        raise ConflictError("the other side ended the stream early") from None


class DelegatingChannel(grpc.aio.Channel):
    """Base of channels that forward each call and state query to another channel, which subclasses
    choose; also a context manager that closes it."""

    @abstractmethod
    def _present(self) -> grpc.aio.Channel:
        """Return the channel to which a call that starts now is forwarded."""

    @abstractmethod
    def _calls(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a callable that starts calls of one method. kind: the channel method to forward to
        with these arguments, such as "unary_unary"."""

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._calls("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._calls("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._calls("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._calls("stream_stream", args, kwargs)

    async def close(self, grace: float | None = None) -> None:
        await self._present().close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._present().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._present().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._present().channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _ProtocolChannel(DelegatingChannel):
    """A channel that adds protocol version, token and trace to each call's metadata, and raises
    UnavailableError once it is closed."""

    def __init__(self, name: str, inner: grpc.aio.Channel, token: TokenFile | None) -> None:
        self._name, self._inner, self._token = name, inner, token

    def _present(self) -> grpc.aio.Channel:
        return self._inner

    def _calls(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        read = kwargs.get("response_deserializer")
        if kind == "unary_stream" and read is not None:
            kwargs = {**kwargs, "response_deserializer": reading_frames(read)}
        inner = getattr(self._inner, kind)(*args, **kwargs)

        def call(*args: Any, metadata: Any = (), **kwargs: Any) -> Any:
            token = () if self._token is None else self._token.metadata()
            sent = (*(metadata or ()), *_PROTOCOL, *token, *tracing.outgoing())
            try:
                return inner(*args, metadata=sent, **kwargs)
            except grpc.aio.UsageError:  # closed: the other side is gone
                raise UnavailableError(f"the channel to {self._name} is closed") from None

        return call


class _RenewedChannel(DelegatingChannel):
    """A channel that starts each call over a connection with the newest certificates.

    Calls in progress when files change end on their old connection, which is closed at the first
    check of the files that finds it without calls.
    """

    def __init__(
        self, address: str, files: FreshFiles, options: list[tuple[str, int | str]]
    ) -> None:
        self._address, self._files, self._options = address, files, options
        self._calls_of: dict[grpc.aio.Channel, WeakSet[Any]] = {}
        """The open calls of each open channel; weak references, so that ended calls are not
        kept."""
        self._closing: set[asyncio.Task[None]] = set()
        self._newest = self._open()
        self._look_again_s = 0.0

    def _open(self) -> grpc.aio.Channel:
        credentials = channel_credentials(self._files.material)
        channel = grpc.aio.secure_channel(self._address, credentials, options=self._options)
        self._calls_of[channel] = WeakSet()
        return channel

    def _present(self) -> grpc.aio.Channel:
        if time.monotonic() >= self._look_again_s:
            self._look_again_s = time.monotonic() + _LOOK_EVERY_S
            if self._files.changed():
                self._newest = self._open()
            self._close_unused()
        return self._newest

    def _calls(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            channel = self._present()
            started = getattr(channel, kind)(*args, **kwargs)(*call_args, **call_kwargs)
            self._calls_of[channel].add(started)
            return started

        return call

    def _close_unused(self) -> None:
        for channel, calls in [*self._calls_of.items()]:
            if channel is not self._newest and all(call.done() for call in calls):
                task = asyncio.get_running_loop().create_task(channel.close())
                del self._calls_of[channel]
                self._closing.add(task)  # the loop itself holds no task
                task.add_done_callback(self._closing.discard)

    async def close(self, grace: float | None = None) -> None:
        self._look_again_s = math.inf  # a late call must not open another channel
        for channel in [*self._calls_of]:
            await channel.close(grace)
        await asyncio.gather(*self._closing)


# ---- Leader ----
#
# A cluster may have several coordinators, of which one leads.
#
# When a call fails because no server answers at an address, or because that coordinator only stands
# by, the channel switches to the next address. Repeating the call is the caller's responsibility:
# all of ours are repeated with pauses, and then use the next address.


def split_addresses(text: str) -> tuple[str, ...]:
    """Split "host1:7070,host2:7070" into addresses. Raises ValueError for none, or an invalid
    one."""
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    if not addresses:
        raise ValueError(f"{text!r} is not HOST:PORT[,HOST:PORT...]")
    for address in addresses:
        split_address(address)
    return addresses


@dataclass(slots=True)
class Coordinators:
    """The addresses of a cluster's coordinators, and the one to call now. Several channels of one
    process may share it, and move on together."""

    addresses: tuple[str, ...]
    present: str = field(init=False)

    def __post_init__(self) -> None:
        self.present = self.addresses[0]

    @property
    def are_several(self) -> bool:
        return len(self.addresses) > 1

    def move_on(self, failed: str) -> None:
        """Switch from the address `failed` to the next, unless another call has done so."""
        if failed == self.present:
            index = self.addresses.index(failed)
            self.present = self.addresses[(index + 1) % len(self.addresses)]


class CoordinatorChannel(DelegatingChannel):
    """A channel that sends each call to the current coordinator, and finds the leader."""

    def __init__(
        self,
        coordinators: Coordinators,
        open_one: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._coordinators = coordinators
        self._open_one = open_one
        self._channels: Final[dict[str, grpc.aio.Channel]] = {}
        self._looks: Final[set[asyncio.Task[None]]] = set()
        self._present()  # raises for faults of the caller's files now

    async def close(self, grace: float | None = None) -> None:
        for channel in self._channels.values():
            await channel.close(grace)

    def _present(self) -> grpc.aio.Channel:
        return self._channel(self._coordinators.present)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._open_one(address)
        return self._channels[address]

    def _calls(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made: dict[str, Callable[..., Any]] = {}

        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            address = self._coordinators.present
            if address not in made:
                made[address] = getattr(self._channel(address), kind)(*args, **kwargs)
            started = made[address](*call_args, **call_kwargs)
            if self._coordinators.are_several:
                started.add_done_callback(lambda ended: self._ended(address, ended))
            return started

        return call

    def _ended(self, address: str, call: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._look(address, call))
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def _look(self, address: str, call: Any) -> None:
        if await call.code() is not grpc.StatusCode.UNAVAILABLE:
            return
        details, trailing = await call.details(), await call.trailing_metadata()
        initial = await call.initial_metadata()
        error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, initial, trailing, details)
        # A leader that refuses for another reason (a full disk) is still the one to call.
        if name_of(error) in ("", StandbyError.__name__):
            self._coordinators.move_on(address)
