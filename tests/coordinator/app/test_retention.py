"""Ended runs are not kept for ever, and a coordinator that reads much gets on with it."""

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.ids import Digest, RunId
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.commands import CancelRun, DeleteRun, ExpireRuns, PinRun, SubmitRun
from stratagem.coordinator.observe.logs import RunLogLine
from stratagem.coordinator.runtime import loop as loop_module
from stratagem.coordinator.runtime.loop import Loop
from stratagem.coordinator.store.journal import Journal, Record
from stratagem.coordinator.store.lead import Holder
from tests.coordinator.app.journal_tables import change, of_run
from tests.coordinator.app.twins import Twins, twins
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.core.simulation import start
from tests.coordinator.open_gate import decides, leading
from tests.coordinator.store.journals import OVER_BOTH
from tests.coordinator.store.places import put

pytestmark = pytest.mark.usefixtures("timeless")

ALL, EVER = 1_000_000, float("-inf")


def expire(before_s: float = EVER, num_kept: int = ALL, limit: int = ALL) -> ExpireRuns:
    return ExpireRuns(before_s, num_kept, limit, "it is time")


async def _ended_runs(both: Twins, *names: str) -> None:
    for name in names:
        await both.tell(SubmitRun(RunId(name), job_text(LOCAL), 1.0))
        await both.tell(CancelRun(RunId(name)))
        await both.work()


async def _expire(both: Twins, num_kept: int, *names: str) -> None:
    entries = await both.loop.submit(expire(num_kept=num_kept))
    assert [entry.run_id for entry in entries] == list(names)
    for name in names:  # to the twin, in which no run is at rest
        both.simulation.tell(DeleteRun(RunId(name)))
    await both.agree()


async def test_what_has_expired_is_gone_over_restarts_and_its_name_is_free(tmp_path: Path) -> None:
    async with twins(tmp_path, "a") as both:
        await _ended_runs(both, "r-1", "run-1", "r-2")
        await both.tell(SubmitRun(RunId("r-3"), job_text(LOCAL), 1.0))
        await _expire(both, 1, "r-1", "run-1")
        assert (of_run(both.path, "event"), of_run(both.path, "summary")) == (0, 0)
        await both.restart()
        await both.agree()
        await _expire(both, 0, "r-2")
        assert list(both.loop.state.runs) == ["r-3"], "what goes on stays"
        await _ended_runs(both, "run-1")
        await both.restart()
        await both.agree()


async def test_a_run_that_is_pinned_stays_over_restarts_until_it_is_unpinned(
    tmp_path: Path,
) -> None:
    async with twins(tmp_path, "a") as both:
        await _ended_runs(both, "run-1", "r-2")
        await both.tell(PinRun(RunId("run-1"), True))
        await _expire(both, 1)
        await both.restart()
        await _expire(both, 0, "r-2")
        await both.tell(PinRun(RunId("run-1"), False))
        await both.restart()
        await _expire(both, 0, "run-1")
        await _ended_runs(both, "run-1")  # the name is as free as any
        await _expire(both, 0, "run-1")


async def test_a_crash_while_a_run_is_deleted_is_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with twins(tmp_path, "a") as both:
        await _ended_runs(both, "run-1", "r-2")

        async def forget(_run_id: RunId) -> None:
            """What comes next is not done any more."""

        monkeypatch.setattr(both.loop.recorded, "forget", forget)
        await _expire(both, 1, "run-1")
        assert of_run(both.path, "event") > 0
        await both.restart()
        assert of_run(both.path, "event") == 0
        await both.agree()


async def test_logs_of_runs_that_are_gone_or_over_for_long_are_deleted(tmp_path: Path) -> None:
    """Also those that a coordinator has left which died before it could."""
    async with leading(tmp_path, decides, keep_runs=2) as app:
        house = app._house
        for name in ("r-1", "r-2", "r-3"):
            await app.loop.submit(SubmitRun(RunId(name), job_text(LOCAL), 1.0))
            await app.loop.submit(CancelRun(RunId(name)))
        await app.loop.submit(SubmitRun(RunId("r-4"), job_text(LOCAL), 1.0))
        app.logs.add(RunId("stranger"), RunLogLine(0.0, "", "INFO", "left behind"))
        (tmp_path / "profiles" / "stranger").mkdir(parents=True)
        (tmp_path / "logs" / "obstinate.jsonl").mkdir()  # the disk refuses to delete it
        await house.expire_runs()
        await house.delete_logs()
        (tmp_path / "logs" / "obstinate.jsonl").rmdir()
        assert set(app.logs.run_ids()) == {"r-2", "r-3", "r-4"}
        assert app.profiles.run_ids() == []
        hurried = house.settings.model_copy(update={"keep_logs_for": -1.0})
        await replace(house, settings=hurried).delete_logs()
        assert app.logs.run_ids() == ["r-4"]
        assert set(app.loop.state.ended) == {"r-2", "r-3"}, "the runs themselves are kept"


async def test_what_is_named_while_others_are_collected_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What must stay was found out before its fact was there."""
    async with leading(tmp_path, decides) as app:
        written, original = put(app.blobs, b"a state"), app.blobs.collect

        def collect(live: Collection[Digest], grace_s: float) -> list[Digest]:
            app.collector._named.append(written)  # as its fact would, on the event loop
            return original(live, grace_s)

        monkeypatch.setattr(app.blobs, "collect", collect)
        await app.collector.collect()
        assert app.blobs.exists(written)
        await app.collector.collect()
        assert not app.blobs.exists(written), "nobody has named it in earnest"


class Killed(Exception):
    """In the middle of the replay."""


@pytest.mark.parametrize("database", OVER_BOTH)
async def test_a_replay_that_is_killed_again_and_again_gets_to_its_end(
    journal_place: Callable[[str], str], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has ended is summed up on the way, so that nobody reads it twice."""
    place = journal_place(database)
    monkeypatch.setattr(loop_module, "SUMMED_UP_FACTS", 1)
    monkeypatch.setattr("stratagem.coordinator.store.fact_log.PAGE_FACTS", 10)
    number_of_runs, left = 12, [13]
    simulation = start(job_text(LOCAL), "a")
    simulation.run()
    journal = Journal.open(place)
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=10)
    _write(journal, lead.term, simulation.journal, number_of_runs)
    while left[-1] > 1:
        loop = Loop(journal, lead, BUILT_IN)
        pages = iter(range(3))

        def show(_facts: object, pages: Iterator[int] = pages) -> None:
            if next(pages, None) is None:
                raise Killed

        with suppress(Killed):
            await loop.replay(show)
        left.append(len((await loop.recorded.runs())[1]))
        assert left[-1] < left[-2]
        loop.recorded._thread.shutdown()
    assert len(left) > 3, "it was killed in between"
    loop = Loop(journal, lead, BUILT_IN)
    await loop.replay(lambda facts: None)
    assert len(loop.state.ended) == number_of_runs
    await loop.close()


def _write(journal: Journal, term: int, facts: Any, number_of_runs: int) -> None:
    cluster = [fact for fact in facts if not fact[0]]
    of_one = [fact for fact in facts if fact[0]]
    runs = {"": cluster} | {f"run-{number}": of_one for number in range(number_of_runs)}
    for run_id, each in runs.items():
        records = [
            Record(RunId(run_id), seq, kind, 1, payload, time_s, 0.0)
            for seq, (_, kind, payload, time_s) in enumerate(each)
        ]
        journal.append(term, records)


async def test_the_lead_is_kept_during_a_long_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a standby would take it, and begin the same replay."""
    async with twins(tmp_path, "a") as both:
        await _ended_runs(both, "run-1")
        await both.close()
        change(both.path, "DELETE FROM summary")
        journal = Journal.open(both.path)
        lead = journal.take_lead(Holder.of_this_process(), ttl_s=10)
        loop = Loop(journal, lead, BUILT_IN)
        renewed: list[object] = []
        monkeypatch.setattr(journal, "renew", renewed.append)
        await loop.replay(lambda facts: None, renew_every_s=0.0)
        assert renewed
        await loop.close()
        await both.open()
