"""HOST:PORT: its parts, and who can reach a host."""

import ipaddress
import socket


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair. Raises ValueError."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 2**16
    if not host or "://" in host or not is_port:
        raise ValueError(f"{address[:80]!r} is not HOST:PORT")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host; the host may be in brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def dialled_host(host: str) -> str:
    """The host that others dial to reach who listens on this one: 0.0.0.0 and [::] can be listened
    on, but nobody can be reached there, so this machine's name stands for them."""
    try:
        is_every_address = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host
    return socket.gethostname() if is_every_address else host
