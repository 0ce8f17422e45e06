"""Settings of gRPC that clients and servers must agree on.

Owns the numbers. Limits on messages are finite on purpose: a peer must not be able to make this
process buffer what it likes. The other knobs of gRPC were measured to change nothing.
"""

from typing import Final

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
    # A restarted coordinator or worker should be found again within its first second or two.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # It may have come back under another IP address; gRPC asks the name again only every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
)

# For who reads streams more slowly than they come, such as onto a disk. gRPC else measures what
# the network could carry and buffers as much: tens of megabytes a stream on a loopback.
SHALLOW_OPTIONS: Final[Options] = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 2**20),
)
# The same on this machine, where the next bytes are there as soon as they are asked for.
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
