"""Reads which events of a run a request asks for, and answers with those of the past."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from stratagem.common.base.errors import InvalidInputError, OutOfRangeError
from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.event_span import EventSpan
from stratagem.coordinator.core.facts import KINDS
from stratagem.coordinator.observe.event_feed import PAGE_EVENTS, Feed, FeedEvent
from stratagem.coordinator.service import protobuf_views
from stratagem.v1 import coordinator_pb2 as pb

MAX_EVENTS: Final = 256
MAX_BYTES: Final = 2**18
"""Of the events in one message, but for the last one of them."""


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


async def past_events(
    feed: Feed, run_id: RunId, span: EventSpan, request: pb.WatchRunRequest
) -> AsyncIterator[pb.WatchRunResponse]:
    """Yield the events up to the limit of the request, several in a message if it takes that: a
    message costs more than the event in it."""
    num_left = request.limit
    at_once = min(num_left or MAX_EVENTS, MAX_EVENTS if request.several else PAGE_EVENTS)
    async for page in feed.past(run_id, span, at_once):
        wanted = page[:num_left] if request.limit else page
        for message in _messages(wanted, MAX_EVENTS if request.several else 1):
            yield message
        num_left -= len(wanted)
        if request.limit and num_left == 0:
            return


def _messages(page: Sequence[FeedEvent], max_events: int) -> Iterator[pb.WatchRunResponse]:
    """Yield the events of a page, so many in a message at most."""
    waiting: list[pb.RunEvent] = []
    num_bytes = 0
    for item in page:
        waiting.append(protobuf_views.event(item))
        num_bytes += waiting[-1].ByteSize()
        if len(waiting) >= max_events or num_bytes > MAX_BYTES:
            yield pb.WatchRunResponse(event=waiting[0], more=waiting[1:])
            waiting, num_bytes = [], 0
    if waiting:
        yield pb.WatchRunResponse(event=waiting[0], more=waiting[1:])
