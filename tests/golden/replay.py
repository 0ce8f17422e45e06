"""Replays a golden journal as a coordinator does, and says what has come of it."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.journal import Holder, Journal
from stratagem.coordinator.loop import Loop
from stratagem.coordinator.service.views import run_info

FOLDER = Path(__file__).parent / "journals"


def load(sql: Path, path: Path) -> Journal:
    """The journal that `sql` describes, made at `path`."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(sql.read_text())
    return Journal.open(path)


async def replay(journal: Journal) -> CoordinatorState:
    """The state after a journal, which is closed."""
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=1)
    loop = Loop(journal, lead, lambda facts: None)
    await loop.replay(lambda _: None)
    await loop.close()
    return loop.state


def summary_of(state: CoordinatorState) -> str:
    """What people see of every run, the workers, and what is due, as JSON."""
    world = world_of(state)
    runs = [run_info(world, run, lambda _: "", 0.0) for _, run in sorted(state.runs.items())]
    workers = {each.member.worker_id: each.is_alive for each in state.workers.values()}
    due = sorted(type(effect).__name__ for effect in pending(state))
    summary = {"runs": [MessageToDict(run) for run in runs], "workers": workers, "due": due}
    for run in summary["runs"]:
        del run["jobJson"]  # gains a line with every new default
    return json.dumps(summary, indent=1, sort_keys=True) + "\n"
