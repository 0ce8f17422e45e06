"""Reads which events of a run a request asks for."""

from stratagem.common.base.errors import InvalidInputError, OutOfRangeError
from stratagem.coordinator.core.event_span import EventSpan
from stratagem.coordinator.core.facts import KINDS
from stratagem.v1 import coordinator_pb2 as pb


def span_of(request: pb.WatchRunRequest, num_facts: int) -> EventSpan:
    """Return the span of a run that has so many events. Raises OutOfRangeError for one that begins
    in the future, InvalidInputError for a kind that is none."""
    if request.from_index > num_facts:
        message = f"{request.from_index} is beyond the newest event, {num_facts - 1}"
        raise OutOfRangeError.at("from_index", message)
    for kind in request.kinds:
        if kind not in KINDS:
            text = f"{kind[:80]!r} is no kind of event, such as SegmentFinished or RunFailed"
            raise InvalidInputError.at("kinds", text)
    return EventSpan(
        request.from_index,
        min(request.before_index, num_facts) or None,
        frozenset(request.kinds),
        request.newest_first,
    )


def follows_on(request: pb.WatchRunRequest) -> bool:
    """Return whether the stream goes on with events as they happen. Raises InvalidInputError where
    that cannot be."""
    has_end = request.newest_first or request.before_index > 0
    follows = request.follow if request.HasField("follow") else not has_end
    if follows and has_end:
        text = "goes on with what happens, which newest_first and before_index leave out"
        raise InvalidInputError.at("follow", text)
    return follows
