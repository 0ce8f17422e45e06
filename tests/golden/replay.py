"""Replays a golden journal as a coordinator does, and says what has come of it."""

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.run_view import RunView, view_of
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.runtime.loop import Loop
from stratagem.coordinator.service.queries import run_info
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import Holder

FOLDER = Path(__file__).parent / "journals"


def load(sql: Path, path: Path) -> Journal:
    """The journal that `sql` describes, made at `path`."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(sql.read_text())
    return Journal.open(path)


@dataclass(frozen=True)
class Found:
    """The state after a journal, and how its runs are shown."""

    state: CoordinatorState
    runs: list[RunView]


async def replay(journal: Journal) -> Found:
    """What a journal holds, which is closed."""
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=1)
    loop = Loop(journal, lead, BUILT_IN)
    await loop.replay(lambda _: None)
    at_rest = await loop.recorded.views(loop.state.ended.keys())
    await loop.close()
    others = (view_of(loop.world, run, 0.0) for run in loop.state.runs.values())
    runs = sorted((*at_rest.values(), *others), key=lambda each: each.run_id)
    return Found(loop.state, runs)


def summary_of(found: Found) -> str:
    """What people see of every run, the workers, and what is due, as JSON."""
    pinned = found.state.pinned
    infos = (run_info(run, lambda _: "", pinned=run.run_id in pinned) for run in found.runs)
    runs = [MessageToDict(info) for info in infos]
    workers = {each.member.worker_id: each.is_alive for each in found.state.workers.values()}
    due = sorted(type(effect).__name__ for effect in pending(found.state))
    for run in runs:
        del run["jobJson"]  # gains a line with every new default
        run.pop("endedAtS", None)
        run.pop("dataPlane", None)  # of the workers that are there when a run is looked at
        for commit in run.get("commits", ()):  # which the first summaries do not say
            commit.pop("member", None)
            commit.pop("schedule", None)
    summary = {"runs": runs, "workers": workers, "due": due}
    return json.dumps(summary, indent=1, sort_keys=True) + "\n"
