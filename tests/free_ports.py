"""Ports for processes that must be told one before they listen, and that keep it when they come
again."""

import secrets
import socket
from pathlib import Path

_FIRST = 10_240
_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Where nobody listens now, outside of the range from which the system takes the ports of
    connections and of whoever asks for any: one of those may be another's in the next moment."""
    end = int(_OF_CONNECTIONS.read_text().split()[0])
    while True:
        port = _FIRST + secrets.randbelow(end - _FIRST) if end > _FIRST else 0
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
