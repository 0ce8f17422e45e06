"""Check the fields of requests against limits, except fields that jobs and tensor streams check.

These sizes are not settings: no deployment needs others, and every caller relies on them.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Final

from stratagem.common.base.errors import ConflictError, InvalidInputError, LimitError
from stratagem.common.base.ids import Incarnation, Party, RunId, check_party
from stratagem.common.base.text import is_printable, printable, split_address
from stratagem.common.identity.callers import NOBODY, Caller
from stratagem.common.rpc.admission import RETRY_AFTER_S
from stratagem.coordinator.core.commands import Ending
from stratagem.v1 import coordinator_pb2, types_pb2

# ---- Requests ----

MAX_NOTE_CHARS: Final = 2000
MAX_REASON_CHARS: Final = 1000
MAX_WORD_CHARS: Final = 256
MAX_LABELS: Final = 256
MAX_ENDPOINT_BYTES: Final = 64 * 2**10

_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")


def check_note(note: str) -> None:
    """Check the note that a client writes into a run's log: its length and characters."""
    if len(note) > MAX_NOTE_CHARS:
        raise LimitError(f"note: {len(note)} characters, the limit is {MAX_NOTE_CHARS}")
    _check_printable("note", note)


def clipped_reason(reason: str) -> str:
    """Return a worker's failure reason, cut to one printable line that suits a log."""
    return printable(reason[:MAX_REASON_CHARS], is_line=True)


def check_address(address: str) -> None:
    """Raise an error unless the address is HOST:PORT; gRPC would also take unix sockets."""
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise InvalidInputError.at("address", str(error)) from None
    if port == 0 or not (_HOST.fullmatch(host) or _is_bracketed_v6(host)):
        raise InvalidInputError.at("address", f"{address[:80]!r} is not HOST:PORT")


def check_capability(capability: types_pb2.Capability) -> None:
    """Check the texts in a worker's capability, which are journaled and displayed."""
    for name in ("device", "device_name", "numerics_fingerprint", "data_plane", "code_policy"):
        _check_word(f"capability.{name}", getattr(capability, name))
    _check_word("capability.numerics_description", capability.numerics_description, 4)
    for name in ("local_data", "tags"):
        values = getattr(capability, name)
        if len(values) > MAX_LABELS:
            raise LimitError(f"capability.{name}: {len(values)} entries, the limit is {MAX_LABELS}")
        for index, value in enumerate(values):
            _check_word(f"capability.{name}[{index}]", value)


def check_endpoint(endpoint: bytes) -> None:
    """Check the size of the endpoint that a member announces at the rendezvous."""
    if len(endpoint) > MAX_ENDPOINT_BYTES:
        raise LimitError(f"endpoint: {len(endpoint)} bytes, the limit is {MAX_ENDPOINT_BYTES}")


class Places:
    """A limit on concurrent calls, in all and per caller."""

    def __init__(self, setting: str, limit: int, limit_each: int | None = None) -> None:
        """Make the limit. setting: the name of the setting of the overall limit, which is the
        prefix of the name of the limit per caller."""
        self._setting, self._limit, self._limit_each = setting, limit, limit_each
        self._open_calls = Counter[str]()

    @contextmanager
    def place(self, caller: Caller = NOBODY) -> Iterator[None]:
        """Context manager that takes a place. Raises LimitError if all places, or the caller's
        share, are taken."""
        of_all = self._open_calls.total()
        if of_all >= self._limit:
            raise LimitError(
                f"{self._setting}: {of_all} are open, the limit is {self._limit}",
                retry_after_s=RETRY_AFTER_S,
            )
        num = self._open_calls[caller.owner]
        if caller.is_known and self._limit_each is not None and num >= self._limit_each:
            raise LimitError(
                f"{self._setting}_each: {caller.name} has {num} open, the limit for one caller is "
                f"{self._limit_each}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._open_calls[caller.owner] += 1
        try:
            yield
        finally:
            self._open_calls[caller.owner] -= 1
            if not self._open_calls[caller.owner]:
                del self._open_calls[caller.owner]


class Keys:
    """A set of keys, each held by at most one call at a time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._held: set[Hashable] = set()

    @contextmanager
    def holding(self, key: Hashable, shown: str) -> Iterator[None]:
        """Context manager that holds a key. Raises ConflictError while another call holds it."""
        if key in self._held:
            raise ConflictError(f"another stream {self._what} {shown}")
        self._held.add(key)
        try:
            yield
        finally:
            self._held.discard(key)


def _check_word(field: str, value: str, times: int = 1) -> None:
    limit = times * MAX_WORD_CHARS
    if len(value) > limit:
        raise LimitError(f"{field}: {len(value)} characters, the limit is {limit}")
    _check_printable(field, value)


def _check_printable(field: str, value: str) -> None:
    if not is_printable(value):
        raise InvalidInputError.at(field, f"{value[:80]!r} has control characters")


def _is_bracketed_v6(host: str) -> bool:
    if not (host.startswith("[") and host.endswith("]")):
        return False
    try:
        return ipaddress.ip_address(host[1:-1].partition("%")[0]).version == 6
    except ValueError:
        return False


# ---- Previous exit ----
#
# A registering worker reports how its previous process ended. The report is journaled and
# displayed, so it is cut to the expected form; no content is a reason to refuse the worker.

MAX_LINES: Final = 10
MAX_LINE_CHARS: Final = 300
MAX_STATUS: Final = 1 << 16


def previous_exit(request: coordinator_pb2.RegisterWorkerRequest) -> Ending | None:
    """Return how the worker's previous process ended; None if the request does not say."""
    report = request.previous_exit
    if not report.incarnation:
        return None
    try:
        party = check_party(report.session.party) if report.session.party else Party("")
    except InvalidInputError:
        return Ending(Incarnation(report.incarnation))
    status = report.status if report.HasField("status") else None
    return Ending(
        incarnation=Incarnation(report.incarnation),
        status=None if status is None or abs(status) > MAX_STATUS else status,
        is_stopped=report.stopped,
        run_id=RunId(report.session.run_id) if report.knows_work else None,
        party=party,
        step=report.step if report.HasField("step") else None,
        lines=tuple(_line(text) for text in report.last_lines[-MAX_LINES:]),
    )


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:MAX_LINE_CHARS])
