"""Ended runs leave the memory of the coordinator, and nobody can tell from its answers.

The reference is the pure core, which forgets nothing; see tests/core/simulation.py.
"""

import asyncio
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratagem.common.errors import StratagemError
from stratagem.common.ids import RunId
from stratagem.coordinator import rows
from stratagem.coordinator.core.commands import (
    CancelRun,
    Command,
    DeleteRun,
    LoseWorker,
    Refusal,
    Report,
    ReportTrouble,
    ResumeRun,
    SubmitRun,
)
from stratagem.coordinator.core.facts import ROOT, ErrorRecord, RunFailed, RunReleased
from stratagem.coordinator.core.pending import live_blobs, pending
from stratagem.coordinator.core.showing import RunView, view_of
from stratagem.coordinator.core.state import RunPhase, RunRecord
from stratagem.coordinator.journal import Holder, Journal
from stratagem.coordinator.loop import Loop
from stratagem.coordinator.strategies import table
from stratagem.coordinator.strategies.local import STRATEGY as local
from tests.core.simulation import RUN, Simulation, job, member, register
from tests.core.test_plugins import Raising
from tests.core.test_population import SECTIONS, population
from tests.core.test_runs import DATA_PARALLEL, EVALUATION, FEDERATED, LOCAL

JOBS = {
    "local": job(LOCAL, evaluation=EVALUATION, retention=1),
    "parallel": job(DATA_PARALLEL),
    "federated": job(FEDERATED),
    "population": job(population(), **SECTIONS),
    "inline": job(LOCAL, data={"inline": "ab" * 32}),
}
ERROR = RunFailed(
    reason="it raised",
    error=ErrorRecord(
        type="ValueError", message="no", traceback="...", worker_id="a", activity="step"
    ),
)


class Twins:
    """A loop over a journal, and a simulation in which no run comes to rest; both are told the
    same, and have to answer the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.simulation = Simulation()
        self.told: list[Command] = []
        self.loop: Loop
        self._running: asyncio.Task[None]

    async def open(self) -> None:
        journal = Journal.open(self.path)
        lead = journal.take_lead(Holder.of_this_process(), ttl_s=1)
        self.loop = Loop(journal, lead, lambda facts: None)
        await self.loop.replay(lambda facts: None)
        self._running = asyncio.create_task(self.loop.run())

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.loop.close()

    async def restart(self) -> None:
        """Both forget what they have in memory."""
        await self.close()
        self.simulation.crash()
        await self.open()

    async def tell(self, command: Command) -> None:
        self.told.append(command)
        assert await _answer(self._submit(command)) == await _answer(self._simulate(command))

    async def work(self, steps: int = 10_000) -> None:
        """Let happen what is under way."""
        for _ in range(steps):
            if self.simulation.queue:
                await self.tell(self.simulation.queue.popleft())

    async def agree(self) -> None:
        """Every run is shown as if it had never been at rest, and the same blobs are kept."""
        state, expected = self.loop.state, self.simulation.state
        views = await self.loop.recorded.views(state.ended.keys())
        assert views.keys() == state.ended.keys()
        views |= {run_id: self._view(self.loop, run_id) for run_id in state.runs}
        assert views == {run_id: self._view(self.simulation, run_id) for run_id in expected.runs}
        assert live_blobs(state) == live_blobs(expected)
        assert pending(state) == pending(expected)
        assert not any(may_rest(run) for run in state.runs.values())
        for run_id, run in state.ended.items():
            record = expected.runs[run_id]
            assert (run.ended, run.num_facts) == (record.ended, record.num_facts)

    def _view(self, twin: Any, run_id: RunId) -> RunView:
        world = twin.world if isinstance(twin, Loop) else twin.agenda.world
        return view_of(world, twin.state.runs[run_id], 0.0)

    async def _submit(self, command: Command) -> Any:
        return await self.loop.submit(command)

    async def _simulate(self, command: Command) -> Any:
        decided = self.simulation.tell(command)
        if isinstance(decided, Refusal):
            raise StratagemError(decided.reason)
        return decided


def may_rest(run: RunRecord) -> bool:
    settled = not run.has_raised and table.is_installed(run.job)
    return run.ended is not None and run.is_released and settled


async def _answer(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except StratagemError as error:
        return str(error)


@asynccontextmanager
async def twins(folder: Path, *workers: str) -> AsyncIterator[Twins]:
    made = Twins(folder / "journal.sqlite")
    await made.open()
    for name in workers:
        await made.tell(register(name))
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(autouse=True)
def _timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a run ended is the wall clock's, which the simulation does not have."""
    original = rows.view
    monkeypatch.setattr(
        rows, "view", lambda text: original(text).model_copy(update={"ended_at_s": 0.0})
    )


def of_run(journal: Path, table_name: str) -> int:
    with closing(sqlite3.connect(journal)) as connection:
        query = f"SELECT count(*) FROM {table_name} WHERE run_id = ?"
        return int(connection.execute(query, (RUN,)).fetchone()[0])


def change(journal: Path, statement: str) -> None:
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute(statement)


@pytest.mark.parametrize("name", JOBS)
async def test_a_run_of_each_kind_is_shown_as_before_and_read_no_more(
    tmp_path: Path, name: str
) -> None:
    async with twins(tmp_path, "a", "b", "c") as both:
        await both.tell(SubmitRun(RUN, JOBS[name], 1.0, by="client alice"))
        await both.work()
        assert both.loop.state.ended[RUN].ended is RunPhase.COMPLETED
        assert not both.loop.state.runs
        await both.agree()
        await both.restart()
        assert await both.loop.recorded.runs() == ([both.loop.state.ended[RUN]], [RunId("")])
        await both.agree()
        read = await both.loop.recorded.read(RUN, 0)
        assert [each.index for each in read] == list(range(min(100, of_run(both.path, "event"))))


LOST: dict[str, Callable[[Path], None]] = {
    "none was written": lambda path: change(path, "DELETE FROM summary"),
    "another version's": lambda path: change(path, "UPDATE summary SET version = '9', brief = '?'"),
    "older than the run": lambda path: change(path, "UPDATE summary SET position = position - 1"),
}


@pytest.mark.parametrize("how", LOST)
async def test_a_summary_that_does_not_hold_is_made_anew_from_the_facts(
    tmp_path: Path, how: str
) -> None:
    async with twins(tmp_path, "a") as both:
        await both.tell(SubmitRun(RUN, JOBS["local"], 1.0))
        await both.work()
        LOST[how](both.path)
        assert (await both.loop.recorded.runs())[0] == []
        await both.restart()
        await both.agree()
        assert (await both.loop.recorded.runs())[0] == [both.loop.state.ended[RUN]]


async def test_a_run_that_was_resumed_by_who_knows_no_summaries_goes_on(tmp_path: Path) -> None:
    """A coordinator of the version before, which stood by while this one led."""
    async with twins(tmp_path, "a") as both:
        await both.tell(SubmitRun(RUN, JOBS["local"], 1.0))
        await both.tell(CancelRun(RUN))
        await both.work()
        assert RUN in both.loop.state.ended
        change(both.path, "CREATE TABLE kept AS SELECT * FROM summary")
        await both.tell(ResumeRun(RUN))
        change(both.path, "INSERT OR REPLACE INTO summary SELECT * FROM kept")
        await both.restart()
        assert RUN in both.loop.state.runs
        await both.agree()
        await both.work()
        await both.agree()
        assert both.loop.state.ended[RUN].ended is RunPhase.COMPLETED


async def test_the_name_of_a_deleted_run_is_free_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    async with twins(tmp_path, "a") as both:
        await both.tell(SubmitRun(RUN, JOBS["inline"], 1.0))
        await both.work()
        await both.restart()
        await both.tell(DeleteRun(RUN))
        assert (of_run(both.path, "event"), of_run(both.path, "summary")) == (0, 0)
        assert live_blobs(both.loop.state) == frozenset()
        await both.tell(SubmitRun(RUN, JOBS["local"], 2.0))
        await both.agree()


async def test_what_an_absent_strategy_left_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: dict[str, object] = {"Local": local}
    monkeypatch.setattr(table, "_load", installed.get)
    async with twins(tmp_path, "a") as both:
        await both.tell(SubmitRun(RUN, JOBS["inline"], 1.0))
        await both.work(2)
        del installed["Local"]
        await both.restart()
        await both.tell(register("b"))
        assert both.loop.state.runs[RUN].ended is RunPhase.FAILED, "not at rest"
        installed["Local"] = local
        await both.restart()
        await both.work()
        await both.agree()
        assert both.loop.state.ended[RUN].ended is RunPhase.FAILED
        del installed["Local"]
        await both.restart()
        assert RUN in both.loop.state.ended, "what was summed up with it stays"


async def test_what_a_strategy_raised_about_is_read_again_by_a_mended_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: dict[str, object] = {"Local": Raising("transition")}
    monkeypatch.setattr(table, "_load", installed.get)
    async with twins(tmp_path, "a") as both:
        await both.tell(SubmitRun(RUN, JOBS["inline"], 1.0))
        await both.work()
        assert both.loop.state.runs[RUN].ended is RunPhase.FAILED
        await both.agree()
        installed["Local"] = local
        await both.restart()
        assert both.loop.state.runs[RUN].ended is None
        await both.work()
        await both.agree()
        assert both.loop.state.ended[RUN].ended is RunPhase.COMPLETED


NAMES = ("r-1", "r-2")
COMMANDS: dict[str, Callable[[RunId], Command]] = {
    "submit": lambda run_id: SubmitRun(run_id, JOBS["local"], 1.0),
    "submit another": lambda run_id: SubmitRun(run_id, JOBS["parallel"], 2.0),
    "cancel": CancelRun,
    "resume": ResumeRun,
    "delete": DeleteRun,
    "fail": lambda run_id: Report(run_id, ERROR),
    "release": lambda run_id: Report(run_id, RunReleased()),
    "trouble": lambda run_id: ReportTrouble(run_id, ROOT, 1, "cut off"),
    "lose": lambda _: LoseWorker(member("a"), "silent"),
    "register": lambda _: register("a"),
}
Action = tuple[str, int]
ACTIONS = st.tuples(
    st.sampled_from([*COMMANDS, "work", "work", "work much", "again", "restart"]),
    st.integers(0, 1),
)


async def play(folder: Path, actions: Iterable[Action]) -> None:
    async with twins(folder, "a", "b") as both:
        for name, which in actions:
            match name:
                case "work":
                    await both.work(3)
                case "work much":
                    await both.work(40)
                case "again":  # a message that comes late
                    await both.tell(both.told[(7 * which + 3) % len(both.told)])
                case "restart":
                    await both.restart()
                case _:
                    await both.tell(COMMANDS[name](RunId(NAMES[which])))
            await both.agree()


async def test_every_command_is_answered_about_a_run_at_rest(tmp_path: Path) -> None:
    asked = [(name, 0) for name in (*COMMANDS, "again") if name not in ("delete", "resume")]
    begun = [("submit", 0), ("work", 0)]
    stopped = [*begun, ("cancel", 0), ("work much", 0), *asked, ("restart", 0), *asked]
    resumed = [("resume", 0), ("cancel", 0), ("resume", 0), ("work much", 0), *asked, ("resume", 0)]
    await play(tmp_path, [*stopped, *resumed, ("delete", 0), *begun, ("delete", 0)])


@pytest.mark.sweep
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(actions=st.lists(ACTIONS, min_size=3, max_size=25))
async def test_nobody_can_tell_which_runs_are_at_rest(
    tmp_path: Path, actions: list[Action]
) -> None:
    await play(Path(tempfile.mkdtemp(dir=tmp_path)), actions)
