"""Answers queries about runs: active ones from memory, those at rest from the journal."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Final

from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.common.base.ids import RunId, check_run_id
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.state import RunRecord
from stratagem.coordinator.core.state_machine.run_view import RunView, view_of
from stratagem.coordinator.core.state_machine.strategy_boundary import why_waiting
from stratagem.coordinator.observe.run_briefs import PAUSE_S, RunBriefs
from stratagem.coordinator.observe.waiting_reasons import with_refused
from stratagem.coordinator.service.protobuf_views import progress, run_brief, run_info
from stratagem.v1 import coordinator_pb2

MAX_PAGE_BYTES: Final = 2 * 2**20
"""Size of a page with several runs; one alone is never larger than a message."""

READ_AT_ONCE: Final = 16
"""Runs at rest that are read at once: a few KB each, but each may be as large as a job."""


_FIRST: Final = (-math.inf, RunId(""))
"""A place before those of all runs."""


class Runs:
    def __init__(self, app: App) -> None:
        self.app = app
        self._briefs = RunBriefs(self._brief, app.env.chores.do)
        app.feed.listeners.append(self._briefs.note)

    async def view(self, run_id: str) -> RunView:
        """Return one run. Raises NotFoundError."""
        views = await self._views([RunId(run_id)])
        if not views:
            raise NotFoundError(f"run {run_id!r} is not known")
        return views[0]

    async def info(self, run_id: str) -> coordinator_pb2.RunInfo:
        """Return one run as a message. Raises NotFoundError."""
        return self._info_of(await self.view(run_id))

    def _info_of(self, view: RunView) -> coordinator_pb2.RunInfo:
        is_pinned = view.run_id in self.app.loop.state.pinned
        return run_info(view, self.app.path_of, pinned=is_pinned)

    async def watch(self) -> AsyncIterator[coordinator_pb2.WatchRunsResponse]:
        """Yield the briefs of all runs, newest first, and then of those that have changed."""
        with self._briefs.follower() as follower:
            run_ids = self._newest_first()
            while at_once := list(islice(run_ids, READ_AT_ONCE)):
                views = await self._views(at_once)
                runs = [self._brief_of(view) for view in views]
                yield coordinator_pb2.WatchRunsResponse(runs=runs, time_s=time.time())
            yield coordinator_pb2.WatchRunsResponse(is_complete=True, time_s=time.time())
            while True:
                news = await follower.news()
                runs = [brief for brief in news.values() if brief is not None]
                deleted = [run_id for run_id, brief in news.items() if brief is None]
                yield coordinator_pb2.WatchRunsResponse(
                    runs=runs, deleted=deleted, is_complete=True, time_s=time.time()
                )
                await asyncio.sleep(PAUSE_S)

    async def _brief(self, run_id: RunId) -> coordinator_pb2.RunBrief | None:
        views = await self._views([run_id])
        return self._brief_of(views[0]) if views else None

    def _brief_of(self, view: RunView) -> coordinator_pb2.RunBrief:
        run = self.app.loop.state.runs.get(view.run_id)
        return run_brief(view, None if run is None else self.progress_of(run))

    def progress_of(self, run: RunRecord) -> coordinator_pb2.RunProgress | None:
        """Return the latest progress of a run."""
        shown = self.app.feed.progress(run.run_id)
        return None if shown is None else progress(self.app.paces, self.app.loop.world, run, shown)

    async def page(self, page_token: str) -> coordinator_pb2.ListRunsResponse:
        """Return the runs behind the token, newest first, as many as fit into one message.

        The token is the position of the last run of a page, so that deleting that run does no harm.
        """
        run_ids = self._newest_first(_place_in(page_token) if page_token else _FIRST)
        response = coordinator_pb2.ListRunsResponse()
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
        """Yield the runs that there are now behind a place among all, newest first."""
        state = self.app.loop.state
        active = sorted((-run.submitted_wall_s, run.run_id) for run in state.runs.values())
        places = merge(active, state.ended.by_submission.behind(behind))
        return (run_id for place, run_id in places if (place, run_id) > behind)

    async def _views(self, run_ids: Sequence[RunId]) -> list[RunView]:
        """Return those of the runs that exist, in this order; they may be deleted meanwhile."""
        read: dict[RunId, RunView] = {}
        asked: set[RunId] = set()
        # One that is active may come to rest while others are read.
        while left := [r for r in run_ids if r in self.app.loop.state.ended and r not in asked]:
            read.update(await self.app.loop.recorded.views(left))
            asked.update(left)
        runs = self.app.loop.state.runs  # one may have been resumed meanwhile
        views = (
            self._live(runs[run_id]) if run_id in runs else read.get(run_id) for run_id in run_ids
        )
        return [view for view in views if view is not None]

    def _live(self, run: RunRecord) -> RunView:
        feed = self.app.feed
        view = view_of(self.app.loop.world, run, feed.last_wall_s(run.run_id))
        shown = feed.progress(run.run_id)
        trouble = feed.trouble(run.run_id)  # as of a commit, while the run trains on
        is_waiting = run.ended is None and why_waiting(run, self.app.loop.world) != ""
        refused = self.app.refusals.sentence() if is_waiting else ""
        said = with_refused(view.reason, refused)
        reason = trouble or said or (shown.reason if shown else "")
        # As its watchers see it: the open segment's steps that are made count, too.
        step = max(view.step, shown.step if shown else 0)
        return view.model_copy(update={"reason": reason, "step": step})


def _place_in(page_token: str) -> tuple[float, RunId]:
    wall_s, _, run_id = page_token.partition(" ")
    try:
        return -float(wall_s), RunId(check_run_id(run_id))
    except ValueError:
        text = f"{page_token[:80]!r} is not from an earlier answer"
        raise InvalidInputError.at("page_token", text) from None
