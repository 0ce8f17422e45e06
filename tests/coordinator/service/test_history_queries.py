"""GetHistory: what is stored and what is in flight, coarsened to what is asked for."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.course.step_history import History
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.history import Recorder, Series
from stratagem.common.history.recording import pack
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.commands import JournalEntry, SubmitRun
from stratagem.coordinator.core.facts import RunResumed
from stratagem.coordinator.observe.history import SegmentTail, TailKey
from stratagem.coordinator.service.queries import HistoryQueries
from stratagem.coordinator.service.service import CoordinatorServicer
from stratagem.coordinator.store.fact_log import Committed
from stratagem.coordinator.store.step_history import HistoryRow, StepSpan
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import worker_pb2
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.open_gate import leading

RUN, ROOT, MEMBER = RunId("r-1"), Party(""), Party("member/3")
LOSS, NORM, WALL = Series("train.loss"), Series("train.grad_norm"), Series("time.wall_s", True)
"""Segments of 10 steps, of which a row stands for 4."""
STRIDE = 4
SPIKE = 17
FIRST = TailKey(RUN, ROOT, 0)


def rows(segment: int) -> bytes:
    recorder = Recorder(STRIDE, 10 * segment - 10)
    for step in range(10 * segment - 9, 10 * segment + 1):
        loss = 1000.0 if step == SPIKE else 1.0 / step
        recorder.add(step, [(LOSS, loss), (NORM, float(step)), (WALL, float(step))])
    return pack(recorder.end())


def stored(party: Party, segment: int) -> HistoryRow:
    return HistoryRow(RUN, party, segment, STRIDE, 10 * segment - 10, 10 * segment, rows(segment))


async def asked(app: App, root_segment: int = 3, **request: Any) -> History:
    wanted = pb.GetHistoryRequest(run_id=RUN, **request)
    return History.of([block async for block in HistoryQueries(app).blocks(wanted, root_segment)])


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    async with leading(tmp_path) as made:
        first, *others = [stored(ROOT, 1), stored(ROOT, 2), stored(ROOT, 3), stored(MEMBER, 1)]
        await made.loop.submit(SubmitRun(RUN, job_text(LOCAL), 0.0), [first])
        await made.loop.recorded.append((), (), others)
        part = worker_pb2.HistoryPart(number=0, from_step=30, rows=rows(4))
        made.history.add(FIRST, SegmentTail(4, STRIDE), part)
        yield made


async def test_segments_join_and_what_is_in_flight_is_provisional(app: App) -> None:
    history = await asked(app)
    assert list(history) == ["time.wall_s", "train.grad_norm", "train.loss"]
    loss = history["train.loss"]
    assert loss.step.tolist() == [*range(4, 41, 4)]
    assert loss.provisional.tolist() == [False] * 7 + [True] * 3
    assert (loss.count.sum(), loss.max.max()) == (40, 1000.0)
    assert [each.observed for each in history.values()] == [True, False, False]
    assert history.to_pandas().groupby("series")["count"].sum().to_dict() == {
        name: 40 for name in history
    }


async def test_what_is_asked_for_is_what_comes(app: App) -> None:
    assert list(await asked(app, series=["train.*"])) == ["train.grad_norm", "train.loss"]
    assert list(await asked(app, series=["nothing"])) == []
    assert list(await asked(app, parties=["nobody"])) == []
    assert list(await asked(app, parties=["member/*"], series=["train.loss"])) == [
        "member/3:train.loss"
    ]
    few = (await asked(app, max_rows=2, series=["train.loss"]))["train.loss"]
    assert (few.stride, len(few), few.max.max()) == (32, 2, 1000.0)
    part = (await asked(app, from_step=SPIKE, to_step=SPIKE))["train.loss"]
    assert (part.step.tolist(), part.max.tolist()) == ([20], [1000.0])


async def test_what_a_run_has_returned_from_is_not_shown(app: App) -> None:
    app.history.forget(RUN)
    assert (await asked(app, root_segment=2))["train.loss"].step[-1] == 20
    part = worker_pb2.HistoryPart(number=0, from_step=20, rows=rows(3))
    app.history.add(FIRST, SegmentTail(3, STRIDE), part)
    again = (await asked(app, root_segment=2))["train.loss"]
    assert again.count.sum() == 30
    assert again.step[again.provisional].tolist() == [24, 28, 30], "it is trained again"


async def test_a_run_that_returns_to_a_commit_forgets_what_all_parties_did_behind_it(
    app: App,
) -> None:
    recorded, silo = app.loop.recorded, Party("client2")
    await recorded.append((), (), [stored(silo, 1), stored(silo, 2)])
    await recorded.merge_history(RUN, has_ended=True)
    resumed = JournalEntry(RUN, RunResumed(from_segment=1, step=10, digest=Digest("d")))
    await recorded.append([Committed(resumed, 9, 0.0, 0.0)], ())
    history = await asked(app, root_segment=9, parties=["*"], series=["train.loss"])
    assert {each.party: each.step[-1] for each in history.values() if each.party} == {
        "member/3": 10,
        "client2": 10,
    }
    loss = history["train.loss"]
    assert loss.step[~loss.provisional].tolist() == [4, 8, 10]


async def test_merging_changes_no_row_that_is_shown(app: App) -> None:
    recorded = app.loop.recorded
    await recorded.append((), (), [stored(MEMBER, segment) for segment in range(2, 68)])

    async def seen() -> dict[str, bytes]:
        found = await asked(app, parties=["*"], series=["train.*"])
        return {name: each.columns.to_bytes() for name, each in found.items()}

    async def segments(party: Party) -> list[int]:
        return [row.segment for row in await recorded.history(RUN, party, StepSpan(), -1)]

    before = await seen()
    await recorded.merge_history(RUN, has_ended=False)
    assert (await segments(MEMBER), await segments(ROOT)) == ([64, 65, 66, 67], [1, 2, 3])
    assert await seen() == before
    await recorded.merge_history(RUN, has_ended=True)
    assert (await segments(MEMBER), await segments(ROOT)) == ([67], [3])
    assert await seen() == before
    app.history.forget(RUN)
    assert (await asked(app, root_segment=2))["train.loss"].step[-1] == 20


async def test_what_is_merged_while_it_is_read_comes_once(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = app.loop.recorded
    await recorded.append((), (), [stored(MEMBER, segment) for segment in range(2, 71)])
    read = recorded.history

    async def merged_behind_the_first_page(*args: Any) -> list[HistoryRow]:
        monkeypatch.setattr(recorded, "history", read)
        page = await read(*args)
        await recorded.merge_history(RUN, has_ended=True)
        return page

    monkeypatch.setattr(recorded, "history", merged_behind_the_first_page)
    loss = (await asked(app, parties=[MEMBER]))[f"{MEMBER}:train.loss"]
    assert (loss.count.sum(), loss.step[-1]) == (700, 700)


async def test_a_segment_that_has_ended_meanwhile_comes_once(app: App) -> None:
    await app.loop.recorded.append((), (), [stored(ROOT, 4)])
    loss = (await asked(app, root_segment=4))["train.loss"]
    assert loss.count.sum() == 40
    assert not loss.provisional.any()


async def test_a_run_that_ends_takes_its_tails_along_and_one_that_is_deleted_all(app: App) -> None:
    servicer = CoordinatorServicer(app)
    context: Any = None
    await servicer.CancelRun(pb.CancelRunRequest(run_id=RUN), context)
    assert app.history.tail(FIRST) is None
    await servicer.DeleteRun(pb.DeleteRunRequest(run_id=RUN), context)
    assert await app.loop.recorded.history_parties(RUN) == []


async def test_what_cannot_be_asked_is_refused(app: App) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_rows": 65_537}, "max_rows"),
        ({"series": ["x"] * 257}, "series"),
        ({"parties": ["x" * 257]}, "parties"),
        ({"from_step": 5, "to_step": 4}, "to_step"),
    ]
    for request, said in wrong:
        with pytest.raises(InvalidInputError, match=said):
            await asked(app, **request)
