"""Answers queries about runs: active ones from memory, those at rest from the journal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.common.base.ids import RunId, check_run_id
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.state import RunRecord
from stratagem.coordinator.core.state_machine.run_view import RunView, view_of
from stratagem.coordinator.service.protobuf_views import run_info
from stratagem.v1 import coordinator_pb2

MAX_PAGE_BYTES: Final = 2 * 2**20
"""Size of a page with several runs; one alone is never larger than a message."""

READ_AT_ONCE: Final = 16
"""Runs at rest that are read at once: a few KB each, but each may be as large as a job."""


@dataclass(frozen=True, slots=True)
class Runs:
    app: App

    async def view(self, run_id: str) -> RunView:
        """Return one run. Raises NotFoundError."""
        views = await self._views([RunId(run_id)])
        if not views:
            raise NotFoundError(f"run {run_id!r} is not known")
        return views[0]

    async def info(self, run_id: str) -> coordinator_pb2.RunInfo:
        """Return one run as a message. Raises NotFoundError."""
        return run_info(await self.view(run_id), self.app.path_of)

    async def page(self, page_token: str) -> coordinator_pb2.ListRunsResponse:
        """Return the runs behind the token, newest first, as many as fit into one message.

        The token is the position of the last run of a page, so that deleting that run does no harm.
        """
        behind = _place_in(page_token) if page_token else None
        runs = self.app.loop.state.all_runs()
        places = sorted((-run.submitted_wall_s, run.run_id) for run in runs)
        run_ids = [place[1] for place in places if behind is None or place > behind]
        response = coordinator_pb2.ListRunsResponse()
        num_bytes = 0
        for start in range(0, len(run_ids), READ_AT_ONCE):
            for view in await self._views(run_ids[start : start + READ_AT_ONCE]):
                info = run_info(view, self.app.path_of)
                num_bytes += info.ByteSize()
                if response.runs and num_bytes > MAX_PAGE_BYTES:
                    last = response.runs[-1]
                    response.next_page_token = f"{last.submitted_at_s!r} {last.run_id}"
                    return response
                response.runs.append(info)
        return response

    async def _views(self, run_ids: Sequence[RunId]) -> list[RunView]:
        """Return those of the runs that exist, in this order; they may be deleted meanwhile."""
        ended = [run_id for run_id in run_ids if run_id in self.app.loop.state.ended]
        read = await self.app.loop.recorded.views(ended) if ended else {}
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
        reason = trouble or view.reason or (shown.reason if shown else "")
        return view.model_copy(update={"reason": reason})


def _place_in(page_token: str) -> tuple[float, str]:
    wall_s, _, run_id = page_token.partition(" ")
    try:
        return -float(wall_s), check_run_id(run_id)
    except ValueError:
        text = f"{page_token[:80]!r} is not from an earlier answer"
        raise InvalidInputError.at("page_token", text) from None
