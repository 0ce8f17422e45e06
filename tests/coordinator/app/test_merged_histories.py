"""Which runs are looked at for rows of the step history that can be merged, and when."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stratagem.common.base.ids import Party, RunId
from stratagem.common.history import Recorder, Series
from stratagem.common.history.recording import pack
from stratagem.coordinator.app.app import App
from stratagem.coordinator.app.keeping import House
from stratagem.coordinator.core.commands import CancelRun, DeleteRun, SubmitRun
from stratagem.coordinator.store import fact_log
from stratagem.coordinator.store.step_history import HistoryRow, StepSpan
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.open_gate import leading

pytestmark = pytest.mark.usefixtures("timeless")

ACTIVE, ENDED, ROOT = RunId("active"), RunId("ended"), Party("")


def row(run_id: RunId, segment: int) -> HistoryRow:
    recorder = Recorder(1, segment - 1)
    recorder.add(segment, [(Series("train.loss"), 1.0 / segment)])
    return HistoryRow(run_id, ROOT, segment, 1, segment - 1, segment, pack(recorder.end()))


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    """A coordinator with a run that is active and one that has ended, without chores under way."""
    async with leading(tmp_path, lambda app: app.loop.run(lambda facts: None)) as made:
        for run_id in (ACTIVE, ENDED):
            await made.loop.submit(SubmitRun(run_id, job_text(LOCAL), 0.0))
            await made.loop.recorded.append((), (), [row(run_id, i) for i in (1, 2, 3, 4)])
        await made.loop.submit(CancelRun(ENDED))
        yield made


@pytest.fixture
def looked_at(app: App, monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunId, bool]]:
    """The runs whose rows are looked at, and whether they count as ended."""
    seen: list[tuple[RunId, bool]] = []
    merge = app.loop.recorded.merge_history

    async def noted(run_id: RunId, *, has_ended: bool) -> None:
        seen.append((run_id, has_ended))
        await merge(run_id, has_ended=has_ended)

    monkeypatch.setattr(app.loop.recorded, "merge_history", noted)
    return seen


async def segments(app: App, run_id: RunId) -> list[int]:
    return [each.segment for each in await app.loop.recorded.history(run_id, ROOT, StepSpan(), -1)]


async def first_chores(house: House) -> None:
    """Do all chores as a coordinator does that has just taken the lead."""
    is_done = asyncio.Event()
    merge = house.merge_histories

    async def merged() -> None:
        await merge()
        is_done.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(House, "merge_histories", lambda _house: merged())
        keeping = asyncio.create_task(house.keep())
        await is_done.wait()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_run_that_ended_long_ago_is_not_looked_at_again(
    app: App, looked_at: list[tuple[RunId, bool]]
) -> None:
    house = app._house
    await house.merge_history(ENDED)
    assert await segments(app, ENDED) == [4]
    await house.merge_histories()
    assert looked_at == [(ENDED, True), (ACTIVE, False), (ENDED, True)]
    looked_at.clear()
    await house.merge_histories()
    assert looked_at == [(ACTIVE, False)]
    await app.loop.submit(DeleteRun(ENDED))
    await house.merge_history(ENDED)
    await house.merge_histories()
    assert looked_at == [(ACTIVE, False)] * 2, "of a run that is deleted there are no rows"


async def test_who_takes_the_lead_merges_what_the_leader_before_has_left(
    app: App, looked_at: list[tuple[RunId, bool]]
) -> None:
    await first_chores(app._house)
    assert await segments(app, ENDED) == [4]
    await app._house.merge_histories()
    await first_chores(app._house)
    assert looked_at == [(ACTIVE, False), (ENDED, True), (ACTIVE, False), (ACTIVE, False)]


async def test_what_ends_while_it_is_merged_is_looked_at_once_more(
    app: App, looked_at: list[tuple[RunId, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    house, merge = app._house, app.loop.recorded.merge_history

    async def ends_meanwhile(run_id: RunId, *, has_ended: bool) -> None:
        monkeypatch.setattr(app.loop.recorded, "merge_history", merge)
        await app.loop.submit(CancelRun(run_id))
        await house.merge_history(run_id)
        await merge(run_id, has_ended=has_ended)

    monkeypatch.setattr(app.loop.recorded, "merge_history", ends_meanwhile)
    await house.merge_histories()
    assert looked_at == [(ACTIVE, False)], "two that merge the same rows are in each other's way"
    await house.merge_histories()
    assert looked_at == [(ACTIVE, False), (ACTIVE, True)]
    assert await segments(app, ACTIVE) == [4]


async def test_of_an_active_run_the_rows_of_many_segments_become_one(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fact_log, "MERGED_SEGMENTS", 2)
    await app.loop.recorded.append((), (), [row(ACTIVE, 5)])
    await app._house.merge_histories()
    assert await segments(app, ACTIVE) == [2, 4, 5]
    await app.loop.recorded.append((), (), [row(ACTIVE, 6)])
    await app._house.merge_histories()
    assert await segments(app, ACTIVE) == [2, 4, 6]
