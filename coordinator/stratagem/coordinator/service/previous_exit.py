"""Decodes how the previous process of a registering worker ended, as the worker reports it.

It is journaled and displayed, so it is cut down to what it should be; nothing in it is a reason to
keep a worker out.
"""

from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Incarnation, Party, RunId, check_party
from stratagem.coordinator.core.commands import Ending
from stratagem.v1 import coordinator_pb2

MAX_LINES: Final = 10
MAX_LINE_CHARS: Final = 300
MAX_STATUS: Final = 1 << 16


def ending_of(request: coordinator_pb2.RegisterWorkerRequest) -> Ending | None:
    """Return how the previous process ended; None where the request does not say."""
    told = request.previous_exit
    if not told.incarnation:
        return None
    try:
        party = check_party(told.session.party) if told.session.party else Party("")
    except InvalidInputError:
        return Ending(Incarnation(told.incarnation))
    status = told.status if told.HasField("status") else None
    return Ending(
        incarnation=Incarnation(told.incarnation),
        status=None if status is None or abs(status) > MAX_STATUS else status,
        is_stopped=told.stopped,
        run_id=RunId(told.session.run_id) if told.knows_work else None,
        party=party,
        step=told.step if told.HasField("step") else None,
        lines=tuple(_line(text) for text in told.last_lines[-MAX_LINES:]),
    )


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:MAX_LINE_CHARS])
