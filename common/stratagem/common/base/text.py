"""Format numbers and values for sentences, make foreign text printable, split addresses, and name
the spread of a metric."""

import ipaddress
import json
import re
import socket
from collections.abc import Mapping
from typing import Any, Final

# ---- Wording ----
#
# The coordinator and the command line use the same wording.

MAX_VALUES_CHARS: Final = 300
MAX_DIGITS: Final = 17
"""The number of significant digits that represent every float exactly."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, as in "1 client", "3 clients", "1,000 clients"; for nouns that
    take an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def beyond_text(value: float, limit: float) -> str:
    """Format a number above a limit with enough digits to show it: "4.001" for a limit of 4."""
    texts = (f"{value:.{digits}g}" for digits in range(3, MAX_DIGITS + 1))
    return next((text for text in texts if float(text) > limit), f"{value:.3g}")


def values_text(values: Mapping[str, Any]) -> str:
    """Format hyperparameters as "optimizer.lr 0.0213, optimizer.name sgd", in bounded length."""
    text = ", ".join(f"{name} {_value_text(value)}" for name, value in values.items())
    return text if len(text) <= MAX_VALUES_CHARS else f"{text[: MAX_VALUES_CHARS - 1]}…"


def _value_text(value: Any) -> str:
    match value:
        case str():
            return value
        case float():
            return f"{value:.6g}"
        case _:
            return json.dumps(value)


def plainly(error: Exception) -> str:
    """Return the message of a library's error without its "See URL for more details" sentence."""
    return re.sub(r" *See https?://\S+ for more details\.", "", str(error))


# ---- Printable text ----
#
# Nothing in a printable text moves a cursor, hides or reverses the text next to it.
#
# The same function serves the coordinator's entrance for text of workers and clients, errors that
# another process has sent, and the command line before a terminal. The module imports nothing
# heavy, as the command line has to start fast.

_NEWLINES: Final = "\n\t"
_MOVING: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_MOVING_OR_NEWLINE: Final = re.compile(rf"{_MOVING.pattern}|[{_NEWLINES}]")


def printable(text: str, *, is_line: bool = False) -> str:
    r"""Return the text with control characters escaped (`\x1b` for an escape character) and colours
    removed; newlines and tabs stay, unless it is to be one line."""
    pattern = _MOVING_OR_NEWLINE if is_line else _MOVING
    if pattern.search(text) is None:
        return text
    return pattern.sub(
        lambda match_: f"\\x{ord(match_[0]):02x}", _COLOUR.sub("", text).replace("\r\n", "\n")
    )


def is_printable(text: str) -> bool:
    """Return whether the text is one line without control characters."""
    return _MOVING_OR_NEWLINE.search(text) is None


# ---- Addresses ----
#
# An address is HOST:PORT.


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT into host and port. Raises ValueError."""
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
    """Return the host that others dial to reach a listener on this one: this machine's name in
    place of 0.0.0.0 and [::], which can be listened on but not dialled."""
    try:
        is_every_address = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host
    return socket.gethostname() if is_every_address else host


# ---- Spread over clients ----
#
# The spread of a metric over the clients of a federation stands beside the metric under names
# such as `test.accuracy.client_p10` beside `test.accuracy`.

CLIENT_MEAN: Final = "client_mean"
"""The suffix of a metric's mean over clients, for metrics that are no sums over rows."""
CLIENT_MIN: Final = "client_min"
CLIENT_MAX: Final = "client_max"
SHARES: Final[Mapping[str, float]] = {
    CLIENT_MIN: 0.0,
    "client_p10": 0.1,
    "client_median": 0.5,
    "client_p90": 0.9,
    CLIENT_MAX: 1.0,
}
"""The quantiles over clients that are reported, as numbers in [0, 1] keyed by suffix."""


def of_metric(name: str) -> str:
    """Return "loss" for a quantile over clients, such as "loss.client_p90"; other names as is."""
    metric, _, last = name.rpartition(".")
    return metric if last in SHARES else name


def without_spreads(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without the quantiles over clients."""
    return {name: value for name, value in metrics.items() if of_metric(name) == name}


def range_of(metrics: Mapping[str, float], name: str) -> tuple[float, float] | None:
    """Return the smallest and the largest value that a metric has on one client; None if unknown.

    Only the mean over clients has a range; a value over all rows may lie outside of it.
    """
    if f"{name}.{CLIENT_MEAN}" in metrics:
        return None
    metric = name.removesuffix(f".{CLIENT_MEAN}")
    low, high = (metrics.get(f"{metric}.{end}") for end in (CLIENT_MIN, CLIENT_MAX))
    return None if low is None or high is None else (low, high)
