"""Answer queries about runs, workers, step histories and events; nothing is decided here."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from heapq import merge, nsmallest
from itertools import islice
from typing import Final

from stratagem.common.base.errors import InvalidInputError, NotFoundError, OutOfRangeError
from stratagem.common.base.ids import (
    Digest,
    Party,
    RunId,
    check_run_id,
    check_worker_id,
)
from stratagem.common.history import Columns, Series, clipped, joined, shortened
from stratagem.common.history.columns import part_of
from stratagem.common.history.recording import is_of_newest_segment, pack_columns, unpack
from stratagem.common.numerics.verification import Conclusion
from stratagem.common.schema.json import dump_json, thawed
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.commands import EventSpan
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts import KINDS, ROOT, Member, Setting, VerificationEnded
from stratagem.coordinator.core.run_view import CommitView, RunView, view_of
from stratagem.coordinator.core.state import CoordinatorState, RunRecord
from stratagem.coordinator.core.strategy_calls import draws_in_secret, shown_status_of, why_waiting
from stratagem.coordinator.core.world import RunPhase, WorkerRecord, World
from stratagem.coordinator.observe.feed import (
    PAGE_EVENTS,
    PAUSE_S,
    Feed,
    FeedEvent,
    Paces,
    RunBriefs,
    SegmentProgress,
    with_refused,
)
from stratagem.coordinator.observe.history import SentRows, rows_in_flight
from stratagem.coordinator.runtime.rendezvous import Arrival
from stratagem.coordinator.store.step_history import HistoryRow, StepSpan, behind, cut_to
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2

# ---- Runs ----
#
# Active runs are answered from memory, and those at rest from the journal.

MAX_PAGE_BYTES: Final = 2 * 2**20
"""The size limit of a page with several runs; a single run always fits into a message."""

READ_AT_ONCE: Final = 16
"""The most runs at rest read at once; most have a few KB, but some are as large as a job."""
MAX_VERIFIERS: Final = 10_000
"""The most workers that a recorded verification may name."""
_FIRST: Final = (-math.inf, RunId(""))
"""A key that sorts before all runs."""


class Runs:
    def __init__(self, app: App) -> None:
        self.app = app
        self._briefs = RunBriefs(self._brief, app.env.runs.chores.do)
        app.feed.listeners.append(self._briefs.note)

    async def view(self, run_id: str) -> RunView:
        """Return the view of one run. Raises NotFoundError."""
        views = await self._views([RunId(run_id)])
        if not views:
            raise NotFoundError(f"run {run_id!r} is not known")
        return views[0]

    async def info(self, run_id: str) -> pb.RunInfo:
        """Return one run as a protobuf message. Raises NotFoundError."""
        return self._info_of(await self.view(run_id))

    def _info_of(self, view: RunView) -> pb.RunInfo:
        state = self.app.loop.state
        info = run_info(view, self.app.blobs.location, pinned=view.run_id in state.pinned)
        if (result := state.verifications.get(view.run_id)) is not None:
            same = result.model_dump(exclude={"run_id", "wall_s", "by"})
            shown = pb.VerificationResult(**same, verified_by=result.by, time_s=result.wall_s)
            info.last_verification.CopyFrom(shown)
        return info

    async def watch(self) -> AsyncIterator[pb.WatchRunsResponse]:
        """Yield the briefs of all runs, newest first, and then of each run that changes."""
        with self._briefs.follower() as follower:
            run_ids = self._newest_first()
            while at_once := list(islice(run_ids, READ_AT_ONCE)):
                views = await self._views(at_once)
                runs = [self._brief_of(view) for view in views]
                yield pb.WatchRunsResponse(runs=runs, time_s=time.time())
            yield pb.WatchRunsResponse(is_complete=True, time_s=time.time())
            while True:
                news = await follower.news()
                runs = [brief for brief in news.values() if brief is not None]
                deleted = [run_id for run_id, brief in news.items() if brief is None]
                yield pb.WatchRunsResponse(
                    runs=runs, deleted=deleted, is_complete=True, time_s=time.time()
                )
                await asyncio.sleep(PAUSE_S)

    async def _brief(self, run_id: RunId) -> pb.RunBrief | None:
        views = await self._views([run_id])
        return self._brief_of(views[0]) if views else None

    def _brief_of(self, view: RunView) -> pb.RunBrief:
        run = self.app.loop.state.runs.get(view.run_id)
        return run_brief(view, None if run is None else self.progress_of(run))

    def progress_of(self, run: RunRecord) -> pb.RunProgress | None:
        """Return the latest progress of a run, as the feed shows it."""
        last = self.app.feed.progress(run.run_id)
        return None if last is None else progress(self.app.paces, self.app.loop.world, run, last)

    async def page(self, page_token: str) -> pb.ListRunsResponse:
        """Return the runs after the page token, newest first, as many as fit into one message.

        The token is the position of the last run of a page, so that deleting that run does no harm.
        """
        run_ids = self._newest_first(_place_in(page_token) if page_token else _FIRST)
        response = pb.ListRunsResponse()
        num_bytes = 0
        while at_once := list(islice(run_ids, READ_AT_ONCE)):
            for view in await self._views(at_once):
                info = self._info_of(view)
                num_bytes += info.ByteSize()
                if response.runs and num_bytes > MAX_PAGE_BYTES:
                    last = response.runs[-1]
                    response.next_page_token = f"{last.submitted_at_s!r} {last.run_id}"
                    return response
                response.runs.append(info)
        return response

    def _newest_first(self, behind: tuple[float, RunId] = _FIRST) -> Iterator[RunId]:
        """Yield the ids of existing runs, newest first, that come after this position."""
        state = self.app.loop.state
        active = sorted((-run.submitted_wall_s, run.run_id) for run in state.runs.values())
        places = merge(active, state.ended.by_submission.behind(behind))
        return (run_id for place, run_id in places if (place, run_id) > behind)

    async def _views(self, run_ids: Sequence[RunId]) -> list[RunView]:
        """Return the views of the runs that still exist, in this order."""
        read: dict[RunId, RunView] = {}
        asked: set[RunId] = set()
        # An active run may come to rest while others are read.
        while missing := [r for r in run_ids if r in self.app.loop.state.ended and r not in asked]:
            read.update(await self.app.loop.recorded.views(missing))
            asked.update(missing)
        runs = self.app.loop.state.runs  # a run may have been resumed meanwhile
        views = (
            self._live(runs[run_id]) if run_id in runs else read.get(run_id) for run_id in run_ids
        )
        return [view for view in views if view is not None]

    def _live(self, run: RunRecord) -> RunView:
        feed = self.app.feed
        view = view_of(self.app.loop.world, run, feed.last_wall_s(run.run_id))
        last = feed.progress(run.run_id)
        trouble = feed.trouble(run.run_id)  # as of a commit, while the run trains on
        is_waiting = run.ended is None and why_waiting(run, self.app.loop.world) != ""
        refused = self.app.refusals.sentence() if is_waiting else ""
        said = with_refused(view.reason, refused)
        reason = trouble or said or (last.reason if last else "")
        # The steps of the open segment count, too, as those who watch see them.
        step = max(view.step, last.step if last else 0)
        return view.model_copy(update={"reason": reason, "step": step})


def _place_in(page_token: str) -> tuple[float, RunId]:
    wall_s, _, run_id = page_token.partition(" ")
    try:
        return -float(wall_s), RunId(check_run_id(run_id))
    except ValueError:
        text = f"{page_token[:80]!r} is not from an earlier answer"
        raise InvalidInputError.at("page_token", text) from None


# ---- Workers ----
#
# Workers are answered page by page, since there may be thousands.

MAX_PAGE_SIZE: Final = 500
"""The most workers in one answer; other calls wait while it is made."""


def page(app: App, page_token: str, page_size: int) -> pb.ListWorkersResponse:
    """Return at most page_size workers after the page token, sorted by name; without page_size all.

    The token is the name of the last worker of a page, which may be gone before the next request.
    """
    if page_token:
        check_worker_id(page_token)
    state, limit = app.loop.state, min(page_size, MAX_PAGE_SIZE)
    workers = _behind(list(state.workers.values()), page_token, limit)
    refused = () if page_token else app.refusals.messages()
    response, num_bytes = pb.ListWorkersResponse(refused=refused), 0
    for info in worker_infos(state, workers, app.silent_s):
        num_bytes += info.ByteSize()
        if limit and response.workers and num_bytes > MAX_PAGE_BYTES:
            break
        response.workers.append(info)
    are_more = len(response.workers) < len(workers) or (limit and len(workers) == limit)
    if are_more and response.workers:
        response.next_page_token = response.workers[-1].worker_id
    return response


def _behind(workers: Sequence[WorkerRecord], token: str, limit: int) -> list[WorkerRecord]:
    """Return the first `limit` workers after a name, sorted by name; all if limit is 0."""
    behind = [each for each in workers if each.member.worker_id > token and each.is_listed]
    num_wanted = limit or len(behind)
    return nsmallest(num_wanted, behind, key=lambda worker: worker.member.worker_id)


# ---- Step history ----
#
# Segments that have ended are read from the store in pages, between which the journal continues;
# those in flight are in memory.

MAX_ROWS: Final = 65_536
"""The most rows of one series in one answer."""
MAX_NAMES: Final = 256
"""The most names of parties, or of series, in one request."""
MESSAGE_ROWS: Final = 16_384
"""The most rows in one message, so that it fits the size limit even uncompressed."""


@dataclass(slots=True)
class _Gathered:
    """The rows of one party that were read so far, keyed by series."""

    ended: dict[Series, list[Columns]] = field(default_factory=dict)
    in_flight: dict[Series, Columns] = field(default_factory=dict)
    stride: int = 1
    last_segment: int = -1
    """The number of the newest segment that has ended."""


@dataclass(frozen=True, slots=True)
class HistoryQueries:
    """The queries about the step histories of one app."""

    app: App

    async def blocks(
        self, request: pb.GetHistoryRequest, root_segment: int
    ) -> AsyncIterator[pb.HistoryBlock]:
        """Yield the requested rows, party by party and series by series.

        root_segment: the newest segment that the run has trained; rows of later segments are stale,
        from before the run returned to an earlier commit.
        """
        _check(request)
        run_id = RunId(request.run_id)
        stored = await self.app.loop.recorded.history_parties(run_id)
        parties = sorted({*stored, *self.app.history.parties(run_id)})
        for party in parties:
            if not _is_wanted(party, request.parties or [ROOT]):
                continue
            limit = root_segment if _counts_as_root(party) else None
            gathered = await self._read(request, party, limit)
            sent = self.app.history.sent(run_id, party)
            await asyncio.to_thread(_add_tail, gathered, sent, request.series)
            for series in sorted({*gathered.ended, *gathered.in_flight}):
                for block in await asyncio.to_thread(_blocks, request, party, series, gathered):
                    yield block

    async def _read(
        self, request: pb.GetHistoryRequest, party: Party, limit: int | None
    ) -> _Gathered:
        gathered, last, step = _Gathered(), -1, 0
        run_id, span = RunId(request.run_id), _span_of(request)
        while page := await self.app.loop.recorded.history(run_id, party, span, last):
            last = page[-1].segment
            current = page if limit is None else await asyncio.to_thread(_up_to, limit, page)
            if current and is_of_newest_segment(party):
                current = current[-1:]
                gathered.ended.clear()
            for row, rows in zip(current, await asyncio.to_thread(_unpacked, current), strict=True):
                for series, columns in rows.items():
                    if _is_wanted(series.name, request.series or ["*"]):
                        # Rows read before may have been merged with later ones since.
                        its = gathered.ended.setdefault(series, [])
                        its.append(behind(columns, step) if row.from_step < step else columns)
                step = max(step, row.to_step)
            gathered.stride = max([gathered.stride, *(row.stride for row in current)])
            gathered.last_segment = max([gathered.last_segment, *(row.segment for row in current)])
        return gathered


def _counts_as_root(party: Party) -> bool:
    """Return True if a party's segments are numbered like those of the root party."""
    return party == ROOT or party.partition("/")[0] in ("actions", "node", "replica", "stage")


def _up_to(segment: int, rows: Sequence[HistoryRow]) -> list[HistoryRow]:
    cut = (cut_to(row, segment) for row in rows)
    return [row for row in cut if row is not None]


def _add_tail(gathered: _Gathered, sent: Sequence[SentRows], wanted: Sequence[str]) -> None:
    """Add the rows of the segment in flight, unless it has ended and its rows were read already."""
    if not sent or sent[0].segment <= gathered.last_segment:
        return
    gathered.stride = max([gathered.stride, *(sender.stride for sender in sent)])
    gathered.in_flight = {
        series: columns
        for series, columns in rows_in_flight(sent).items()
        if _is_wanted(series.name, wanted or ["*"])
    }


def _span_of(request: pb.GetHistoryRequest) -> StepSpan:
    return StepSpan(max(request.from_step, 1), request.to_step or None)


def _unpacked(rows: Sequence[HistoryRow]) -> list[dict[Series, Columns]]:
    return [unpack(row.rows) for row in rows]


def _check(request: pb.GetHistoryRequest) -> None:
    for name in ("parties", "series"):
        given = getattr(request, name)
        if len(given) > MAX_NAMES or any(len(entry) > MAX_NAMES for entry in given):
            text = f"at most {MAX_NAMES} names, each of at most {MAX_NAMES} characters"
            raise InvalidInputError.at(name, text)
    if request.max_rows > MAX_ROWS:
        raise InvalidInputError.at("max_rows", f"{request.max_rows} is over {MAX_ROWS}")
    if request.to_step and request.to_step < request.from_step:
        raise InvalidInputError.at("to_step", f"{request.to_step} is before from_step")


def _is_wanted(name: str, wanted: Sequence[str]) -> bool:
    """Return True if a name equals a wanted name, or matches a wanted prefix that ends in "*"."""
    return any(
        name.startswith(entry[:-1]) if entry.endswith("*") else name == entry for entry in wanted
    )


def _blocks(
    request: pb.GetHistoryRequest, party: Party, series: Series, gathered: _Gathered
) -> list[pb.HistoryBlock]:
    stride, max_rows, span = gathered.stride, request.max_rows or MAX_ROWS, _span_of(request)
    whole = {
        False: joined(gathered.ended.get(series, []), stride),
        True: joined([gathered.in_flight[series]] if series in gathered.in_flight else [], stride),
    }
    whole = {
        provisional: clipped(rows, stride, span.from_step, span.to_step)
        for provisional, rows in whole.items()
    }
    _, stride = shortened(joined([*whole.values()], stride), stride, max_rows)
    return [
        pb.HistoryBlock(
            party=party,
            series=series.name,
            stride=stride,
            observed=series.observed,
            provisional=provisional,
            columns=pack_columns(part_of(columns, start, start + MESSAGE_ROWS)),
        )
        for provisional, rows in whole.items()
        for columns in (joined([rows], stride),)
        for start in range(0, len(columns), MESSAGE_ROWS)
    ]


# ---- Protobuf messages ----

Paths = Callable[[Digest], str]
"""Returns the path of a blob, for display; "" if the blob is not a file on this machine."""

_IN_BRIEF = {
    field.name
    for field in pb.RunBrief.DESCRIPTOR.fields
    if field.name in RunView.model_fields and field.name != "phase"
}
_PHASES = {phase: pb.RunPhase.Value(f"RUN_PHASE_{phase.value}") for phase in RunPhase}


def run_info(run: RunView, paths: Paths, *, pinned: bool) -> pb.RunInfo:
    """Return one run as a protobuf message."""
    # Fields with the same name in both are copied.
    same = run.model_dump(exclude={"predictions", "num_facts", "is_reproducible"})
    changed = {
        "phase": _PHASES[run.phase],
        "commits": [_commit_info(commit, paths) for commit in run.commits],
        "event_index": max(run.num_facts - 1, 0),
        "reproducible": run.is_reproducible,
        "pinned": pinned,
    }
    return pb.RunInfo(**same | changed)


def verification_of(request: pb.RecordVerificationRequest, by: str) -> VerificationEnded:
    """Return the result in a request as a fact. Raises InvalidInputError for a conclusion that is
    none, or too many workers."""
    result = request.result
    if result.conclusion not in list(Conclusion):
        text = f"{result.conclusion!r} is none of {', '.join(Conclusion)}"
        raise InvalidInputError.at("result.conclusion", text)
    if len(result.workers) > MAX_VERIFIERS:
        text = f"names {len(result.workers)} workers; allowed are {MAX_VERIFIERS}"
        raise InvalidInputError.at("result.workers", text)
    return VerificationEnded(
        run_id=RunId(request.run_id),
        conclusion=Conclusion(result.conclusion),
        num_equal=result.num_equal,
        num_unverified=result.num_unverified,
        workers=tuple(check_worker_id(name) for name in result.workers),
        wall_s=time.time(),
        by=by,
    )


def event(item: FeedEvent) -> pb.RunEvent:
    """Return one event as a protobuf message."""
    return pb.RunEvent(
        index=item.index,
        time_s=item.wall_s,
        kind=type(item.fact).__name__,
        sentence=sentence(item.fact),
        payload_json=item.payload or item.fact.model_dump_json(),
        phase=_PHASES[item.phase],
        leader_s=item.leader_s,
    )


def progress(paces: Paces, world: World, run: RunRecord, item: SegmentProgress) -> pb.RunProgress:
    """Return the latest progress of a run as a protobuf message."""
    status = shown_status_of(run, world)
    counts, step = status.counts, max(item.step, status.step)
    return pb.RunProgress(
        **asdict(item) | {"step": step, "loss": item.loss or counts.loss},
        **asdict(paces.time_of(run, status, step)),
        num_steps=status.num_steps,
        num_clients_done=status.num_clients_done,
        num_clients=status.num_clients,
        segment=status.segment,
        num_segments=status.num_segments,
        strategy_phase=status.strategy_phase,
        unit=counts.unit,
        num_clients_rejected=counts.num_clients_rejected,
        num_clients_late=counts.num_clients_late,
        best=counts.best,
        best_member=counts.best_member,
        num_copied=counts.num_copied,
    )


def run_brief(run: RunView, latest: pb.RunProgress | None) -> pb.RunBrief:
    """Return the summary of one run for a list of runs."""
    same = run.model_dump(include=_IN_BRIEF)
    return pb.RunBrief(
        **same,
        phase=_PHASES[run.phase],
        event_index=max(run.num_facts - 1, 0),
        progress=latest,
    )


def worker_infos(
    state: CoordinatorState,
    workers: Sequence[WorkerRecord],
    silent_s: Callable[[WorkerRecord], float],
) -> Iterator[pb.WorkerInfo]:
    """Yield these workers as messages; silent_s: returns seconds since the last heartbeat."""
    runs_of: defaultdict[Member, list[RunId]] = defaultdict(list)
    asked = frozenset(worker.member for worker in workers)
    for run in state.runs.values():
        if run.ended is None and not draws_in_secret(run.job):
            for member in run.touched & asked:
                runs_of[member].append(run.run_id)
    for worker in workers:
        yield _worker_info(worker, silent_s(worker), runs_of.get(worker.member, ()))


def _worker_info(worker: WorkerRecord, silent_s: float, runs: Sequence[RunId]) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        **worker.member.model_dump(),
        address=worker.address,
        is_alive=worker.is_alive,
        silent_s=silent_s,
        capability=types_pb2.Capability(**worker.capability.model_dump()),
        run_ids=runs,
        reason=worker.reason,
        quarantine=worker.quarantine,
    )


def rendezvous_response(arrivals: Sequence[Arrival]) -> pb.RendezvousResponse:
    """Return the answer to the members of a party once all have arrived at the rendezvous."""
    members = [
        pb.RendezvousMember(
            endpoint=arrival.endpoint,
            applied_step=arrival.applied_step,
            address=arrival.address,
            slices=arrival.slices,
        )
        for arrival in arrivals
    ]
    return pb.RendezvousResponse(members=members)


def _commit_info(commit: CommitView, paths: Paths) -> pb.CommitInfo:
    same = commit.model_dump(exclude={"schedule"})
    schedule = [_setting(setting) for setting in commit.schedule]
    return pb.CommitInfo(**same, path=paths(commit.digest), schedule=schedule)


def _setting(setting: Setting) -> pb.Hyperparameters:
    values = {name: thawed(value) for name, value in setting.values.items()}
    return pb.Hyperparameters(from_step=setting.from_step, values_json=dump_json(values))


# ---- Events ----
#
# A request may ask for a span of a run's events; past ones are answered here.

MAX_EVENTS: Final = 256
MAX_BYTES: Final = 2**18
"""The most bytes of events in one message, not counting the last event."""


def span_of(request: pb.WatchRunRequest, num_facts: int) -> EventSpan:
    """Return the requested span of a run that has num_facts events. Raises OutOfRangeError if the
    span begins in the future, InvalidInputError for an unknown kind."""
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
    """Return True if a stream continues with new events. Raises InvalidInputError if it cannot."""
    has_end = request.newest_first or request.before_index > 0
    follows = request.follow if request.HasField("follow") else not has_end
    if follows and has_end:
        text = "goes on with what happens, which newest_first and before_index leave out"
        raise InvalidInputError.at("follow", text)
    return follows


async def past_events(
    feed: Feed, run_id: RunId, span: EventSpan, request: pb.WatchRunRequest
) -> AsyncIterator[pb.WatchRunResponse]:
    """Yield the past events up to the request's limit, several per message if the request allows
    that: a message costs more than the event in it."""
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
    """Yield the events of a page, with at most max_events per message."""
    waiting: list[pb.RunEvent] = []
    num_bytes = 0
    for item in page:
        waiting.append(event(item))
        num_bytes += waiting[-1].ByteSize()
        if len(waiting) >= max_events or num_bytes > MAX_BYTES:
            yield pb.WatchRunResponse(event=waiting[0], more=waiting[1:])
            waiting, num_bytes = [], 0
    if waiting:
        yield pb.WatchRunResponse(event=waiting[0], more=waiting[1:])
