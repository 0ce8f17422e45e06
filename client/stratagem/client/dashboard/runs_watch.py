"""The one subscription to all runs, for all tabs that show the list."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from stratagem.client.dashboard.followed import Followed
from stratagem.client.dashboard.page_values import as_json
from stratagem.client.sdk.async_client import AsyncClient
from stratagem.client.sdk.views import RunsChange

MAX_RUNS: Final = 200
"""In one message."""
MAX_DELETED: Final = 1000
"""Deleted runs that are remembered for tabs which have not been told."""


@dataclass(slots=True)
class ToldRuns:
    """What one tab has been told."""

    subscription: int = -1
    num_changes: int = 0
    is_complete: bool = False


class RunsWatch:
    """All runs in brief; they are followed while a tab shows them."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._runs: OrderedDict[str, tuple[int, str]] = OrderedDict()
        """By id: the number of its newest change, and its brief as JSON, "" of a run that is
        deleted; in order of that number."""
        self._subscription = self._num_changes = 0
        self._is_complete, self._time_s = False, 0.0
        self._followed = Followed("all runs", self._follow, end=self._begin)

    @property
    def trouble(self) -> str:
        """Return what went wrong in following the runs just now."""
        return self._followed.trouble

    def looked_at(self, tell: Callable[[], None]) -> AbstractContextManager[None]:
        """Follow all runs; tell: is called when something has happened."""
        return self._followed.looked_at(tell)

    def news(self, seen: ToldRuns) -> list[bytes]:
        """Return what a tab has not been told, as messages."""
        is_first = seen.subscription != self._subscription
        since = 0 if is_first else seen.num_changes
        changed: list[tuple[str, str]] = []
        for run_id, (number, brief) in reversed(self._runs.items()):
            if number <= since:
                break
            changed.append((run_id, brief))
        is_complete = self._is_complete and not (seen.is_complete and not is_first)
        if not changed and not is_complete:
            return []
        seen.subscription, seen.num_changes = self._subscription, self._num_changes
        seen.is_complete = self._is_complete
        changed.reverse()
        return [
            self._message(
                changed[start : start + MAX_RUNS],
                is_first=is_first and not start,
                is_last=start + MAX_RUNS >= len(changed),
            )
            for start in range(0, max(len(changed), 1), MAX_RUNS)
        ]

    def _message(self, changed: list[tuple[str, str]], *, is_first: bool, is_last: bool) -> bytes:
        deleted = [run_id for run_id, brief in changed if not brief]
        rest = as_json({
            "deleted": deleted, "is_first": is_first, "time_s": self._time_s,
            "is_complete": self._is_complete and is_last,
        })  # fmt: skip
        briefs = ",".join(brief for _, brief in changed if brief)
        return f'event: runs\ndata: {{"runs":[{briefs}],{rest[1:]}\n\n'.encode()

    async def _follow(self) -> bool:
        async for change in self._client.watch_runs():
            self._take(change)
        return True

    def _take(self, change: RunsChange) -> None:
        if change.is_first:
            self._begin()
        self._num_changes += 1
        briefs = {brief.run_id: as_json(brief) for brief in change.runs}
        for run_id, brief in {**briefs, **dict.fromkeys(change.deleted, "")}.items():
            self._runs[run_id] = (self._num_changes, brief)
            self._runs.move_to_end(run_id)
        self._is_complete, self._time_s = change.is_complete, change.time_s
        if len(change.deleted) and sum(not brief for _, brief in self._runs.values()) > MAX_DELETED:
            self._runs = OrderedDict((id_, each) for id_, each in self._runs.items() if each[1])
            self._subscription += 1  # all tabs are told what is left
        self._followed.tell()

    def _begin(self) -> None:
        """Forget all runs: the coordinator names them again."""
        self._runs.clear()
        self._subscription += 1
        self._num_changes, self._is_complete = 0, False
